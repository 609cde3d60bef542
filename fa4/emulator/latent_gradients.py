"""Predicted time of the backward of attention to lists of latents: all kernels of a package, one after the other.

One list with two numbers of keys gives the rate of a kernel. Several lists, more than run at a time, give the cost of a
list. Kernels without products take their recorded cycles of all lists and keys, shared by all multiprocessors, or their
bytes at the rate of DRAM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from warpcheck.context import emulate
from warpcheck.machine import Checks
from warpcheck.machine.record import Record
from warpcheck.timing.chips import ChipTable, chip_table
from warpcheck.timing.grid import CtaCost, Sample, TileScheduler
from warpcheck.timing.replay import Times, replay

from fa4.emulator.attention import PACKAGES
from fa4.emulator.latents import LATENT, ROPE, Latents, selection_cycles
from fa4.emulator.predict import Prediction, steady
from fa4.sparse.attend import GATHERED_NUMBERS

_KEYS = 512  # of the shorter list; twice as many is the longer one
_CACHED = 2048  # keys that a recorded list chooses from
_COLUMNS = ROPE + LATENT
_SMS = 2
_LISTS = 3  # more than _SMS, so that one multiprocessor has two of them, or a pair has all
# Bytes for each listed key and query head that a main kernel exchanges with device memory: flash-attn-4 reads P, writes
# dS, and reads dS for dQ and for dK of the columns that are no values.
_EXCHANGED = {"flash-attn-4": (4, 2, 2)}
# Bytes that torch moves for each key: zeros of float32 sums, and fa4's conversion of these.
_OF_KEYS = {"flash-attn-4": 4 * _COLUMNS, "fa4": (4 + 4 + 2) * (_COLUMNS + LATENT)}
# For each entry of a list, where fa4 gathers: read K and V and write them; read dK and dV in 16 bits and write them in
# 32; read these, read the sums and write them.
_GATHERED = (_COLUMNS + LATENT) * (2 * 2 + 2 + 4 + 3 * 4)


@dataclass(frozen=True)
class _Launches:
    """The same kernel for (lists, keys) of (1, _KEYS), (1, 2 * _KEYS) and (_LISTS, _KEYS)."""

    fewer: Times
    more: Times
    several: Times

    @property
    def times(self) -> tuple[Times, ...]:
        return self.fewer, self.more, self.several

    @property
    def ctas(self) -> int:
        return math.prod(self.fewer.record.launch.cluster)

    @property
    def owns_keys(self) -> bool:
        """Whether a longer list has more clusters, and not longer ones."""
        return _clusters(self.more) > _clusters(self.fewer)

    def costs(self) -> tuple[float, float, float]:
        """Return the cycles before the first list of a slot, of a list of _KEYS keys, and of a key."""
        of_key = (self.more.cycles - self.fewer.cycles) / _KEYS
        rounds = math.ceil(_LISTS / max(_SMS // self.ctas, 1))
        of_list = (self.several.cycles - self.fewer.cycles) / (rounds - 1)
        return self.fewer.cycles - of_list, of_list, of_key

    def cycles(self, problem: Latents, lists: int, sms: int) -> float:
        """Return the cycles of a launch with so many lists on the whole chip."""
        start, of_list, of_key = self.costs()
        slots = sms // self.ctas
        if self.owns_keys:
            each = _KEYS / (_clusters(self.more) - _clusters(self.fewer))  # keys of a cluster
            return start + math.ceil(lists * problem.keys / each / slots) * of_key * each
        return start + math.ceil(lists / slots) * (of_list + (problem.keys - _KEYS) * of_key)


def _selects(kernel: _Launches) -> bool:
    """Whether it is fa4's kernel that makes lists of rows, of which a multiprocessor runs several CTAs at a time."""
    return "select" in kernel.fewer.record.launch.entry


def _clusters(times: Times) -> int:
    launch = times.record.launch
    return math.prod(launch.grid) // math.prod(launch.cluster)


def predict_latent_gradients(problem: Latents, package: str = "fa4", chip: str = "sm_100a") -> Prediction:
    """Predict a backward in bfloat16. Its FLOPs count 2.5 times those of the forward.

    Raises:
        ValueError: the package, chip or problem is not predicted.
    """
    if package not in _CALLS or chip not in ("sm_100a", "sm_103a"):
        raise ValueError(f"gradients of latents of {package} on {chip} are not predicted")
    if not problem.cached or problem.causal or problem.batch != 1:
        raise ValueError(
            f"gradients of latents are predicted for lists of one sequence that see all keys, not {problem}"
        )
    table = chip_table(chip)
    recorded = partial(_recorded, chip, package, problem.heads)
    launched = [recorded(1, _KEYS), recorded(1, 2 * _KEYS), recorded(_LISTS, _KEYS)]
    kernels = [
        _Launches(*(replay(record, chip=table) for record in records)) for records in zip(*launched, strict=True)
    ]
    mains = [kernel for kernel in kernels if kernel.fewer.flops]
    others = [kernel for kernel in kernels if not kernel.fewer.flops and not _selects(kernel)]
    gathers = package == "fa4" and any(kernel.owns_keys for kernel in mains)
    at_once = problem.rows
    if gathers:
        at_once = max(GATHERED_NUMBERS // (2 * problem.keys * (_COLUMNS + LATENT)), 1)
    parts = []
    exchanged = _EXCHANGED.get(package, (0,) * len(mains))
    for kernel, of_pair in zip(mains, exchanged, strict=True):
        counts = [min(at_once, problem.rows - first) for first in range(0, problem.rows, at_once)]
        computing = sum(kernel.cycles(problem, count, table.sms) for count in counts)
        moved = _by_dram(of_pair * problem.heads * problem.keys * problem.rows, table)
        parts.append(_part(kernel, max(computing, moved), computing, problem, table))
    auxiliary = sum(_auxiliary(kernel, problem, table) for kernel in others)
    auxiliary += _by_dram(_OF_KEYS.get(package, 0) * problem.cached, table)
    if package == "fa4":
        auxiliary += selection_cycles(chip, problem.keys, problem.rows)
    if gathers:
        auxiliary += _by_dram(_GATHERED * problem.keys * problem.rows, table)
    whole = Prediction.together(parts)
    return replace(whole, cycles=whole.cycles + auxiliary, auxiliary=auxiliary)


def _by_dram(nbytes: float, table: ChipTable) -> float:
    return nbytes / table.sms / table.numbers["dram_bytes"].value


def _part(kernel: _Launches, cycles: float, computing: float, problem: Latents, table: ChipTable) -> Prediction:
    """Prediction of one main kernel."""
    counts = zip(kernel.times, (1, 1, _LISTS))
    samples = [Sample.of(times, lists * kernel.ctas / times.sms) for times, lists in counts]
    busy = {name: share * computing / cycles for name, share in steady(kernel.times, samples, CtaCost.fitted).items()}
    if computing < cycles:
        busy = {"dram": 1.0} | busy
    cost, clock = CtaCost.fitted(samples), table.clock_of("bwd")
    return Prediction(
        cycles, 2.5 * problem.flops, clock, cost, problem.rows, TileScheduler.PER_CTA, 0.0, busy, kernel.times,
    )  # fmt: skip


def _auxiliary(kernel: _Launches, problem: Latents, table: ChipTable) -> float:
    """Cycles of a kernel without products, of which a part increases with the lists and the rest with all keys."""

    def whole(fewer: float, several: float) -> float:
        of_list = max(several - fewer, 0.0) / (_LISTS - 1)
        return of_list * problem.rows + max(fewer - of_list, 0.0) * problem.cached / _CACHED

    computing = whole(kernel.fewer.cycles, kernel.several.cycles) * kernel.fewer.sms / table.sms
    moved = _by_dram(whole(kernel.fewer.global_bytes, kernel.several.global_bytes), table)
    return table.numbers["launch"].value + max(computing, moved, kernel.fewer.cycles)


@lru_cache(maxsize=16)
def _recorded(chip: str, package: str, heads: int, lists: int, keys: int) -> tuple[Record, ...]:
    """Record the backward of so many queries, each with a list of its own."""
    options = {"sms": _SMS, "checks": Checks(races=False, poison=False), **PACKAGES[package].options}
    generator = torch.Generator().manual_seed(0)

    def placed(x: Tensor) -> Tensor:
        return x.cuda() if PACKAGES[package].options else x

    def normal(rows: int, heads: int, columns: int) -> Tensor:
        return placed(torch.randn(rows, heads, columns, generator=generator).to(torch.bfloat16))

    with emulate(chip, **options) as gpu:
        chosen = [torch.randperm(_CACHED, generator=generator)[:keys] for _ in range(lists)]
        backward = _CALLS[package](normal, heads, placed(torch.stack(chosen).int()))
    with emulate(chip, timing=True, **options) as gpu:
        backward()
    return tuple(launch.record for launch in gpu.launches if launch.record is not None)


Normal = Callable[[int, int, int], Tensor]  # (rows, heads, columns)


def _gradients(out: Tensor, leaves: Sequence[Tensor]) -> Callable[[], object]:
    return partial(torch.autograd.grad, out, leaves, torch.ones_like(out))


def _flash_attn_4(normal: Normal, heads: int, lists: Tensor) -> Callable[[], object]:
    from flash_attn.cute.interface import flash_attn_func

    shapes = (len(lists), heads, ROPE), (_CACHED, 1, ROPE), (_CACHED, 1, LATENT), (len(lists), heads, LATENT)
    leaves = [normal(*shape)[None].requires_grad_() for shape in shapes]
    out = flash_attn_func(*leaves, gather_kv_indices=lists[None])
    return _gradients(out[0] if isinstance(out, tuple) else out, leaves)


def _fa4(normal: Normal, heads: int, lists: Tensor) -> Callable[[], object]:
    import fa4

    q, k = (normal(rows, n, _COLUMNS)[None].requires_grad_() for rows, n in ((len(lists), heads), (_CACHED, 1)))
    return _gradients(fa4.sparse_attention(q, k, k[..., :LATENT], lists[None, :, None]), (q, k))


def _cudnn(normal: Normal, heads: int, lists: Tensor) -> Callable[[], object]:
    """Its backward takes any result of a forward: values take no time."""
    from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper

    rows = len(lists)
    q, kv, out, dout = (normal(*shape) for shape in ((rows, heads, _COLUMNS), (_CACHED, 1, _COLUMNS),
                                                     (rows, heads, LATENT), (rows, heads, LATENT)))  # fmt: skip
    lse, sink = torch.full((rows, heads), 8.0).to(q.device), torch.full((heads,), -math.inf).to(q.device)
    return partial(sparse_attention_backward_wrapper, q, kv[:, 0], out, dout, lse, sink, lists)


_CALLS = {"flash-attn-4": _flash_attn_4, "fa4": _fa4, "cudnn-frontend": _cudnn}
