"""Calls on the emulated consumer Blackwell chip, whose kernels must multiply the numbers as they are."""

from typing import Any
from unittest import mock

from warpcheck.machine import SCHEDULES

from fa4.emulator import emulate
from fa4.runtime import dispatch
from fa4.runtime.choice import given
from fa4.runtime.spec import Operands
from fa4.sm120.fwd import plan as plans
from fa4.sm120.fwd.tiles import tiles_for
from tests.fp8.heads import noting_kernels


def run_multiplied(
    operands: Operands, problem: Any, arguments: dict[str, Any], seed: int, schedule: str | None = None, sms: int = 2,
    row: Any = None,
) -> Any:  # fmt: skip
    """(out, lse) of the kernel that multiplies these operands. row: replaces that of the table of tiles."""
    chooses = given(row) if row else None
    with (
        mock.patch.object(plans, "tiles_for", lambda *what: chooses or tiles_for(*what)),
        mock.patch.object(dispatch, "planned", dispatch.planned.__wrapped__),
        emulate("sm_120a", sms=sms, seed=seed, schedule=schedule or SCHEDULES[seed % len(SCHEDULES)]),
        noting_kernels() as taken,
    ):
        results = problem.call(**arguments)
    assert taken["native"] is operands
    return results
