"""The waits between CTAs of an ordered backward, simulated on the host from the order code that kernels run.

A chip launches CTAs in the order of their index, each when a resident CTA ends. `walks` evaluates the kernel's own
`work_tile`, `Work.block` and `Work.order_index` for every CTA, or with a block mask its lists and
`order_index_by_lists`; `run` executes these walks with any number of resident CTAs.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import random
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cutlass

from fa4.bwd.device.work import order_index_by_lists
from fa4.core.mask import Band
from fa4.core.order import Order
from fa4.core.sequence import Lengths
from fa4.runtime import dsl
from fa4.sm80.config import Sm80BackwardConfig as Portable
from fa4.sm90.bwd.common import work as hopper
from fa4.sm100.bwd import work as blackwell
from fa4.sm100.bwd.config import Sm100BackwardConfig as Blackwell

_MODULES = (
    "fa4.core.mask", "fa4.core.order", "fa4.core.sequence", "fa4.bwd.device.work",
    "fa4.sm90.bwd.common.work", "fa4.sm100.bwd.work",
)  # fmt: skip
Addition = tuple[Hashable, int]  # (counter, order index): a CTA adds when the counter has reached the index
Walk = list[Addition]


class NoProgress(AssertionError):
    """All resident CTAs wait."""


@contextlib.contextmanager
def on_the_host() -> Iterator[None]:
    """Device code of schedules computes with Python numbers inside."""
    with contextlib.ExitStack() as stack:
        for name in _MODULES:
            stack.enter_context(mock.patch.object(importlib.import_module(name), "Int32", int))
        stack.enter_context(mock.patch.object(dsl.cutlass, "Int32", int))  # of configurations
        stack.enter_context(mock.patch.object(cutlass, "select_", lambda which, a, b: a if which else b))
        yield


@dataclass(frozen=True)
class Problem:
    """A batch of sequences of one length, or, if given, of `lengths` (queries, keys) each. states: with a block mask,
    for each of its blocks of queries and each of keys 0 if it is in no list, 1 if it is to be masked, 2 if it is seen
    whole."""

    seqlen_q: int
    seqlen_k: int
    heads_kv: int = 1
    batch: int = 1
    left: int | None = None
    right: int | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    states: tuple[tuple[int, ...], ...] = ()

    @property
    def seqused(self) -> Lengths:
        sides = zip(*self.lengths) if self.lengths else (None, None)
        return Lengths(None, None, *sides)


class _Here(Order):
    """An order that says which CTA asks."""

    index = 0

    def here(self):
        return self.at(self.index)

    @property
    def rank(self):
        return 0


def order_of(cfg: Any, problem: Problem) -> Order:
    """As `begin` of the kernels makes it."""
    n_blocks, pairs = -(-problem.seqlen_k // cfg.cluster_tile_n), problem.heads_kv * problem.batch
    l2_group = cfg.l2_group(n_blocks, problem.seqlen_q, pairs)
    if isinstance(cfg, Portable):
        return Order(n_blocks, problem.heads_kv, problem.batch, l2_group)
    wave = cfg.wave(n_blocks, l2_group, pairs)
    return Order(n_blocks, problem.heads_kv, problem.batch, l2_group, cfg.descending, cfg.ctas, wave)


def walks(cfg: Any, problem: Problem, chains: int = 1) -> list[Walk]:
    """What every CTA (or cluster) adds to, in the order of launches and of its steps. chains: sums of dQ of a query
    block, if `cfg` is chained."""
    with on_the_host():
        order = order_of(cfg, problem)
        if problem.states:
            return [_listed_walk(cfg, problem.states, order.at(index)) for index in range(order.tiles)]
        if isinstance(cfg, Portable):
            return [_portable_walk(cfg, problem, order.at(index)) for index in range(order.tiles)]
        here = _Here(**{field.name: getattr(order, field.name) for field in fields(Order)})
        args = SimpleNamespace(
            order=here, lengths=problem.seqused, seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k,
            left=problem.left, right=problem.right, dq_sum=SimpleNamespace(shape=(None, None, None, chains)),
        )  # fmt: skip
        context, found = SimpleNamespace(cfg=cfg, args=args), []
        for index in range(order.tiles):
            object.__setattr__(here, "index", index)
            work = (blackwell if isinstance(cfg, Blackwell) else hopper).work_tile(context)
            found.append([])
            for member in range(cfg.group):
                of_head, head = work.of_head(context, member), work.head_kv * cfg.group + member
                steps = (of_head.block(i) for i in range(of_head.first, of_head.stop))
                at = (work.batch, head, order.at(index).block % chains)
                found[-1] += [((*at, m), of_head.order_index(m, head, context)) for m in steps]
    return found


def _portable_walk(cfg: Portable, problem: Problem, tile: Any) -> Walk:
    """As `sm80.backward_tile` computes it: from the last query block to the first, key blocks ascending."""
    rows_q, rows_k = (rows.count for rows in (
        problem.seqused.queries(tile.sequence, problem.seqlen_q), problem.seqused.keys(tile.sequence, problem.seqlen_k)
    ))  # fmt: skip
    mask = Band(cfg.tiles.tile_m, cfg.tiles.tile_n, rows_q, rows_k, problem.left, problem.right, cfg.group)
    first, stop = mask.query_blocks(tile.block) if tile.block * cfg.tiles.tile_n < rows_k else (0, 0)
    steps = reversed(range(first, stop))
    return [((tile.sequence, tile.head, m), tile.block - mask.key_blocks(m).first) for m in steps]


def _listed_walk(cfg: Any, states: Sequence[Sequence[int]], tile: Any) -> Walk:
    """As `core.mask.SparseBlocks` goes through lists, with ranks as `bwd.device.ranks` computes them."""
    (rows, keys), group = cfg.mods.block, cfg.group
    heads, rows = (1, rows * group) if isinstance(cfg, Portable) else (group, rows)
    column, steps = tile.block // (keys // cfg.cluster_tile_n), range(rows // cfg.tile_m)
    block_iter = []
    for head, state in product(range(tile.head * heads, (tile.head + 1) * heads), (1, 2)):
        for m, step in product((m for m, row in enumerate(states) if row[column] == state), steps):
            at = (column, m * len(steps) + step, head)
            ranks = {at: sum(x > 0 for x in states[m][:column])}
            block_iter.append(((tile.sequence, *at[1:]), order_index_by_lists(ranks, cfg, *at[1:], tile.block)))
    return block_iter


@dataclass(frozen=True)
class Pace:
    """Times in steps. around: what a CTA takes before its first and after its last step. handing: from an addition to
    the CTA that waits for it. ahead: steps whose dQ may wait to be added. jitter: largest relative delay of a step."""

    around: float = 2.0
    handing: float = 1.25
    ahead: int = 3
    jitter: float = 0.0


def run(walks: Sequence[Walk], resident: int, pace: Pace = Pace(), seed: int = 0) -> float:
    """The time that all walks take.

    Raises:
        NoProgress: every resident CTA waits.
    """
    choose = random.Random(seed)
    counts: dict[Hashable, int] = defaultdict(int)
    ready: dict[Hashable, float] = defaultdict(float)  # when the last addition is seen by others
    waiting: dict[Addition, tuple] = {}
    events: list[tuple[float, int, int, float, deque]] = []  # time, CTA, step, when it was computed, last additions
    launched = ended = 0
    latest = 0.0

    def launch(time: float) -> None:
        nonlocal launched
        if launched < len(walks):
            first = time + pace.around / 2 + 1
            heapq.heappush(events, (first, launched, 0, first, deque(maxlen=pace.ahead)))
            launched += 1

    for _ in range(resident):
        launch(0.0)
    while events:
        time, index, i, computed, additions = heapq.heappop(events)
        if i >= len(walks[index]):
            ended, latest = ended + 1, max(latest, time)
            launch(time)
            continue
        counter, order_index = addition = walks[index][i]
        if counts[counter] != order_index:
            assert counts[counter] < order_index, f"CTA {index} adds to {counter} out of order"
            assert addition not in waiting, f"two CTAs are number {order_index} at {counter}"
            waiting[addition] = (time, index, i, computed, additions)
            continue
        if ready[counter] > time:
            heapq.heappush(events, (ready[counter], index, i, computed, additions))
            continue
        counts[counter], ready[counter] = order_index + 1, time + pace.handing
        if (counter, order_index + 1) in waiting:
            since, *rest = waiting.pop((counter, order_index + 1))
            heapq.heappush(events, (max(since, ready[counter]), *rest))
        additions.append(time)
        if i + 1 == len(walks[index]):
            heapq.heappush(events, (time + pace.around / 2, index, i + 1, computed, additions))
            continue
        free = additions[0] if len(additions) == pace.ahead else 0.0
        computed = max(computed, free) + 1 + pace.jitter * (choose.random() - 0.5)
        heapq.heappush(events, (max(computed, time), index, i + 1, computed, additions))
    if ended < len(walks):
        raise NoProgress(f"{ended} of {len(walks)} CTAs end with {resident} resident at a time")
    return latest


def without_waits(walks: Sequence[Walk], resident: int, pace: Pace = Pace()) -> float:
    """The time that all walks would take if no CTA waited."""
    ends = [0.0] * resident
    for block_iter in walks:
        heapq.heappush(ends, heapq.heappop(ends) + pace.around + len(block_iter))
    return max(ends)
