"""Predicted time of an attention on a whole chip, from replays of problems that are emulated in seconds.

A long sequence has the steady state of a short one. Two lengths give the rate of a CTA; several tiles against one give
the cost of a tile. The grid is distributed over all multiprocessors by the tile schedule of the kernel. Small kernels
before and after the main kernel move memory: their time is a start and the time of their bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from warpcheck.timing.chips import ChipTable, chip_table
from warpcheck.timing.grid import CtaCost, Sample, TileScheduler, ordered_makespan
from warpcheck.timing.replay import Times, replay

from fa4.emulator.attention import PACKAGES, Problem, Shape, recorded, spec_of
from fa4.emulator.tile_schedule import TileSchedule, tile_schedule_of
from fa4.emulator.warp_mma import CHIPS as WARP_MMA_CHIPS
from fa4.emulator.warp_mma import replay_slots
from fa4.runtime import dispatch
from fa4.runtime.device import chip_by_target
from fa4.runtime.spec import AttentionSpec, ProblemSize

_TILE_N = 128  # keys of a CTA of the backward
_CUDNN = "cudnn-frontend"
_SMS = {"sm_100a": 2, "sm_90a": 1}  # emulated multiprocessors: a pair of CTAs has two
_CTAS = {256: 2, 512: 4}  # of a forward's cluster, by head dim, where every package has clusters
_ROWS = {
    ("sm_100a", 64): 256,
    ("sm_100a", 128): 256,
    ("sm_100a", 192): 256,
    ("sm_100a", 256): 128,
    ("sm_90a", 128): 128,
}  # of a CTA's tile
# Multiprocessors of a B200 that clusters of four reach: 34 clusters are resident (launch__cluster_max_active of Nsight
# Compute, in the sources of nvidia-cudnn-frontend 1.32.0).
_REACHED = {("sm_100a", 4): 136}
_CUDNN_ROWS = {("sm_100a", 256): 128, ("sm_100a", 512): 64}
_OWN_ROWS = _ROWS | {("sm_100a", head_dim): 64 for head_dim in (320, 512, 576)}
_CUDNN_WORKSPACE = 4 << 30  # bytes of S and dS of the heads that its backward computes at a time
_AUXILIARY = Shape(1024, 256, 1)  # replayed for the kernels before and after the main kernel
_MORE_KEYS = Shape(1024, 1024, 1)  # kernels that own queries have the grid of _AUXILIARY
_L2_GROUP_BYTES = 50 << 20  # shared by the heads of an L2 group of flash-attn-4


@dataclass(frozen=True)
class Prediction:
    """Predicted time of all kernels on the whole chip, one after the other.

    flops: over the unmasked pairs. clock: GHz. cost: of one CTA of the main kernel, which has the products. auxiliary:
    cycles of the kernels before and after it. busy: unit -> share of the steady state, the busiest first. times:
    replays of the main kernel. parts: of each main kernel, if there are several; the other fields but cycles are then
    those of the first, and `busy` is the mean by cycles. resident: CTAs that a multiprocessor holds.
    """

    cycles: float
    flops: float
    clock: float
    cost: CtaCost
    tiles: int
    scheduler: TileScheduler
    auxiliary: float
    busy: dict[str, float]
    times: tuple[Times, ...]
    parts: tuple[Prediction, ...] = ()
    resident: int = 1

    @staticmethod
    def together(parts: list[Prediction]) -> Prediction:
        """Return the prediction of several main kernels, one after the other."""
        first, cycles = parts[0], sum(part.cycles for part in parts)
        names = {name for part in parts for name in part.busy}
        busy = {name: sum(part.busy.get(name, 0) * part.cycles for part in parts) / cycles for name in names}
        busy = dict(sorted(busy.items(), key=lambda item: -item[1]))
        return dataclasses.replace(first, cycles=cycles, busy=busy, parts=tuple(parts)) if len(parts) > 1 else first

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
    """times: launches of the main kernel, one for each shape. auxiliary: the kernels before and after one launch.
    owns_queries: a CTA of a backward has a block of queries and iterates over keys; queries and keys of `shapes` are
    exchanged, so that keys are what a CTA owns. exchanged: bytes to or from device memory for each pair of a query and
    a key. cleared: bytes that kernels before it clear for each pair, masked ones too.
    """

    times: tuple[Times, ...]
    shapes: tuple[Shape, ...]
    auxiliary: tuple[Times, ...] = ()
    owns_queries: bool = False
    exchanged: int = 0
    cleared: float = 0.0

    @property
    def ctas(self) -> int:
        return math.prod(self.times[0].record.launch.cluster)

    @property
    def has_one_grid(self) -> bool:
        """Whether longer problems have more steps and not more CTAs."""
        return len({math.prod(times.record.launch.grid) for times in self.times[:2]}) == 1

    @property
    def takes_tiles(self) -> bool:
        """Whether CTAs take the tiles of CTAs that have not started."""
        return any(math.prod(times.record.launch.grid) > len(times.ends) for times in self.times)

    @property
    def backward_rows(self) -> int:
        """Return the rows of a cluster of a backward whose grid has a cluster for each tile."""
        shape, clusters = self.shapes[-1], math.prod(self.times[-1].record.launch.grid) // self.ctas
        return shape.keys * shape.heads // (clusters // self.column_tiles)

    @property
    def column_tiles(self) -> int:
        """Return the tiles of a block of rows, of which each has some columns: y of the grid of cuDNN's products."""
        launch, heads = self.times[-1].record.launch, self.shapes[-1].heads
        return launch.grid[1] // launch.cluster[1] if launch.grid[2] == heads else 1

    def samples(self, schedule: TileSchedule, problem: Problem) -> list[Sample]:
        """Return what the launches took, with the tiles of the schedule."""
        found = []
        for times, shape in zip(self.times, self.shapes):
            tiles = len(schedule.steps(problem.direction, shape.queries, shape.keys, problem.causal)) * shape.heads
            found.append(Sample.of(times, tiles * schedule.ctas // times.sms))
        return found

    def flops_a_step(self, schedule: TileSchedule, problem: Problem) -> float:
        """Return the FLOPs of a step per multiprocessor.

        Raises:
            RuntimeError: the kernel's tiles are not those of the schedule.
        """
        found = []
        for times, shape in zip(self.times, self.shapes):
            steps = sum(schedule.steps(problem.direction, shape.queries, shape.keys, problem.causal))
            found.append(times.flops / (steps * shape.heads * schedule.ctas))
        if not math.isclose(min(found), max(found), rel_tol=0.01):
            flops = ", ".join(f"{f:.4e}" for f in found)
            raise RuntimeError(f"the kernel's tiles are not those of its schedule: {flops} FLOPs per step")
        return found[0]


def predict(
    problem: Problem, chip: str = "sm_100a", package: str = "fa4", clock: float | None = None, *,
    timeline: bool = False, table: ChipTable | None = None, tiles: Any = None, backend: str = "auto",
) -> Prediction:  # fmt: skip
    """Predict self-attention with as many key/value heads as query heads, in bfloat16.

    package: a key of `attention.PACKAGES`. clock: GHz [default: the table's]. timeline: keep the intervals of each
    unit. table: [default: the chip's]. tiles: row of fa4's table of the direction [default: the problem's]. backend: of
    fa4. Both only on sm_120a and sm_121a.

    Raises:
        ValueError: no tiles are listed for the chip or head dim.
        RuntimeError: the kernel's tiles are not those of the schedule.
    """
    table = table or chip_table(chip)
    if chip in WARP_MMA_CHIPS:
        clock = clock or table.clock_of(problem.direction)
        return _of_slots(problem, table, package, clock, tiles, backend, timeline)
    if tiles is not None or backend != "auto" or problem.keys is not None:
        chips = " and ".join(WARP_MMA_CHIPS)
        raise ValueError(f"other tiles, backends and numbers of keys are predicted on {chips} only")
    if chip == "sm_90a" and (problem.causal or problem.direction == "bwd"):
        raise ValueError(f"causal forwards and backwards on {chip} are not predicted: tiles change with the length")
    rows = _rows_of(package)
    if (_like(chip), problem.head_dim) not in rows:
        listed = ", ".join(str(head_dim) for of_chip, head_dim in rows if of_chip == _like(chip)) or "none"
        raise ValueError(f"{package}: head_dim {problem.head_dim} on {chip} is not predicted, only {listed}")
    long = PACKAGES[package].long
    shortest = long if long is not None and problem.seqlen >= long else 0  # length with the problem's kernels
    small = dataclasses.replace(problem, batch=1, seqlen=shortest, heads=1)
    if problem.direction == "bwd":
        kernels = _backward(table, package, small, timeline)
        return Prediction.together(
            [_whole(problem, table, package, kernel, clock or table.clock_of("bwd")) for kernel in kernels]
        )
    if package == "fa4":
        forward = _plan(problem, chip)._forward
        cfg = forward.cfg
        every = max(cfg.rows, cfg.tile_n) if problem.causal else cfg.rows  # (causal tiles have whole steps)
        replayed = _forward(table, package, small, timeline, every, cfg.ctas, forward.tiles)
    else:
        ctas = _CTAS.get(problem.head_dim, 1)
        replayed = _forward(table, package, small, timeline, rows[_like(chip), problem.head_dim] * ctas, ctas)
    return _whole(problem, table, package, replayed, clock or table.clock_of(problem.direction))


def _of_slots(
    problem: Problem, table: ChipTable, package: str, clock: float, tiles: Any, backend: str, timeline: bool
) -> Prediction:
    """Predict kernels of which a multiprocessor may hold several CTAs."""
    if problem.deterministic and problem.direction == "bwd":
        raise ValueError(f"deterministic backwards on {table.chip} are not predicted")
    replays = replay_slots(problem, table, package, tiles, backend, timeline)
    auxiliary = sum(_by_bytes(times, problem, table, replays.shapes[1]) for times in replays.others)
    return Prediction(
        replays.cycles(problem, table.sms) + auxiliary, problem.flops, clock, CtaCost.fitted(replays.samples),
        len(replays.work(problem)), replays.schedule.scheduler, auxiliary,
        steady(replays.times, replays.samples, CtaCost.fitted), replays.times, resident=replays.schedule.resident,
    )  # fmt: skip


def _plan(problem: Problem, chip: str) -> Any:
    """Return the plan of fa4's kernels."""
    return plan_on(chip, spec_of(problem), ProblemSize(problem.batch, problem.seqlen, problem.seqlen))


def plan_on(chip: str, spec: AttentionSpec, extent: ProblemSize) -> Any:
    """Return fa4's plan of a problem on a chip of that name."""
    return dispatch.plan(spec, extent, chip_by_target(chip))


def _like(chip: str) -> str:
    """Return the chip with the same tiles and schedules that the tables of this module name."""
    return {"sm_103a": "sm_100a"}.get(chip, chip)


def _rows_of(package: str) -> dict[tuple[str, int], int]:
    return {_CUDNN: _CUDNN_ROWS, "fa4": _OWN_ROWS}.get(package, _ROWS)


def _schedule(problem: Problem, chip: str, package: str, replayed: _Replayed) -> TileSchedule:
    """Return the schedule of fa4's plan, or of another package's grid."""
    if package == "fa4":
        return tile_schedule_of(_plan(problem, chip), problem.direction)
    ctas, pairs = replayed.ctas, problem.batch * problem.heads
    if problem.direction == "fwd":
        l2_group = pairs if package == _CUDNN else min(pairs, _l2_group(problem))
        return TileSchedule(
            _rows_of(package)[_like(chip), problem.head_dim] * ctas, 128, TileScheduler.STATIC, l2_group, True, ctas
        )
    step = 256 if problem.head_dim == 256 else 128  # of queries, that a causal mask leaves out
    l2_group = 1 if package == _CUDNN else min(pairs, _l2_group(problem))
    # The first block of keys has most steps, the first block of queries the fewest.
    descending = problem.deterministic or replayed.owns_queries
    rows, columns = replayed.backward_rows, replayed.column_tiles
    return TileSchedule(rows, step, TileScheduler.STATIC, l2_group, descending, ctas, column_tiles=columns)


def _whole(problem: Problem, table: ChipTable, package: str, replayed: _Replayed, clock: float) -> Prediction:
    wait = table.numbers["replace"].value
    sms = _REACHED.get((table.chip, replayed.ctas), table.sms)
    each = len(replayed.times[-1].ends) > replayed.times[-1].sms  # the run with several tiles had one CTA per tile
    schedule = _schedule(problem, table.chip, package, replayed)
    a_step = replayed.flops_a_step(schedule, problem)
    samples = replayed.samples(schedule, problem)
    fit = CtaCost.of_each if each else CtaCost.fitted
    cost = fit(samples)
    if replayed.takes_tiles or (problem.causal and problem.direction == "fwd"):
        scheduler = TileScheduler.DYNAMIC
    else:
        scheduler = TileScheduler.PER_CTA if problem.direction == "bwd" else TileScheduler.STATIC
    schedule = dataclasses.replace(schedule, scheduler=TileScheduler.PER_CTA if each else scheduler)
    of_head = schedule.steps(problem.direction, problem.seqlen, problem.seqlen, problem.causal)
    work = [a_step * steps for steps in schedule.steps_of_grid(of_head, problem.batch * problem.heads)]
    if problem.direction == "bwd" and problem.deterministic and _adds_in_order(problem, table.chip, package):
        every = max(of_head)
        rows = [range(every - steps, every) for steps in of_head]
        tiles = (
            (sequence * problem.heads + head, of_tile)
            for sequence in range(problem.batch) for of_tile in rows for head in range(problem.heads)
        )  # fmt: skip
        interval = _add_interval(problem, schedule.ctas, table)
        cycles = ordered_makespan(tiles, schedule.slots(sms), cost, a_step, interval, wait)
    else:
        cycles = schedule.cycles(work, sms, cost, wait)
    busy = steady(replayed.times, samples, fit)
    if replayed.exchanged:
        least = replayed.exchanged * problem.pairs / table.sms / table.numbers["dram_bytes"].value
        computing, cycles = cycles, max(cycles, least)
        busy = {name: share * computing / cycles for name, share in busy.items()} | {"dram": least / cycles}
        busy = dict(sorted(busy.items(), key=lambda item: -item[1]))
    auxiliary = sum(_by_bytes(times, problem, table) for times in replayed.auxiliary)
    if replayed.cleared:
        cleared = replayed.cleared * problem.batch * problem.heads * problem.seqlen**2
        least = min(cleared, _CUDNN_WORKSPACE) / table.sms / table.numbers["dram_bytes"].value
        auxiliary += table.numbers["launch"].value + least
    return Prediction(
        cycles + auxiliary, problem.flops, clock, cost, len(work), schedule.scheduler, auxiliary, busy, replayed.times,
    )  # fmt: skip


def _adds_in_order(problem: Problem, chip: str, package: str) -> bool:
    """Whether CTAs of a deterministic backward wait for each other; not if each computes a block of dQ alone."""
    if package != "fa4":
        return package == "flash-attn-4" and problem.head_dim != 256
    return _plan(problem, chip)._backward.config(has_dlse=False).row_blocks.placement is not None


def _add_interval(problem: Problem, ctas: int, table: ChipTable) -> float:
    """Return the cycles between the starts of two CTAs' additions to a block of dQ: its bytes, and the semaphore."""
    numbers = {name: number.value for name, number in table.numbers.items()}
    added = 4 * problem.head_dim * 128 / ctas / numbers["reduce_bytes"] + numbers["tma_store_latency"]
    return added + numbers["atomic_latency"] + numbers["l2_latency"]


def _l2_group(problem: Problem) -> int:
    """Return the heads of an L2 group of flash-attn-4."""
    a_head = 2 * problem.seqlen * (problem.head_dim + problem.head_dim_v)
    if problem.direction == "bwd":
        if not problem.deterministic:
            return 1
        a_head += 4 * problem.seqlen * problem.head_dim
    return 1 << (max(1, _L2_GROUP_BYTES // a_head).bit_length() - 1)


def _by_bytes(times: Times, problem: Problem, table: ChipTable, shape: Shape = _AUXILIARY) -> float:
    """Return the cycles of a kernel that moves memory: its latency, and its bytes at the bandwidth of DRAM. shape: that
    was replayed."""
    rows = problem.batch * problem.heads * problem.seqlen
    moved = times.global_bytes * rows / (shape.queries * shape.heads) / table.sms
    numbers = table.numbers
    return numbers["launch"].value + times.cycles + moved / numbers["dram_bytes"].value


def _forward(
    table: ChipTable, package: str, problem: Problem, timeline: bool, rows: int, ctas: int, tiles: Any = None
) -> _Replayed:
    """Replay the forward. rows: of a tile; of a causal problem's unit, whole tiles. ctas: of a cluster. tiles: row of
    fa4's table."""
    sms = max(_SMS[_like(table.chip)], ctas)
    if problem.causal:
        shapes = [Shape(n * rows, n * rows, sms) for n in (2, 4, 6)]
    else:
        queries = sms // ctas * rows
        shapes = [Shape(queries, keys, heads) for keys, heads in ((1024, 1), (2048, 1), (1024, 2))]
    launched = [_replay(table, package, problem, shape, timeline, sms, tiles) for shape in shapes]
    return _Replayed(tuple(main for (main,) in launched), tuple(shapes))


def _backward(table: ChipTable, package: str, problem: Problem, timeline: bool) -> list[_Replayed]:
    """Replay the backward. Return its main kernels; the first one has the kernels before and after them."""
    base = _SMS[_like(table.chip)]
    sms = max(base, _CTAS[512]) if package == _CUDNN and problem.head_dim > 256 else base
    auxiliary = _replay(table, package, problem, _AUXILIARY, timeline, sms)
    of_main = next(times for times in auxiliary if times.flops)
    is_pair = math.prod(of_main.record.launch.cluster) > 1
    takes_tiles = _Replayed((of_main,), (_AUXILIARY,)).takes_tiles  # a tile then has a cost of its own
    if problem.causal:
        shapes = [Shape(n * base * _TILE_N, n * base * _TILE_N, base) for n in ((2, 4, 6) if takes_tiles else (2, 4))]
    elif is_pair:
        keys = sms * _TILE_N
        shapes = [Shape(512, keys, 1), Shape(1024, keys, 1), *[Shape(512, 2 * keys, 1)] * takes_tiles]
    else:  # one head per CTA: CTAs of one head wait for each other in a deterministic backward
        shapes = [Shape(queries, _TILE_N, sms) for queries in (512, 1024)]
    mains = _main_kernels(table, package, problem, shapes, timeline, sms)
    if len(mains) > 1 and not problem.causal:
        # A kernel whose CTAs own queries has more steps with more keys.
        swapped = [Shape(shape.keys, shape.queries, shape.heads) for shape in shapes]
        others = _main_kernels(table, package, problem, swapped, timeline, sms)
        mains = [
            main if main.has_one_grid else dataclasses.replace(other, shapes=tuple(shapes), owns_queries=True)
            for main, other in zip(mains, others)
        ]
    small = [times for times in auxiliary if not times.flops]
    if package == _CUDNN:
        more = _replay(table, package, problem, _MORE_KEYS, timeline, sms)
        mains = _exchanging(mains, auxiliary, more, PACKAGES[package].exchanged[problem.head_dim])
        small = [old for old, new in zip(auxiliary, more) if not old.flops and not _clears(old, new)]
    return [dataclasses.replace(mains[0], auxiliary=tuple(small)), *mains[1:]]


def _exchanging(
    mains: list[_Replayed], fewer: list[Times], more: list[Times], exchanged: tuple[int, ...]
) -> list[_Replayed]:
    """Return cuDNN's main kernels with what they own and exchange. fewer, more: launches with fewer and more keys."""
    found = []
    for main, times, of_pair in zip(mains, [pair for pair in zip(fewer, more) if pair[0].flops], exchanged):
        owns_queries = _Replayed(times, ()).has_one_grid
        found.append(dataclasses.replace(main, owns_queries=owns_queries, exchanged=of_pair))
    cleared = sum(new.global_bytes for old, new in zip(fewer, more) if not new.flops and _clears(old, new))
    pairs = _MORE_KEYS.queries * _MORE_KEYS.keys
    return [dataclasses.replace(found[0], cleared=cleared / pairs), *found[1:]]


def _clears(fewer: Times, more: Times) -> bool:
    """Whether a kernel without products writes to each pair of a query and a key: its bytes increase with the keys."""
    return more.global_bytes > 2 * fewer.global_bytes


def _main_kernels(
    table: ChipTable, package: str, problem: Problem, shapes: list[Shape], timeline: bool, sms: int
) -> list[_Replayed]:
    """Replay the kernels that have products."""
    launched = [_replay(table, package, problem, shape, timeline, sms) for shape in shapes]
    mains = zip(*([times for times in found if times.flops] for found in launched))
    return [_Replayed(times, tuple(shapes)) for times in mains]


def _replay(
    table: ChipTable, package: str, problem: Problem, shape: Shape, timeline: bool, sms: int, tiles: Any = None
) -> list[Times]:
    records = recorded(table.chip, package, problem, sms, shape, tiles)
    return [replay(record, chip=table, timeline=timeline) for record in records]


def steady(
    launches: Sequence[Times], samples: Sequence[Sample], fit: Callable[[list[Sample]], CtaCost]
) -> dict[str, float]:
    """Return the shares of the units in the steady state: the cycles a FLOP of a unit over those of a CTA.

    samples: of the launches. fit: of the cost of a CTA.
    """
    rate, found = fit(list(samples)).rate, {}
    for name in launches[-1].shares():
        busy = [times.shares().get(name, 0) * times.cycles for times in launches]
        if any(busy):
            found[name] = min(1.0, rate / fit([dataclasses.replace(s, cycles=b) for s, b in zip(samples, busy)]).rate)
    return dict(sorted(found.items(), key=lambda item: -item[1]))
