"""The backend that a row's call gets on a chip, without a launch."""

from __future__ import annotations

from typing import Any
from unittest import mock

from fa4.kvcache import append
from fa4.runtime import dispatch
from fa4.runtime.device import chip_by_number, emulating
from tests.covering.model import Row
from tests.covering.run import BUILD
from tests.forget import forget_calls

NUMBERS = {"sm80": 80, "sm90": 90, "sm100": 100, "sm120": 120}  # of the chips whose own backends these are


class _Landed(BaseException):
    """The dispatcher's choice, before anything is planned."""


def landing(surface: str, row: Row, seed: int, number: int) -> str:
    """Name of the backend on compute capability `number`; "" if the call has nothing to compute."""
    select = dispatch.select

    def land(*arguments: Any, **named: Any) -> Any:
        raise _Landed(select(*arguments, **named).name)

    call = BUILD[surface](row, seed)
    forget_calls()
    in_torch = mock.patch.object(append, "_launcher", lambda *_: None)  # new rows of a cache, which are appended first
    with mock.patch.object(dispatch, "select", land), in_torch, emulating(chip_by_number(number, emulated=True)):
        try:
            call.run()
        except _Landed as landed:
            return str(landed)
    return ""
