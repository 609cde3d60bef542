"""Grids: until the last SM has its CTA, until an SM has its next one, and between two grids with and without PDL."""

from __future__ import annotations

import itertools

import torch

from .frame import Bench, Section

SPINS = 4000  # of a loop that keeps a CTA busy for about 30 us, so that launches queue up behind it
WAVES = 4  # CTAs of an SM, one after the other
_WHOLE_SM = 120 * 1024  # bytes of shared memory of which no two CTAs fit

# Which SM: in the place of a section's clocks.
_WHERE = "mov.u32 sm, %smid; cvt.u64.u32 t, sm; @first st.global.b64 [row], t;"
_BUSY = """
    @!first bra REST;
    mov.b32 spin, 0;
    SPIN: add.u32 spin, spin, 1; setp.lt.u32 p, spin, limit; @p bra SPIN;
    REST: bar.sync 0;
"""


def _bench(name: str, *, waves: int = 1, launches: int = 1, before: str = "", pdl: bool = False) -> Bench:
    def initial() -> torch.Tensor:
        return torch.tensor([SPINS, 0], dtype=torch.int32)

    def expected(data: torch.Tensor, rounds: int) -> torch.Tensor:
        return data  # the number of CTAs is the machine's: `run` looks at it

    return Bench(
        name, (Section("SM", 1, "number"),), _WHERE + _BUSY, initial, expected,
        declared=".reg .b32 sm, spin, limit;", before=f"{before} ld.global.b32 limit, [data];",
        after="@first red.global.add.u32 [data+4], 1;", ctas=-waves, smem_bytes=_WHOLE_SM, rounds=1, pdl=pdl,
        launches=launches,
    )  # fmt: skip


RAMP = _bench("launch of one CTA for each SM")
REPLACE = _bench(f"launch of {WAVES} CTAs for each SM", waves=WAVES)
PLAIN = _bench("grids one after another", launches=6)
PDL = _bench(
    "grids one after another, with PDL", launches=6, pdl=True,
    before="griddepcontrol.launch_dependents; griddepcontrol.wait;",
)  # fmt: skip
BENCHES = (RAMP, REPLACE, PLAIN, PDL)


def nanoseconds(bench: Bench, times: torch.Tensor, ends: torch.Tensor) -> dict[str, list[float]]:
    """Samples by what they are. times (launches, CTAs, 1, 1): SMs; ends (launches, CTAs, 4): clocks of the CTAs."""
    begun, ended = ends[..., 1].double(), ends[..., 3].double()
    found = {"from the first CTA's start to the last's": (begun.amax(1) - begun.amin(1)).tolist()}
    if bench is REPLACE:
        found = {"from an SM's CTA to its next": _replaced(times[0, :, 0, 0].tolist(), begun[0], ended[0])}
    if bench.launches > 1:
        found["from a grid's end to the next's start"] = (begun[1:].amin(1) - ended[:-1].amax(1)).tolist()
    return found


def _replaced(sms: list[int], begun: torch.Tensor, ended: torch.Tensor) -> list[float]:
    by_sm: dict[int, list[int]] = {}
    for cta in begun.argsort().tolist():
        by_sm.setdefault(sms[cta], []).append(cta)
    return [float(begun[b] - ended[a]) for ctas in by_sm.values() for a, b in itertools.pairwise(ctas)]
