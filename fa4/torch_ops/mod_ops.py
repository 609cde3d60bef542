"""torch operators of calls with a score_mod, mask_mod, block_mask or dropout: `fa4::{forward,backward}_with_mods`.

Besides the arguments of `fa4::forward` they take a call's `Mods`: graphs as strings, which hold all that shapes code,
and the tensors and numbers they read. So torch.compile, export and checkpointing handle plain arguments here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..mods.frontend import blocks, coarse, trace_cache
from ..mods.frontend.blocks import ModProblem
from ..mods.frontend.call import MaskMod, ScoreMod, gather
from ..mods.frontend.problem import entries_of
from ..mods.ir.graph import parse
from ..mods.ir.record import Mods
from ..runtime.device import chip_of
from ..runtime.sequences import sequences
from ..runtime.spec import AttentionInputs, Flags, Saved
from ..runtime.torch_internals import has_values, is_transformed
from . import autograd, checks, ops
from .signature import CallCache

FORWARD = (AttentionInputs, Mods, Flags)
BACKWARD = (Saved, AttentionInputs, Mods, Flags)

ops.library.define(f"forward_with_mods({ops.schema(FORWARD)}) -> (Tensor out, Tensor lse)")
ops.library.define(
    f"backward_with_mods({ops.schema(BACKWARD)}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor[] captured)"
)


def prepare(
    inputs: AttentionInputs,
    flags: Flags,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    block_mask: Any,
    dropout: tuple[float, Tensor | None] = (0.0, None),
) -> tuple[Mods, Flags]:
    """Return a call's functions, block mask and dropout (p, seed and offset) as its `Mods`, and the matching flags.

    Raises:
        TypeError, ValueError: they do not fit the call, or cannot be traced.
        NotImplementedError: inside a transform of torch.func.
    """
    if not torch.compiler.is_compiling() and is_transformed():
        raise NotImplementedError(
            "score_mod, mask_mod, block_mask and dropout_p do not work inside transforms of torch.func"
        )
    if score_mod is not None and flags.softcap:
        raise ValueError("softcap and score_mod are both given, expected one: fa4.scores.softcap is a score_mod")
    if block_mask is not None and (flags.window_left is not None or flags.window_right is not None):
        raise ValueError("block_mask is given with causal or window_size, expected these in its mask_mod")
    *_, max_seqlen_q, max_seqlen_k = inputs
    heads, packed = inputs.q.shape[-2], inputs.q.ndim == 3
    problem = ModProblem(inputs.batch, heads, max_seqlen_q, max_seqlen_k, inputs.q.device, packed)
    mods = gather(problem, score_mod, mask_mod, block_mask, flags.needs_backward)
    mods = mods._replace(dropout_p=dropout[0], dropout_seed=dropout[1])
    # (Compiled code cannot extend graphs: there such blocks stay as they are.)
    if mods.blocks and not torch.compiler.is_compiling() and coarse.needs_tiling((mods.block_q, mods.block_k)):  # noqa: SIM102
        if flags.backend != "torch" and chip_of(inputs.q.device).compiles:
            mods = coarse.in_tiles(mods, block_mask.seq_lengths)
    return mods, flags._replace(needs_backward=flags.needs_backward or bool(mods.trained))


def visited(mods: Mods) -> float | None:
    """Return the fraction of blocks that a block mask lists; None without one, or without its values."""
    if not mods.blocks or mods.blocks[0].is_meta:
        return None
    counts, lists, full_counts = mods.blocks[:3]
    return blocks.visited(counts, full_counts, lists.shape[-1])


def bounded(block_mask: Any, inputs: AttentionInputs, given: Sequence[Any]) -> AttentionInputs:
    """Bound packed sequences by the lengths of their block mask. given: the caller's max_seqlen_q and max_seqlen_k,
    which take precedence if the host can read them."""
    blocks.check_type(block_mask)
    return _bounded(block_mask.seq_lengths, inputs, given)


def _bounded(seqlens: Sequence[int], inputs: AttentionInputs, given: Sequence[Any]) -> AttentionInputs:
    def bound(value: Any, most: int, length: int) -> int:
        is_unknown = value is None or (isinstance(value, Tensor) and value.device.type != "cpu")
        return min(most, length) if is_unknown else most

    per_side = zip(given, inputs.max_seqlens, seqlens)
    max_seqlen_q, max_seqlen_k = (bound(*of_side) for of_side in per_side)
    return inputs._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


class Limits(NamedTuple):
    """Limits of the packed sequences, or growing caches, for which a call's checked functions and block mask are valid.

    most_sequences, most_keys: entries that captured tensors have for sequences, and for a cache's keys. batch:
    sequences that the block lists cover. seqlens: maximum lengths of the block mask. None: no such limit.
    """

    most_sequences: int | None
    most_keys: int | None
    batch: int | None = None
    seqlens: tuple[int, int] | None = None

    @classmethod
    def of(cls, mods: Mods, block_mask: Any = None) -> Limits:
        entries: dict[str, int] = {}
        for text, of in ((mods.score, mods.score_values), (mods.mask, mods.mask_values)):
            for name, size in entries_of(parse(text), of()[0]) if text else ():
                entries[name] = min(size, entries.get(name, size))
        batch, seqlens = None, None
        if block_mask is not None:
            batch, seqlens = block_mask.kv_num_blocks.shape[0], tuple(block_mask.seq_lengths)
        return cls(entries.get("b"), entries.get("kv_idx"), None if batch == 1 else batch, seqlens)

    def within(self, inputs: AttentionInputs, given: Sequence[Any]) -> AttentionInputs | None:
        """Return packed inputs, bounded by their block mask where the caller's bounds (given) are None; None beyond
        these limits."""
        if self.seqlens is not None:
            inputs = _bounded(self.seqlens, inputs, given)
            if inputs.max_seqlen_q > self.seqlens[0] or inputs.max_seqlen_k > self.seqlens[1]:
                return None
        return inputs if self.has(inputs.batch) else None

    def has(self, sequences: int, keys: int = 0) -> bool:
        """Whether this number of sequences, and of a cache's keys, is within the limits."""
        return (
            (self.most_sequences is None or sequences <= self.most_sequences)
            and (self.most_keys is None or keys <= self.most_keys)
            and (self.batch is None or sequences == self.batch)
        )


def cached(score_mod: ScoreMod | None, mask_mod: MaskMod | None, block_mask: Any) -> CallCache | None:
    """Return the call cache of these three objects, or None."""
    entry = trace_cache.known(score_mod, mask_mod, block_mask)
    return None if entry is None else entry.value


def keep(score_mod: ScoreMod | None, mask_mod: MaskMod | None, block_mask: Any) -> CallCache | None:
    """Create a call cache for these three objects, if their changes can be detected."""
    if block_mask is not None:
        mask_mod = blocks.mask_mod_of(block_mask)
    functions = [function for function in (score_mod, mask_mod) if function is not None]
    calls: CallCache[Any] = CallCache()
    mask_mod = None if block_mask is not None else mask_mod
    return calls if trace_cache.keep(score_mod, mask_mod, block_mask, functions, calls) else None


def forward(inputs: AttentionInputs, mods: Mods, flags: Flags) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a call with mods, by the operator."""
    return torch.ops.fa4.forward_with_mods(*inputs, *mods, *ops.with_scales(flags))


def _forward(*arguments):
    inputs, mods, flags = ops.split(arguments, FORWARD)
    checks.lengths(inputs)
    return ops.route(inputs, flags, mods).forward(inputs, mods)


def _backward(*arguments):
    saved, inputs, mods, flags = ops.split(arguments, BACKWARD)
    (dq, dk, dv, dsink), dcaptured = autograd.by_route(ops.route(inputs, flags, mods), saved, inputs, mods)
    dcaptured = [x.new_empty(0) if dx is None else dx for x, dx in zip(mods.tensors, dcaptured)]
    return dq, dk, dv, inputs.q.new_empty(0) if dsink is None else dsink, dcaptured


def _forward_fake(*arguments):
    inputs, _, flags = ops.split(arguments, FORWARD)
    return ops.fake_outputs(inputs, flags)


def _backward_fake(*arguments):
    _, inputs, mods, _ = ops.split(arguments, BACKWARD)
    dcaptured = [x.new_empty(x.shape if i in mods.trained else 0) for i, x in enumerate(mods.tensors)]
    return *ops.fake_gradients(inputs), dcaptured


ops.library.impl("forward_with_mods", _forward, "CompositeExplicitAutograd")
ops.library.impl("backward_with_mods", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fa4::forward_with_mods", _forward_fake, lib=ops.library)
torch.library.register_fake("fa4::backward_with_mods", _backward_fake, lib=ops.library)


autograd.register("_with_mods", FORWARD)


def _flops(inputs: AttentionInputs, mods: Mods, flags: Flags, matmuls_qk: int, matmuls_v: int) -> int:
    """Count whole visited blocks; without blocks, the pairs within the window."""
    counts = mods.blocks[0:3:2]
    if not counts or not all(map(has_values, counts)):
        return ops.flops(inputs, flags, matmuls_qk, matmuls_v)
    q, v = inputs.q, inputs.v
    if inputs.varlen:
        visited = _visited_in_sequences(inputs, mods)
    else:
        visited = sum(int(x.expand(q.shape[0], q.shape[2], -1).sum()) for x in counts)
    return 2 * visited * mods.block_q * mods.block_k * (matmuls_qk * q.shape[-1] + matmuls_v * v.shape[-1])


def _visited_in_sequences(inputs: AttentionInputs, mods: Mods) -> int:
    """Count the blocks that all heads of all packed sequences visit; blocks past a sequence's end are skipped."""
    listed = blocks.state_table(mods.blocks[:4], -(-inputs.max_seqlen_k // mods.block_k)) != blocks.NONE
    listed = listed.expand(inputs.batch, inputs.q.shape[-2], -1, -1)
    total = 0
    for sequence in sequences(inputs):
        rows, keys = (side.stop - side.start for side in (sequence.q_rows, sequence.k_rows))
        total += int(listed[sequence.index, :, : -(-rows // mods.block_q), : -(-keys // mods.block_k)].sum())
    return total


@register_flop_formula(torch.ops.fa4.forward_with_mods, get_raw=True)
def _forward_flops(*arguments, out_val=None, **_) -> int:
    inputs, mods, flags = ops.split(arguments, FORWARD)
    return _flops(inputs, mods, flags, matmuls_qk=1, matmuls_v=1)


@register_flop_formula(torch.ops.fa4.backward_with_mods, get_raw=True)
def _backward_flops(*arguments, out_val=None, **_) -> int:
    _, inputs, mods, flags = ops.split(arguments, BACKWARD)
    return _flops(inputs, mods, flags, matmuls_qk=3, matmuls_v=2)
