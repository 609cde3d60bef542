"""Named cases with random data, and their comparison with the oracle: shared by tests, bench and command line.

A result is right if its error against the float64 oracle is at most twice the error of the same-precision reference
(`reference` with `precise=False`), plus half a rounding step of the output dtype at the largest oracle value. Rows
without a score must be exactly 0: out and dq of a query without visible keys, dk and dv of a key visible to no query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..api.dropout import dropout_mask
from ..api.quantized import Quantized, quantize
from ..mods.ir.dropout import Rate
from ..runtime.spec import AttentionInputs, AttentionSpec, Flags, Gradients, compute_dtype
from . import reference


@dataclass(frozen=True, slots=True)
class Case:
    """Shape and flags of a problem. It is varlen if `lengths`, pairs (seqlen_q, seqlen_k), is given.

    logits: factor of q; scores are about logits * sqrt(head_dim) * softmax_scale. seqused: pairs (q, k) like lengths; a
    side with None in all pairs has no seqused. padding: packed rows after the last sequence.
    """

    name: str
    batch: int = 1
    seqlen_q: int = 128
    seqlen_k: int = 128
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    softmax_scale: float | None = None
    sink: bool = False
    lengths: tuple[tuple[int, int], ...] | None = None
    seqused: tuple[tuple[int | None, int | None], ...] | None = None
    padding: int = 0
    logits: float = 1.0
    deterministic: bool = False
    dropout_p: float = 0.0

    def __str__(self) -> str:
        return self.name

    def flags(self) -> dict[str, Any]:
        """Keyword arguments of `flash_attn_func` other than tensors."""
        dropout = {"dropout_p": self.dropout_p, "dropout_seed": _DROPOUT_SEED} if self.dropout_p else {}
        names = ("softmax_scale", "causal", "window_size", "softcap", "deterministic")
        return dropout | {name: getattr(self, name) for name in names}


_DROPOUT_SEED = 0x0123456789ABCDEF, 7  # one seed for all cases: the dropout mask depends on positions


@dataclass(frozen=True, slots=True)
class Problem:
    """A case with its tensors: `inputs` and `spec` for backends and oracle; `dout`, `dlse`: upstream gradients.
    rounding: options of the same-precision reference besides `kept` and `functions`, see
    `reference.forward`."""

    case: Case
    inputs: AttentionInputs
    spec: AttentionSpec
    dout: Tensor
    dlse: Tensor
    rounding: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that have gradients, by name."""
        named = {"q": self.inputs.q, "k": self.inputs.k, "v": self.inputs.v, "learnable_sink": self.inputs.sink}
        return {name: x for name, x in named.items() if x is not None}

    def kept(self) -> Tensor | None:
        """Dropout factors for the oracle, see `reference.forward`; None without dropout."""
        if not self.case.dropout_p:
            return None
        i, p = self.inputs, self.case.dropout_p
        sizes = dict(batch=i.batch, heads=self.case.heads_q, seqlen_q=i.max_seqlen_q, seqlen_k=i.max_seqlen_k)
        return dropout_mask(p, _DROPOUT_SEED, **sizes, device=i.q.device).double() * Rate.of(p).scale

    def call(self, **overrides) -> tuple[Tensor, Tensor]:
        """Run the public function on this problem; returns (out, lse)."""
        from ..api import dense as api

        i = self.inputs
        varlen = i.cu_seqlens_q is not None  # (torch.compile supports properties of named tuples from torch 2.11)
        arguments: dict[str, Any] = {"q": i.q, "k": i.k, "v": i.v, "learnable_sink": i.sink}
        if varlen:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")
            arguments |= {name: getattr(i, name) for name in names}
        elif i.seqused_k is not None:
            arguments["seqused_k"] = i.seqused_k
        arguments |= self.case.flags() | overrides
        q, k, v = (arguments.pop(name) for name in "qkv")
        function: Any = api.flash_attn_varlen_func if varlen else api.flash_attn_func
        return function(q, k, v, return_lse=True, **arguments)

    def call_with_gradients(self, **overrides) -> tuple[Tensor, Tensor, Gradients]:
        """Run the public function forward and backward: (out, lse, gradients)."""
        leaves = {name: x.detach().clone().requires_grad_() for name, x in self.tensors().items()}
        out, lse = self.call(**leaves, **overrides)
        # If lse is -inf, its upstream gradient has no meaning; 0 keeps the product defined.
        dlse = self.dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
        grads = torch.autograd.grad((out, lse), list(leaves.values()), (self.dout, dlse))
        return out.detach(), lse.detach(), Gradients(*grads)


def _cumulative(lengths: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def make(case: Case, seed: int, device: torch.device | str = "cpu") -> Problem:
    """Create normally distributed data for a case; equal seeds give equal data on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    head_dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    if case.lengths is None:
        rows_q, rows_k = [case.batch, case.seqlen_q], [case.batch, case.seqlen_k]
        extra: dict[str, Any] = dict(max_seqlen_q=case.seqlen_q, max_seqlen_k=case.seqlen_k)
    else:
        lengths_q, lengths_k = ([pair[side] for pair in case.lengths] for side in (0, 1))
        rows_q, rows_k = [sum(lengths_q) + case.padding], [sum(lengths_k) + case.padding]
        extra = dict(max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k))
        extra.update(cu_seqlens_q=_cumulative(lengths_q, device), cu_seqlens_k=_cumulative(lengths_k, device))
    if case.seqused is not None:
        for side, name in enumerate(("seqused_q", "seqused_k")):
            used = [pair[side] for pair in case.seqused]
            if None not in used:
                extra[name] = torch.tensor(used, dtype=torch.int32, device=device)
    inputs = AttentionInputs(
        q=normal(*rows_q, case.heads_q, case.head_dim) * case.logits,
        k=normal(*rows_k, case.heads_kv, case.head_dim),
        v=normal(*rows_k, case.heads_kv, head_dim_v),
        sink=normal(case.heads_q) if case.sink else None,
        **extra,
    )
    left, right = (None if side == -1 else side for side in case.window_size)
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    flags = Flags(scale, left, 0 if case.causal else right, case.softcap, case.deterministic)
    dout = normal(*rows_q, case.heads_q, head_dim_v)
    dlse = normal(*rows_q[:-1], case.heads_q, rows_q[-1], dtype=compute_dtype(case.dtype))
    return Problem(case, inputs, AttentionSpec.of(inputs, flags), dout, dlse)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Comparison of one result tensor with the oracle; errors are maximum absolute differences.

    stray: number of rows without a score that are not exactly 0.
    """

    name: str
    error: float
    allowed: float
    stray: int = 0

    @property
    def right(self) -> bool:
        return self.error <= self.allowed and not self.stray  # False for NaN

    def __str__(self) -> str:
        stray = f" and {self.stray} rows that no score reaches are not 0" if self.stray else ""
        return f"{self.name}: error {self.error:.3g}, allowed {self.allowed:.3g}{stray}"


def _max_difference(a: Tensor, b: Tensor) -> float:
    """Largest |a - b|. Equal infinities differ by 0; NaN gives NaN; an infinity in one tensor only gives infinity."""
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    return float(torch.where(a == b, 0.0, (a - b).abs()).max())


def judge(name: str, got: Tensor, oracle: Tensor, floor: Tensor, usual: float = 0.0) -> Judgement:
    """Compare a result with the oracle. floor: result of the same-precision reference. usual: error of that reference
    on other draws; the larger error counts."""
    if got.shape != oracle.shape:
        raise ValueError(f"{name} has shape {tuple(got.shape)}, expected {tuple(oracle.shape)}")
    finite = oracle[oracle.isfinite()]
    peak = float(finite.abs().max()) if finite.numel() else 0.0
    rounding = 0.5 * torch.finfo(got.dtype).eps * peak
    return Judgement(name, _max_difference(got, oracle), 2 * max(_max_difference(floor, oracle), usual) + rounding)


References = Callable[[Any, bool], Sequence["Tensor | None"]]

# The error of the reference is random too. It is one number for a sum like dsink, whose scale is the problem's own
# exp(sink), and for dq and dk of which a single row is not 0. Hence a result that exceeds its limit is also compared
# with references of this problem that round otherwise (`roundings`), and a kernel as accurate as the reference does not
# fail by chance: with normal tails, an error exceeds twice the largest of 64 in about 1 of 10^6 problems.
#
# Other data of the case count, too: with few elements; in float32, where only sums are rounded (lse is always float32);
# with large logits, where only rows with two scores near the row max have a notable error. Logits of 1e4 have longer
# tails: twice a single draw in 8 of 100 problems, twice the largest of 16 in 1 of 1000.
DRAWS = 64
_ENOUGH_ELEMENTS = 256
_LARGE_LOGITS, _LARGE_LOGITS_DRAWS = 100.0, 256
# After _ENOUGH_DRAWS draws, a result with _HOPELESS times the allowed error fails without more draws.
_ENOUGH_DRAWS, _HOPELESS = 16, 4.0


def roundings(problem: Problem) -> Iterator[Problem]:
    """Generate this problem with other rounding errors of the reference. Columns of q, k and their gradients may be in
    another order."""
    yield replace(problem, rounding={**problem.rounding, "sequential": True})
    i = problem.inputs
    for seed in range(DRAWS):  # another order of the columns of q and k: the same scores, rounded differently
        columns = torch.randperm(i.q.shape[-1], generator=torch.Generator().manual_seed(seed)).to(i.q.device)
        inputs = i._replace(q=i.q[..., columns], k=i.k[..., columns])
        yield replace(problem, inputs=inputs, rounding={**problem.rounding, "key_order": seed})


def other_draws(problem: Problem) -> Iterator[Problem]:
    """Generate problems that differ from this one only in random data."""
    for seed in range(_LARGE_LOGITS_DRAWS if problem.case.logits >= _LARGE_LOGITS else DRAWS):
        yield make(problem.case, seed, problem.inputs.q.device)


def in_blocks(recipe: str, q: Tensor, k: Tensor, v: Tensor) -> list[Quantized]:
    """Return q, k and v in a recipe with scales of blocks, each along the axis that its product sums over."""
    return [quantize(x, recipe, axis=axis) for x, axis in ((q, "head_dim"), (k, "head_dim"), (v, "tokens"))]


def judge_by_draws(
    results: Mapping[str, Tensor | None],
    references: References,
    problem: Any,
    others: Iterable[Any],
    roundings: Iterable[Any] = (),
    long_tails: bool = False,
) -> list[Judgement]:
    """Compare results, by name, with the oracle; entries that are None are skipped. references: returns the results of
    the oracle (precise) or of the same-precision reference, in the same order. others: more draws of data. roundings:
    `problem` with other rounding errors. Both are evaluated, in turn, only while a result exceeds its limit.
    long_tails: also use `others` for 16-bit results with many elements, for which `roundings` are enough otherwise."""
    oracle, floor = references(problem, True), references(problem, False)

    def judgements(usual: Sequence[float]) -> list[Judgement]:
        return [
            judge(name, x, exact, approximate, extra)
            for (name, x), exact, approximate, extra in zip(results.items(), oracle, floor, usual)
            if x is not None and exact is not None and approximate is not None
        ]

    usual = [0.0] * len(results)
    verdict = judgements(usual)
    # Draws only raise the limits: a result that is right with few draws is right with all. Draws are expensive.
    for draw_index, (other, is_same) in enumerate(_alternating(roundings, others)):
        is_hopeless = draw_index >= _ENOUGH_DRAWS and not all(j.error <= _HOPELESS * j.allowed for j in verdict)
        if all(j.right for j in verdict) or is_hopeless or not all(isfinite(j.error) for j in verdict):
            break
        draw_results = zip(results.values(), references(other, True), references(other, False))
        for i, (x, exact, approximate) in enumerate(draw_results):
            if x is None or exact is None or approximate is None:
                continue
            if is_same or long_tails or x.element_size() > 2 or x.numel() < _ENOUGH_ELEMENTS:
                usual[i] = max(usual[i], _max_difference(approximate, exact))
        verdict = judgements(usual)
    return verdict


def _alternating(roundings: Iterable[Any], others: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield from both alternately, with whether it is of `roundings`."""
    for pair in zip_longest(((x, True) for x in roundings), ((x, False) for x in others)):
        yield from (x for x in pair if x is not None)


def _judge_all(problem: Problem, results: Mapping[str, Tensor | None], references: References) -> list[Judgement]:
    long_tails = problem.case.logits >= _LARGE_LOGITS
    verdict = judge_by_draws(results, references, problem, other_draws(problem), roundings(problem), long_tails)
    queries, keys = reference.unreached(problem.inputs, problem.spec)
    rows = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
    return [replace(j, stray=_stray(results[j.name], rows.get(j.name))) for j in verdict]


def _stray(x: Any, rows: Tensor | None) -> int:
    """Number of selected rows with a nonzero element (or NaN). rows: bool, leading axes of x; None: no row."""
    return 0 if rows is None else int((x[rows] != 0).flatten(1).any(dim=1).sum())


def judge_forward(problem: Problem, out: Tensor, lse: Tensor) -> list[Judgement]:
    """Compare out and lse of a problem with the oracle."""
    kept = problem.kept()

    def references(draw: Problem, precise: bool) -> Sequence[Tensor | None]:
        return reference.forward(draw.inputs, draw.spec, precise=precise, kept=kept, **draw.rounding)

    return _judge_all(problem, {"out": out, "lse": lse}, references)


def judge_backward(problem: Problem, grads: Gradients) -> list[Judgement]:
    """Compare dq, dk, dv and, with a sink, dsink of a problem with the oracle."""
    kept = problem.kept()

    def references(draw: Problem, precise: bool) -> Sequence[Tensor | None]:
        of = draw.inputs, draw.spec, draw.dout, draw.dlse
        return reference.backward(*of, precise=precise, kept=kept, **draw.rounding)

    return _judge_all(problem, grads._asdict(), references)


def assert_right(judgements: list[Judgement], context: str) -> None:
    """Raise AssertionError with the name of every wrong tensor."""
    wrong = [str(j) for j in judgements if not j.right]
    if wrong:
        raise AssertionError(f"{context}: " + "; ".join(wrong))


# Each case tests something of its own; there are no cross products. Lengths straddle tiles of 64, 128 and 256.
_CASES = (
    Case("full", seqlen_q=256, seqlen_k=256),
    Case("full_d128", seqlen_q=256, seqlen_k=384, head_dim=128),
    Case("fp16", seqlen_q=160, seqlen_k=160, dtype=torch.float16),
    Case("causal", seqlen_q=256, seqlen_k=256, causal=True),
    Case("causal_d128", seqlen_q=300, seqlen_k=300, head_dim=128, causal=True),
    Case("causal_more_keys", seqlen_q=129, seqlen_k=321, causal=True),
    Case("causal_fewer_keys_masks_rows", seqlen_q=200, seqlen_k=71, causal=True),
    Case("ragged_both", batch=2, seqlen_q=113, seqlen_k=203),
    Case("ragged_one_past_tile", seqlen_q=129, seqlen_k=257),
    Case("one_by_one", seqlen_q=1, seqlen_k=1),
    Case("decode", batch=3, seqlen_q=1, seqlen_k=512, heads_q=8, heads_kv=2, causal=True),
    Case("one_key", seqlen_q=512, seqlen_k=1),
    Case("no_keys", seqlen_q=5, seqlen_k=0),
    Case("no_queries", seqlen_q=0, seqlen_k=5),
    Case("no_batch", batch=0),
    Case("gqa", seqlen_q=130, seqlen_k=130, heads_q=6, heads_kv=2, causal=True),
    Case("gqa_packed_short_queries", batch=2, seqlen_q=3, seqlen_k=190, heads_q=8, heads_kv=2, causal=True),
    Case("mqa", seqlen_q=100, seqlen_k=164, heads_q=4, heads_kv=1, causal=True),
    Case("window", seqlen_q=256, seqlen_k=256, window_size=(63, 0)),
    Case("window_both_sides", seqlen_q=233, seqlen_k=311, window_size=(40, 17)),
    Case("window_left_only", seqlen_q=200, seqlen_k=200, window_size=(50, None)),
    Case("window_right_only", seqlen_q=200, seqlen_k=200, window_size=(-1, 33)),
    Case("window_of_one", seqlen_q=140, seqlen_k=140, window_size=(0, 0)),
    Case("window_masks_rows", seqlen_q=300, seqlen_k=40, window_size=(8, 8)),
    Case("softcap", seqlen_q=150, seqlen_k=150, softcap=15.0, logits=4.0, causal=True),
    Case("sink", seqlen_q=150, seqlen_k=150, sink=True, causal=True),
    Case("sink_with_masked_rows", seqlen_q=90, seqlen_k=30, sink=True, causal=True),
    Case("sink_gqa_window", seqlen_q=200, seqlen_k=200, heads_q=4, sink=True, window_size=(64, 0)),
    Case("scale", seqlen_q=100, seqlen_k=100, softmax_scale=0.25),
    Case("head_dim_96", seqlen_q=130, seqlen_k=130, head_dim=96, causal=True),
    Case("head_dim_40_padded", seqlen_q=130, seqlen_k=130, head_dim=40),
    Case("head_dim_72_padded", seqlen_q=70, seqlen_k=130, head_dim=72, causal=True),
    Case("head_dim_192_128", seqlen_q=200, seqlen_k=200, head_dim=192, head_dim_v=128, causal=True),
    Case("head_dim_v_smaller", seqlen_q=130, seqlen_k=150, head_dim=128, head_dim_v=64),
    Case("head_dim_256", seqlen_q=130, seqlen_k=150, head_dim=256, causal=True),
    Case("varlen", lengths=((37, 37), (200, 200), (1, 1), (129, 129)), causal=True),
    Case("varlen_different_k", lengths=((64, 128), (10, 300), (257, 31)), heads_q=4),
    Case("varlen_with_empty", lengths=((50, 50), (0, 20), (30, 0), (0, 0), (70, 70)), causal=True),
    Case("varlen_window_gqa", lengths=((150, 150), (33, 80)), heads_q=4, window_size=(30, 0)),
    Case("seqused", lengths=((100, 140), (60, 60)), seqused=((77, 131), (60, 0)), causal=True),
    Case("seqused_queries_only", lengths=((80, 70), (33, 20)), seqused=((41, None), (0, None))),
    Case("seqused_keys_only", lengths=((60, 150), (20, 30)), seqused=((None, 77), (None, 0)), causal=True),
    Case("packed_rows_past_the_end", lengths=((40, 60), (0, 3), (133, 133)), padding=40, causal=True),
    Case("few_queries_many_keys_varlen", lengths=((1, 1300), (0, 40), (3, 0), (2, 700)), heads_q=4),
    Case("head_dim_v_larger", seqlen_q=70, seqlen_k=100, head_dim=32, head_dim_v=128, causal=True),
    Case("heads_of_several_sections", seqlen_q=150, seqlen_k=150, heads_q=18, heads_kv=18, causal=True),
    Case("batch_and_scale", batch=2, seqlen_q=90, seqlen_k=140, softmax_scale=0.3, causal=True),
    Case(
        "deterministic_groups_of_three", batch=2, seqlen_q=70, seqlen_k=300, heads_q=6, causal=True, deterministic=True
    ),
    Case(
        "deterministic_groups_of_twelve", seqlen_q=40, seqlen_k=300, heads_q=24, softmax_scale=0.2, deterministic=True
    ),
    Case("large_logits", seqlen_q=192, seqlen_k=192, logits=100.0),
    Case("large_logits_causal", seqlen_q=192, seqlen_k=192, logits=100.0, causal=True, head_dim=128),
    Case("many_tiles", batch=2, seqlen_q=600, seqlen_k=1100, heads_q=4, causal=True),
)
CASES = {case.name: case for case in _CASES}
