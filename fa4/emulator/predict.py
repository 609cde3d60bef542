"""How long would an attention take on a whole chip? From replays of problems that a laptop emulates in seconds.

The steady state of a long sequence is that of a short one: two lengths give the rate of a CTA, several tiles against
one what a tile costs besides, and the grid is handed out over all multiprocessors as the kernel hands it out. Small
kernels around the one with the products move memory: they take what their bytes take, and a start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import replace as but
from typing import Any

from warpcheck.timing.chips import ChipTable, chip_table
from warpcheck.timing.grid import CtaCost, Handing, Sample, chain
from warpcheck.timing.replay import Times, replay

from fa4.emulator.attention import Problem, Shape, recorded, spec_of
from fa4.emulator.walk import Walk, walk_of
from fa4.runtime import dispatch
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import ProblemSize

_SPAN = 128  # keys of a CTA of the backward
_SMS = {"sm_100a": 2, "sm_90a": 1}  # that are emulated: a pair of CTAs has two
_ROWS = {("sm_100a", 64): 256, ("sm_100a", 128): 256, ("sm_100a", 192): 256, ("sm_90a", 128): 128}  # of a CTA's tile
_AROUND = Shape(1024, 256, 1)  # in which the kernels around the main one are replayed
_SECTION_BYTES = 50 << 20  # of what heads of flash-attn-4 that advance together share


@dataclass(frozen=True)
class Prediction:
    """cycles: of all kernels on the whole chip, one after the other. flops: over the visible pairs. clock: GHz. cost:
    of one CTA of the kernel with the products. around: cycles of the kernels before and after it. busy: unit -> share
    of the steady state, the busiest first. times: the replays behind it."""

    cycles: float
    flops: float
    clock: float
    cost: CtaCost
    tiles: int
    handing: Handing
    around: float
    busy: dict[str, float]
    times: tuple[Times, ...]

    @property
    def milliseconds(self) -> float:
        return self.cycles / self.clock / 1e6

    @property
    def tflops(self) -> float:
        return self.flops / self.milliseconds / 1e9

    @property
    def bound(self) -> str:
        name, share = next(iter(self.busy.items()))
        return f"{name} {share:.0%}"


@dataclass(frozen=True)
class _Replayed:
    """times: launches of the kernel with the products, on each of the shapes. around: the kernels before and after one
    of them."""

    times: tuple[Times, ...]
    shapes: tuple[Shape, ...]
    around: tuple[Times, ...]

    @property
    def ctas(self) -> int:
        return math.prod(self.times[0].record.launch.cluster)

    def tiles(self, times: Times) -> int:
        """Of a multiprocessor (or pair), if each has a CTA."""
        return math.prod(times.record.launch.grid) // times.sms

    def flops_a_step(self, walk: Walk, problem: Problem) -> float:
        """Of a multiprocessor.

        Raises:
            RuntimeError: the kernel's tiles are not those of the walk.
        """
        found = []
        for times, shape in zip(self.times, self.shapes):
            steps = sum(walk.steps(problem.direction, shape.queries, shape.keys, problem.causal))
            found.append(times.flops / (steps * shape.heads * walk.ctas))
        if not math.isclose(min(found), max(found), rel_tol=0.01):
            raise RuntimeError(f"the tiles are other ones: {', '.join(f'{f:.4e}' for f in found)} FLOPs a step")
        return found[0]


def predict(
    problem: Problem, chip: str = "sm_100a", package: str = "fa4", clock: float | None = None, *,
    timeline: bool = False, table: ChipTable | None = None,
) -> Prediction:  # fmt: skip
    """Self-attention with as many key/value heads as query heads, bfloat16.

    package: of `attention.PACKAGES`. clock: GHz [default: the table's]. timeline: keep what each unit did in the
    replays. table: [default: the chip's].

    Raises:
        ValueError: a chip or head dim whose tiles this does not know.
        RuntimeError: the kernel's tiles are not what this takes them for.
    """
    table = table or chip_table(chip)
    if chip == "sm_90a" and (problem.causal or problem.direction == "bwd"):
        raise ValueError(f"causal forwards and backwards on {chip} are not predicted: tiles change with the length")
    if (chip, problem.head_dim) not in _ROWS:
        raise ValueError(f"head_dim {problem.head_dim} on {chip} is not predicted, only {', '.join(map(str, _ROWS))}")
    small = but(problem, batch=1, seqlen=0, heads=1)
    if problem.direction == "bwd":
        replayed = _backward(table, package, small, timeline)
    elif package == "fa4":
        forward = _plan(problem, chip)._forward
        replayed = _forward(table, package, small, timeline, forward.cfg.rows, forward.tiles)
    else:
        replayed = _forward(table, package, small, timeline, _ROWS[chip, problem.head_dim])
    return _whole(problem, table, package, replayed, clock or table.clock_of(problem.direction))


def _plan(problem: Problem, chip: str) -> Any:
    """Of our kernels."""
    extent = ProblemSize(problem.batch, problem.seqlen, problem.seqlen)
    number = int(chip.removeprefix("sm_").removesuffix("a"))
    return dispatch.plan(spec_of(problem), extent, chip_by_number(number))


def _walk(problem: Problem, chip: str, package: str, ctas: int) -> Walk:
    """Of our kernels as their plan has it; of flash-attn-4's as its tables say. ctas: of a cluster."""
    if package == "fa4":
        return walk_of(_plan(problem, chip), problem.direction)
    rows = _SPAN if problem.direction == "bwd" else _ROWS[chip, problem.head_dim]
    descending = problem.direction == "fwd" or problem.deterministic
    section = min(problem.batch * problem.heads, _section(problem))
    return Walk(rows * ctas, 128, Handing.STATIC, section, descending, ctas)


def _whole(problem: Problem, table: ChipTable, package: str, replayed: _Replayed, clock: float) -> Prediction:
    wait = table.numbers["replace"].value
    each = len(replayed.times[-1].ends) > replayed.times[-1].sms  # the run with several tiles had a CTA for each
    walk = _walk(problem, table.chip, package, replayed.ctas)
    a_step = replayed.flops_a_step(walk, problem)
    if problem.causal:
        samples = [Sample.of(times, replayed.tiles(times)) for times in replayed.times]
    else:
        samples = [Sample.of(times, 1 + (i == 2)) for i, times in enumerate(replayed.times)]
    cost = CtaCost.of_each(samples) if each else CtaCost.fitted(samples)
    handing = Handing.EACH if each or problem.direction == "bwd" else Handing.STATIC
    if not each and problem.causal:
        handing = Handing.TAKEN
    walk = but(walk, handing=handing)
    of_head = walk.steps(problem.direction, problem.seqlen, problem.seqlen, problem.causal)
    work = [a_step * steps for steps in walk.handed_out(of_head, problem.batch * problem.heads)]
    if problem.direction == "bwd" and problem.deterministic:
        every = max(of_head)
        rows = [range(every - steps, every) for steps in of_head]
        tiles = (
            (sequence * problem.heads + head, of_tile)
            for sequence in range(problem.batch) for of_tile in rows for head in range(problem.heads)
        )  # fmt: skip
        cycles = chain(tiles, walk.places(table.sms), cost, a_step, _turn(problem, walk.ctas, table), wait)
    else:
        cycles = walk.cycles(work, table.sms, cost, wait)
    around = sum(_by_bytes(times, problem, table) for times in replayed.around)
    return Prediction(
        cycles + around, problem.flops, clock, cost, len(work), handing, around,
        _steady(replayed.times[0], replayed.times[1]), replayed.times,
    )  # fmt: skip


def _turn(problem: Problem, ctas: int, table: ChipTable) -> float:
    """Cycles from when an addition to a block of dQ begins to when the next CTA's may: its bytes, and a flag."""
    numbers = {name: number.value for name, number in table.numbers.items()}
    added = 4 * problem.head_dim * 128 / ctas / numbers["reduce_bytes"] + numbers["tma_store_latency"]
    return added + numbers["atomic_latency"] + numbers["l2_latency"]


def _section(problem: Problem) -> int:
    """Heads of flash-attn-4 whose tiles advance together: what they share fits in L2."""
    a_head = 2 * problem.seqlen * (problem.head_dim + problem.head_dim_v)
    if problem.direction == "bwd":
        if not problem.deterministic:
            return 1
        a_head += 4 * problem.seqlen * problem.head_dim
    return 1 << (max(1, _SECTION_BYTES // a_head).bit_length() - 1)


def _by_bytes(times: Times, problem: Problem, table: ChipTable) -> float:
    """Cycles of a kernel that moves memory: its latency, and its bytes at what DRAM gives."""
    rows = problem.batch * problem.heads * problem.seqlen
    moved = times.global_bytes * rows / _AROUND.queries / table.sms
    numbers = table.numbers
    return numbers["launch"].value + times.cycles + moved / numbers["dram_bytes"].value


def _forward(
    table: ChipTable, package: str, problem: Problem, timeline: bool, rows: int, tiles: Any = None
) -> _Replayed:
    """rows: of a work tile. tiles: of ours."""
    sms = max(_SMS[table.chip], 1 if tiles is None else tiles.ctas)
    if problem.causal:
        shapes = [Shape(n * rows, n * rows, sms) for n in (2, 4, 6)]
    else:
        every = sms * _ROWS[table.chip, problem.head_dim]
        shapes = [Shape(every, keys, heads) for keys, heads in ((1024, 1), (2048, 1), (1024, 2))]
    launched = [_replay(table, package, problem, shape, timeline, sms, tiles) for shape in shapes]
    return _Replayed(tuple(main for (main,) in launched), tuple(shapes), ())


def _backward(table: ChipTable, package: str, problem: Problem, timeline: bool) -> _Replayed:
    sms = _SMS[table.chip]
    around = _replay(table, package, problem, _AROUND, timeline, sms)
    is_pair = math.prod(next(times for times in around if times.flops).record.launch.cluster) > 1
    if problem.causal:
        shapes = [Shape(n * sms * _SPAN, n * sms * _SPAN, sms) for n in (2, 4)]
    elif is_pair:
        shapes = [Shape(512, sms * _SPAN, 1), _AROUND]
    else:  # of heads of their own: CTAs of one head wait for each other where their order is fixed
        shapes = [Shape(queries, _SPAN, sms) for queries in (512, 1024)]
    launched = [_replay(table, package, problem, shape, timeline, sms) for shape in shapes]
    mains = tuple(next(times for times in found if times.flops) for found in launched)
    return _Replayed(mains, tuple(shapes), tuple(times for times in around if not times.flops))


def _replay(
    table: ChipTable, package: str, problem: Problem, shape: Shape, timeline: bool, sms: int, tiles: Any = None
) -> list[Times]:
    records = recorded(table.chip, package, problem, sms, shape, tiles)
    return [replay(record, chip=table, timeline=timeline) for record in records]


def _steady(short: Times, long: Times) -> dict[str, float]:
    """Shares of the time by which a longer run is longer."""
    cycles = long.cycles - short.cycles
    before, after = short.shares(), long.shares()
    found = {name: (share * long.cycles - before.get(name, 0) * short.cycles) / cycles for name, share in after.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
