"""FLOP formulas of the operators, for torch's FLOP counter."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from ..mods.frontend import blocks
from ..mods.ir.record import Mods
from ..runtime import nvfp4
from ..runtime.sequences import sequences
from ..runtime.spec import AttentionInputs, Flags
from ..runtime.torch_internals import has_values

_COUNTER = "torch.utils.flop_counter"


class _UponImport(importlib.abc.MetaPathFinder):
    """Registers formulas when torch's counter is imported, which imports Triton: a third of the time of
    `import fa4`."""

    def __init__(self) -> None:
        self.formulas: list[tuple[Any, Callable[..., int]]] = []

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def then_register(module: Any) -> None:
            execute(module)
            for operator, formula in self.formulas:
                module.register_flop_formula(operator, get_raw=True)(formula)

        spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec


_upon_import = _UponImport()
if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _upon_import)


def register(operator: Any, formula: Callable[..., int]) -> None:
    """Register a function of an operator's arguments with the counter, now or when it is imported."""
    counter = sys.modules.get(_COUNTER)
    if counter is None:
        _upon_import.formulas.append((operator, formula))
    else:
        counter.register_flop_formula(operator, get_raw=True)(formula)


def forward(inputs: AttentionInputs, flags: Flags, mods: Mods | None = None) -> int:
    """Count Q K^T and P V over the unmasked pairs: half of a full square when causal."""
    return _count(inputs, flags, mods, matmuls_qk=1, matmuls_v=1)


def backward(saved: object, inputs: AttentionInputs, flags: Flags, mods: Mods | None = None) -> int:
    """Count the five products of the backward: S, dQ, dK over head_dim; dP, dV over head_dim_v."""
    return _count(inputs, flags, mods, matmuls_qk=3, matmuls_v=2)


def _count(inputs: AttentionInputs, flags: Flags, mods: Mods | None, matmuls_qk: int, matmuls_v: int) -> int:
    """Count whole visited blocks; without blocks, the pairs within the window."""
    q, columns, columns_v = inputs.q, nvfp4.columns_of(inputs.q), inputs.v.shape[-1]
    counts = [] if mods is None else mods.blocks[0:3:2]
    if mods is None or not counts or not all(map(has_values, counts)):
        pairs = q.shape[-2] * _pairs_in_window(inputs, flags)
    elif inputs.varlen:
        pairs = _visited_in_sequences(inputs, mods) * mods.block_q * mods.block_k
    else:
        pairs = sum(int(x.expand(q.shape[0], q.shape[2], -1).sum()) for x in counts) * mods.block_q * mods.block_k
    return 2 * pairs * (matmuls_qk * columns + matmuls_v * columns_v)


def _pairs_in_window(inputs: AttentionInputs, flags: Flags) -> int:
    window = flags.window_left, flags.window_right
    lengths = [x for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k) if x is not None]
    if not inputs.varlen:
        return inputs.batch * unmasked_pairs(inputs.q.shape[1], inputs.k.shape[1], *window)
    if not all(map(has_values, lengths)):
        # Lengths without values: count every sequence at its upper bound.
        return inputs.batch * unmasked_pairs(inputs.max_seqlen_q, inputs.max_seqlen_k, *window)
    per_sequence = zip(*(x.diff().tolist() for x in lengths))
    return sum(unmasked_pairs(seqlen_q, seqlen_k, *window) for seqlen_q, seqlen_k in per_sequence)


def unmasked_pairs(seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None) -> int:
    """Count the (query, key) pairs of one sequence that the bottom-right aligned mask keeps."""

    def capped_sum(n: int) -> int:
        """min(1, seqlen_k) + min(2, seqlen_k) + ... + min(n, seqlen_k)."""
        capped = max(0, min(n, seqlen_k))
        return capped * (capped + 1) // 2 + max(0, n - seqlen_k) * seqlen_k

    def at_most(distance: int) -> int:
        """Pairs with key - query <= distance: row i has i + distance + 1 of them, clamped to 0 and seqlen_k."""
        return capped_sum(seqlen_q + distance) - capped_sum(distance)

    shift = seqlen_k - seqlen_q
    upper = seqlen_q * seqlen_k if window_right is None else at_most(shift + window_right)
    return upper - (0 if window_left is None else at_most(shift - window_left - 1))


def _visited_in_sequences(inputs: AttentionInputs, mods: Mods) -> int:
    """Count the blocks that all heads of all packed sequences visit; blocks past a sequence's end are skipped."""
    listed = blocks.state_table(mods.blocks[:4], -(-inputs.max_seqlen_k // mods.block_k)) != blocks.NONE
    listed = listed.expand(inputs.batch, inputs.q.shape[-2], -1, -1)
    total = 0
    for sequence in sequences(inputs):
        rows, keys = (side.stop - side.start for side in (sequence.q_rows, sequence.k_rows))
        total += int(listed[sequence.index, :, : -(-rows // mods.block_q), : -(-keys // mods.block_k)].sum())
    return total
