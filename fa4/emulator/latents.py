"""Predicted time of attention over latents, absorbed MLA: dense, or of each query to the keys that it lists. Values are
the first columns of the keys.

Two lengths give the rate of a CTA, two sequences against one the cost of a tile. A tile of flash-attn-4 is all 128
heads of a query, with all keys; one of fa4 is 128 rows with the keys of one of its plan's parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from warpcheck.context import emulate
from warpcheck.machine import Checks
from warpcheck.machine.record import Record
from warpcheck.timing.chips import chip_table
from warpcheck.timing.grid import CtaCost, Sample, TileScheduler, makespan
from warpcheck.timing.replay import replay

from fa4.emulator.attention import PACKAGES
from fa4.emulator.predict import Prediction, plan_on, steady
from fa4.runtime.spec import AttentionSpec, CacheSpec, Flags, ProblemSize

HEADS, ROPE, LATENT = 128, 64, 512  # heads of flash-attn-4
_KEYS = 1024  # of the shorter replay
_MANY_LISTS = 4096  # of a whole call, of which one or two are recorded
_STEP = 128  # keys of flash-attn-4
_CUDNN, _CUDNN_HEADS = "cudnn-frontend", 64


@dataclass(frozen=True)
class Latents:
    """rows: queries of each sequence, whose last one sees all of its `keys`. cached: if not 0, each query has a list of
    `keys` keys out of so many, and sees all of them."""

    batch: int
    rows: int
    keys: int
    causal: bool
    heads: int = HEADS
    cached: int = 0

    @property
    def keys_of_rows(self) -> list[int]:
        """Keys that a query of a sequence sees, the last query first."""
        return [self.keys - i if self.causal else self.keys for i in range(self.rows)]

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.heads * sum(self.keys_of_rows) * (ROPE + 2 * LATENT)


def predict_latents(problem: Latents, package: str = "flash-attn-4", chip: str = "sm_100a") -> Prediction:
    """Predict a forward in bfloat16.

    Raises:
        ValueError: the package, chip or number of heads is not predicted.
    """
    if package not in _RECORDED or chip not in ("sm_100a", "sm_103a"):
        raise ValueError(f"attention over latents of {package} on {chip} is not predicted")
    if package == "flash-attn-4" and problem.heads != HEADS and not problem.cached:
        raise ValueError(f"attention over latents of {package} is predicted for {HEADS} heads only")
    if package == _CUDNN and (problem.heads, bool(problem.cached)) != (_CUDNN_HEADS, True):
        raise ValueError(f"attention over latents of {package} is predicted for lists and {_CUDNN_HEADS} heads only")
    table = chip_table(chip)
    launches = [(1, _KEYS), (1, 2 * _KEYS), (2, _KEYS)]
    how = package, problem.heads, problem.causal, bool(problem.cached)
    sms = math.prod(_recorded(chip, *how, *launches[0], 2).launch.cluster)
    records = [_recorded(chip, *how, batch, keys, sms) for batch, keys in launches]
    times = tuple(replay(record, chip=table) for record in records)
    samples = [Sample.of(found, batch) for found, (batch, _) in zip(times, launches)]
    each = len(times[-1].ends) > times[-1].sms  # each tile had a CTA
    fit = CtaCost.of_each if each else CtaCost.fitted
    cost = fit(samples)
    if package == "fa4":
        work, auxiliary = _tiles_of_plan(problem, samples[0].flops, chip)
    else:
        work, auxiliary = _tiles(problem, samples[0].flops), 0.0
    slots = table.sms // math.prod(times[0].record.launch.cluster)
    scheduler = TileScheduler.PER_CTA if each else TileScheduler.DYNAMIC
    computing = makespan(work, slots, cost, scheduler, table.numbers["replace"].value)
    nbytes = 2 * problem.batch * (problem.cached or problem.keys) * (ROPE + LATENT)
    read = nbytes / table.sms / table.numbers["dram_bytes"].value
    cycles = max(computing, read)
    busy = {name: share * computing / cycles for name, share in steady(times, samples, fit).items()}
    busy = dict(sorted({**busy, "dram": read / cycles}.items(), key=lambda item: -item[1]))
    clock = table.clock_of("fwd")
    return Prediction(cycles + auxiliary, problem.flops, clock, cost, len(work), scheduler, auxiliary, busy, times)


def _tiles(problem: Latents, flops: float) -> list[float]:
    """FLOPs per multiprocessor of each tile of flash-attn-4. flops: of one with _KEYS keys."""
    a_step = flops / (_KEYS // _STEP)
    return [a_step * math.ceil(keys / _STEP) for keys in problem.keys_of_rows for _ in range(problem.batch)]


def _tiles_of_plan(problem: Latents, flops: float, chip: str) -> tuple[list[float], float]:
    """The same of fa4's plan, and the cycles of the kernel that joins the parts."""
    if problem.cached:  # a list is a tile
        lists = problem.batch * problem.rows
        return [flops * problem.keys / _KEYS] * lists, selection_cycles(chip, problem.keys, lists)
    spec = AttentionSpec(
        torch.bfloat16, ROPE + LATENT, LATENT, problem.heads, 1, 0.1, v_in_k=True, cache=CacheSpec(),
        window_right=0 if problem.causal else None,
    )  # fmt: skip
    extent = ProblemSize(problem.batch, problem.rows, problem.keys)
    forward = plan_on(chip, spec, extent)._forward
    cfg, splits = forward.cfg, forward.splits
    blocks = -(-problem.rows * problem.heads // cfg.rows)
    ends = [problem.keys - (problem.rows * (blocks - 1 - i) // blocks if problem.causal else 0) for i in range(blocks)]
    steps = [math.ceil(math.ceil(end / cfg.tile_n) / splits) for end in ends]
    a_step = flops / (_KEYS // cfg.tile_n)
    work = [a_step * count for count in steps for _ in range(problem.batch * splits)]
    if splits == 1:
        return work, 0.0
    parts = 4 * problem.batch * problem.rows * problem.heads * (LATENT + 1) * splits  # bytes
    table = chip_table(chip)
    numbers = table.numbers
    return work, numbers["launch"].value + parts / table.sms / numbers["dram_bytes"].value


def selection_cycles(chip: str, keys: int, lists: int) -> float:
    """Cycles of the kernel that makes lists of rows, if lists share multiprocessors as two and four of them do."""
    table = chip_table(chip)
    few, more = (replay(_recorded_selection(chip, keys, 2 * count), chip=table).cycles for count in (2, 4))
    return few + (more - few) / 2 * max(lists / table.sms - 2, 0)


@lru_cache(maxsize=4)
def _recorded_selection(chip: str, keys: int, lists: int) -> Record:
    from fa4.sparse.attend import Heads, Pattern
    from fa4.sparse.selection import Layout, Rule

    cached, generator = 32 * keys, torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randperm(cached, generator=generator)[:keys] for _ in range(lists)])
    pattern = Pattern(indices[:, None].int(), None, Rule(1, True, None), Layout(1, lists, cached))
    with emulate(chip, timing=True, sms=2, checks=Checks(races=False, poison=False)) as gpu:
        pattern.rows(0, lists, Heads(1, 1, 1), by_kernel=True)
    (record,) = (launch.record for launch in gpu.launches if launch.record is not None)
    return record


@lru_cache(maxsize=16)
def _recorded(
    chip: str, package: str, heads: int, causal: bool, has_lists: bool, batch: int, keys: int, sms: int
) -> Record:
    """Record one query a sequence; lists have all keys, in another order."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, heads: int, columns: int) -> Tensor:
        made = torch.randn(batch, rows, heads, columns, generator=generator).to(torch.bfloat16)
        return made.cuda() if PACKAGES[package].options else made

    options = {"sms": sms, "checks": Checks(races=False, poison=False), **PACKAGES[package].options}
    with emulate(chip, timing=True, **options) as gpu:
        lists = None
        if has_lists:
            order = torch.stack([torch.randperm(keys, generator=generator) for _ in range(batch)]).int()
            lists = order.cuda() if PACKAGES[package].options else order
        _RECORDED[package](normal, heads, keys, causal, lists)
    (record,) = (launch.record for launch in gpu.launches if launch.record is not None)
    return record


Normal = Callable[[int, int, int], Tensor]  # (rows, heads, columns) -> (batch, rows, heads, columns)


def _flash_attn_4(normal: Normal, heads: int, keys: int, causal: bool, lists: Tensor | None) -> None:
    from flash_attn.cute.interface import flash_attn_func

    q, qv = normal(1, heads, ROPE), normal(1, heads, LATENT)
    more = {} if lists is None else dict(gather_kv_indices=lists[:, None])
    flash_attn_func(q, normal(keys, 1, ROPE), normal(keys, 1, LATENT), qv, causal=causal, **more)


def _fa4(normal: Normal, heads: int, keys: int, causal: bool, lists: Tensor | None) -> None:
    import fa4
    from fa4.sparse import native

    q, k = normal(1, heads, ROPE + LATENT), normal(keys, 1, ROPE + LATENT)
    if lists is None:
        fa4.flash_attn_with_kvcache(q, k, k[..., :LATENT], causal=causal, num_splits=1)
        return
    k = k.flatten(0, 1)[:, None]
    flags, heads_of_list = Flags(softmax_scale=(ROPE + LATENT) ** -0.5), (q[:, 0], k[:, 0], k[:, 0, :, :LATENT])
    backend = native.forward_backend_of(*heads_of_list, heads, _MANY_LISTS, flags)
    if backend is not None:
        first = torch.arange(len(lists), dtype=lists.dtype)[:, None] * keys
        count = torch.full((len(lists), 1), keys, dtype=torch.int32)
        native.forward(backend, *heads_of_list[:2], (lists + first)[:, None], count, LATENT, flags.softmax_scale)
        return
    # Pages of one row.
    used = torch.full((len(q),), keys, dtype=torch.int32)
    options = dict(page_table=lists, cache_seqlens=used, num_splits=1)
    fa4.flash_attn_with_kvcache(q, k, k[..., :LATENT], **options)


def _cudnn(normal: Normal, heads: int, keys: int, causal: bool, lists: Tensor | None) -> None:
    from cudnn.deepseek_sparse_attention import sparse_attention_forward_wrapper

    assert lists is not None
    q, kv = normal(1, heads, ROPE + LATENT).flatten(0, 1), normal(keys, 1, ROPE + LATENT).flatten(0, 2)
    first = torch.arange(len(lists), dtype=lists.dtype, device=lists.device)[:, None] * keys
    sparse_attention_forward_wrapper(q, kv, lists + first)


_RECORDED = {"flash-attn-4": _flash_attn_4, "fa4": _fa4, _CUDNN: _cudnn}
