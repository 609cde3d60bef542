"""Which of our kernels' cycles are measured and predicted: shapes, tiles, and the calls that launch them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.suites import BenchCase, made_tensors, square
from fa4.runtime.device import Chip
from fa4.runtime.spec import AttentionInputs, AttentionSpec, ProblemSize, Saved
from fa4.torch_ops import run

from . import skeletons

BACKENDS = ("sm80", "sm90")
SHAPES = (  # sequence, head dim, causal
    (1024, 128, False), (4096, 128, False), (16384, 128, False), (1024, 128, True), (4096, 128, True),
    (16384, 128, True), (4096, 64, False), (4096, 64, True),
)  # fmt: skip
STEADY = (2048, 4096)  # rows that one CTA goes through
ALONE = "alone,"  # one CTA, of which parts are left out
TABLE = "table"  # the tiles that the table names
HELD_OUT = "held out"  # these too, of shapes that nobody had measured when their cycles were predicted
HELD_SHAPES = (  # sequence, head dim, causal
    (2048, 128, False), (8192, 128, True), (8192, 64, False), (2048, 64, True), (4096, 96, False), (8192, 96, True),
)  # fmt: skip
HELD_OUT_NEXT = "held out next"  # likewise, after the first ones had been looked at
NEXT_SHAPES = (  # sequence, head dim, causal
    (8192, 128, False), (2048, 128, True), (1024, 64, False), (16384, 64, True), (2048, 96, False), (4096, 96, True),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call. variant: what its tiles are. changes: of the row that the table names. lacks: of `skeletons`, what is
    left out."""

    backend: str
    shape: BenchCase
    variant: str = TABLE
    changes: tuple[tuple[str, Any], ...] = ()
    deterministic: bool = False
    lacks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.backend} {self.shape.label}, {self.variant}"


def _steady(direction: str, length: int, head_dim: int = 128) -> BenchCase:
    """128 rows of one side and `length` of the other: one CTA, alone on the chip."""
    rows, keys = (128, length) if direction == "fwd" else (length, 128)
    return BenchCase(direction, 1, rows, keys, 1, 1, head_dim, head_dim, False)


def _variants(backend: str, direction: str) -> dict[str, dict[str, Any]]:
    """Changes of the row for head dim 128 without a mask, by what they are called."""
    found = (_portable if backend == "sm80" else _hopper)(direction)
    return {
        ", ".join(f"{name} {getattr(value, 'name', value)}".lower() for name, value in changes.items()): changes
        for changes in found
    }


def _hopper(direction: str) -> list[dict[str, Any]]:
    from fa4.fwd.variant import Schedule

    if direction == "fwd":
        heights: list[dict[str, Any]] = [{"tile_n": n} for n in (64, 80, 96, 112, 160)]
        others = [{"ping_pong": False}, {"schedule": Schedule.SINGLE}, {"most_stages": 1}]
        return [*heights, *others, {"tile_n": 64, "ping_pong": False}, {"consumers": 3, "tile_n": 64}]
    rings = [{"tile_m": 64, name: n} for name in ("q_stages", "stages") for n in (1, 3)]
    return [{"tile_m": 64}, *rings, {"tile_m": 64, "ds_stages": 3}]


def _portable(direction: str) -> list[dict[str, Any]]:
    columns: tuple[str, ...]
    rows: list[tuple]
    if direction == "fwd":
        columns = ("tile_m", "tile_n", "warps", "stages", "blocks_per_sm")
        rows = [
            (128, 64, 4, 2, 1), (64, 64, 4, 1, 2), (128, 64, 8, 1, 1), (128, 128, 8, 1, 1), (256, 64, 8, 1, 1),
            (128, 32, 4, 1, 2), (64, 128, 4, 1, 2),
        ]  # fmt: skip
    else:
        columns = ("tile_m", "tile_n", "stages", "blocks_per_sm", "warps_s", "warps_kv", "warps_q")
        rows = [
            (64, 64, 1, 2, (2, 2), (2, 2), (2, 2)), (64, 64, 2, 1, (2, 4), (2, 4), (2, 4)),
            (64, 128, 1, 1, (2, 4), (4, 2), (2, 4)),
        ]  # fmt: skip
    return [dict(zip(columns, row)) for row in rows]


def cases() -> Iterator[Case]:
    """All of them: the shapes with the table's tiles, CTAs alone, variants of one shape, what is held out, and
    skeletons."""
    for backend in BACKENDS:
        for direction in ("fwd", "bwd"):
            for seqlen, head_dim, causal in SHAPES:
                yield Case(backend, square(direction, seqlen, head_dim, causal))
            yield from (Case(backend, _steady(direction, length)) for length in STEADY)
            if direction == "bwd":
                yield Case(backend, square("bwd", 4096, 128, False), "deterministic", deterministic=True)
            for name, changes in _variants(backend, direction).items():
                yield Case(backend, square(direction, 4096, 128, False), name, tuple(changes.items()))
    for variant, shapes in ((HELD_OUT, HELD_SHAPES), (HELD_OUT_NEXT, NEXT_SHAPES)):
        for backend in BACKENDS:
            for direction in ("fwd", "bwd"):
                for seqlen, head_dim, causal in shapes:
                    yield Case(backend, square(direction, seqlen, head_dim, causal), variant)
    for head_dim in (128, 64):
        for parts in skeletons.LEFT_OUT:
            yield Case("sm90", square("fwd", 4096, head_dim, False), f"without {' and '.join(parts)}", lacks=parts)
    for backend in BACKENDS:
        for head_dim in (64, 96, 128):
            for parts in skeletons.LEFT_OUT_BACKWARD:
                variant = f"{ALONE} without {' and '.join(parts) or 'nothing'}"
                yield Case(backend, _steady("bwd", STEADY[-1], head_dim), variant, lacks=parts)


def inputs_of(shape: BenchCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionInputs:
    return AttentionInputs(q, k, v, max_seqlen_q=shape.seqlen_q, max_seqlen_k=shape.seqlen_k)


def spec_of(case: Case) -> AttentionSpec:
    shape = case.shape
    return AttentionSpec(
        torch.bfloat16, shape.head_dim, shape.head_dim_v, shape.heads_q, shape.heads_kv, shape.head_dim**-0.5,
        window_right=0 if shape.causal else None, needs_backward=shape.direction == "bwd",
        deterministic=case.deterministic, num_splits=1,
    )  # fmt: skip


def tiles_of(case: Case, chip: Chip, extent: ProblemSize) -> Any:
    """The row of tiles: the table's, with the case's changes."""
    import fa4.sm80.tiles as portable
    import fa4.sm90.bwd.tiles as backward
    import fa4.sm90.fwd.tiles as forward

    is_forward, dims = case.shape.direction == "fwd", (case.shape.head_dim, case.shape.head_dim_v)
    if case.backend == "sm80":
        rows = case.shape.seqlen_q
        choice: Any = portable.forward_tiles(*dims, chip, rows) if is_forward else portable.backward_tiles(*dims, chip)
        row = choice.row
    else:
        row = (forward if is_forward else backward).tiles_for(spec_of(case), chip, extent).row
        if is_forward and row.ctas > 1:  # one multiprocessor is emulated, and what was measured were CTAs alone
            row = dataclasses.replace(row, ctas=1, ping_pong=True)
    return dataclasses.replace(row, **dict(case.changes))


def plan_of(case: Case, chip: Chip, extent: ProblemSize, tiles: Any) -> Any:
    """The backend's plan with these tiles."""
    import fa4.sm80.plan as portable
    import fa4.sm90.plan as hopper

    make = portable.Plan if case.backend == "sm80" else hopper.Plan
    name = "forward_tiles" if case.shape.direction == "fwd" else "backward_tiles"
    return make(spec_of(case), extent, chip, **{name: tiles})


def call(case: Case, chip: Chip, tensors: tuple[torch.Tensor, ...]) -> Callable[[], object] | None:
    """The case on q, k, v, dout of its shape; a backward after a forward that ran once. None where the variant is what
    the table names.

    Raises:
        Exception: the tiles do not fit, or the compiler refuses them.
    """
    q, k, v, dout = tensors
    inputs, spec = inputs_of(case.shape, q, k, v), spec_of(case)
    tiles = tiles_of(case, chip, inputs.extent)
    if case.changes and tiles == tiles_of(dataclasses.replace(case, changes=()), chip, inputs.extent):
        return None
    plan = plan_of(case, chip, inputs.extent, tiles)
    if case.shape.direction == "fwd":
        return lambda: run.forward(inputs, spec, plan)
    saved = Saved(*run.forward(inputs, spec, plan), dout)
    return lambda: run.backward(inputs, spec, plan, saved)


def tensors(case: Case, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout, random."""
    return tuple(x.detach() for x in made_tensors(case.shape, device, seed=0))
