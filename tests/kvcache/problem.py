"""Named problems on a key/value cache, with the same attention on packed sequences to judge results by.

Whatever the call has no business with is NaN: pages that no sequence has, rows past the end of one, left padding, and
new rows before they are appended. Entries of the page table past the rows in use are no page's number.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fa4
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import nvfp4, scaled_rows

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class CacheCase:
    """lengths: rows in use before the call, of each sequence; queries, new: one number for all, or of each (packed).

    rotary: "halves" or "interleaved", of `rotary_dim` columns. batch_idx: sequences lie in the cache in another order.
    """

    name: str
    lengths: tuple[int, ...]
    queries: int | tuple[int, ...] = 1
    new: int | tuple[int, ...] = 0
    capacity: int = 160
    page_size: int | None = None
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    softmax_scale: float | None = None
    sink: bool = False
    leftpad: tuple[int, ...] | None = None
    batch_idx: bool = False
    rotary: str | None = None
    rotary_dim: int = 32
    rotary_seqlens: tuple[int, ...] | None = None
    shared: int = 0  # pages at the front that all sequences share
    # descales: "tensor", "heads", "a head of zeros" or "both" (of sequences and heads); or "rows", of 656 bytes; or
    # "nvfp4"
    fp8: str | None = None
    int8: bool = False  # instead of e4m3
    in_k: bool = False  # v_cache is the memory of k_cache's first columns

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def of_each(self, count: int | tuple[int, ...]) -> tuple[int, ...]:
        return (count,) * self.batch if isinstance(count, int) else count

    @property
    def rounding(self) -> float:
        """By which two ways to round a number for the cache may differ."""
        if self.int8 or self.fp8 in ("rows", "nvfp4"):
            return 1.0
        return 2 * torch.finfo(FP8 if self.fp8 else self.dtype).eps

    @property
    def packed(self) -> Case:
        """The same attention on packed sequences."""
        pads = self.leftpad or (0,) * self.batch
        keys = [n + new - pad for n, new, pad in zip(self.lengths, self.of_each(self.new), pads)]
        return Case(
            self.name,
            lengths=tuple(zip(self.of_each(self.queries), keys)),
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            causal=self.causal,
            window_size=self.window_size,
            softcap=self.softcap,
            softmax_scale=self.softmax_scale,
            sink=self.sink,
        )


@dataclass
class Built:
    """A case with tensors: `arguments` of the call, caches as they must be after it, and the problem it must solve."""

    case: CacheCase
    problem: cases.Problem
    arguments: dict[str, Any]
    after: dict[str, Tensor]

    def call(self, **changes) -> tuple[Tensor, Tensor]:
        """(out, lse), packed; caches are copied first."""
        caches = {name: self.arguments[name].clone() for name in self.after}
        self.ran = self.arguments | caches | changes
        if self.case.in_k:
            self.ran["v_cache"] = self.ran["k_cache"][..., : self.case.head_dim_v]
        out, lse = fa4.flash_attn_with_kvcache(**self.ran, return_lse=True)
        if out.ndim == 4:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        return out, lse

    def assert_right(self, result: tuple[Tensor, Tensor], where: str) -> None:
        """Of out and lse, and of the caches after the last call."""
        cases.assert_right(cases.judge_forward(self.problem, *result), f"{self.case}, {where}")
        self.assert_caches_right(where)

    def assert_caches_right(self, where: str) -> None:
        """Of the caches after the last call."""
        for name in self.after:
            got, expected = (numbers(tensors, name) for tensors in (self.ran, self.after))
            assert torch.equal(got.isnan(), expected.isnan()), f"{self.case}, {where}: {name} was written elsewhere"
            exact = self.case.rotary is None or name[0] == "v"
            step = 0.0 if exact else self.case.rounding
            assert torch.allclose(got, expected, rtol=step, atol=step, equal_nan=True), f"{self.case}, {where}: {name}"


def numbers(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The numbers of a cache, or of its scales."""
    x = tensors[name]
    if x.dtype is nvfp4.DTYPE:
        return nvfp4.values(x.view(torch.uint8), tensors[f"{name[0]}_descale"])
    return x.float()


def serves(backend: str, case: CacheCase) -> bool:
    """Whether a backend that has kernels takes a case; what it lacks is refused by name."""
    if case.fp8 == "nvfp4" and (case.head_dim % 32 or (case.head_dim_v or 32) % 32):
        return False
    if backend == "sm80":
        return True
    is_scattered = case.page_size is not None and (case.page_size % 8 > 0 or case.leftpad is not None)
    return not (backend == "sm100" and is_scattered and case.head_dim > 192)


def turned(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rows of x (rows, heads, dim) rotated as complex numbers in float64, where sums of products of 16-bit numbers are
    exact; rounded to float32, as sums are wherever x is turned, and then to x's dtype. Were it rounded once, a row in
    some thousands would differ in a last bit, by far more than its lse may err."""
    n = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[position][:, None]
    y = x.double().clone()
    pairs = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    z = torch.complex(y[..., pairs[0]], y[..., pairs[1]]) * turn
    y[..., pairs[0]], y[..., pairs[1]] = z.real, z.imag
    return y.to(x.dtype) if x.dtype == torch.float64 else y.float().to(x.dtype)


def build(case: CacheCase, seed: int, device: str = "cpu") -> Built:
    """Made on the CPU; equal seeds give equal data on every device."""
    problem = cases.make(case.packed, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    inputs, queries, new = problem.inputs, case.of_each(case.queries), case.of_each(case.new)
    pads = case.leftpad or (0,) * case.batch
    if case.in_k:
        inputs = inputs._replace(v=inputs.k[..., : case.head_dim_v])
    q, k, v = (x.clone() for x in inputs[:3])
    given_q, given_k = q.clone(), k.clone()
    arguments: dict[str, Any] = {}
    of_k = inputs.cu_seqlens_k.tolist()
    fresh = torch.cat(
        [torch.arange(of_k[b + 1] - new[b], of_k[b + 1]) for b in range(case.batch)] or [torch.empty(0)]
    ).long()

    if case.rotary is not None:
        angle = torch.rand(case.capacity + max(queries, default=0), case.rotary_dim // 2, generator=generator) * 6.3
        cos, sin = angle.cos().to(case.dtype), angle.sin().to(case.dtype)
        first = case.rotary_seqlens or case.lengths
        moves = case.causal or case.window_size != (None, None)
        steps_q = [torch.arange(n) * moves + start for n, start in zip(queries, first)]
        steps_k = [torch.arange(n) + start for n, start in zip(new, first)]
        by = case.rotary == "interleaved"
        q = turned(q, torch.cat(steps_q).long(), cos, sin, by)
        k[fresh] = turned(k[fresh], torch.cat(steps_k).long(), cos, sin, by)
        arguments |= dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=by)
        if case.rotary_seqlens:
            arguments["rotary_seqlens"] = torch.tensor(first, dtype=torch.int32)

    stored_k, stored_v = k, v
    scales = {}
    if case.fp8 == "nvfp4":
        (stored_k, scales["k_descale"]), (stored_v, scales["v_descale"]) = nvfp4.quantised(k), nvfp4.quantised(v)
        k, v = (nvfp4.values(x, scale) for x, scale in zip((stored_k, stored_v), scales.values()))
    elif case.fp8 == "rows":
        stored_k = scaled_rows.quantised(k)
        stored_v, k = stored_k[..., : scaled_rows.LATENT], scaled_rows.values(stored_k)
        v = k[..., : scaled_rows.LATENT]
    elif case.fp8:
        shape = {"tensor": (), "both": (case.batch, case.heads_kv)}.get(case.fp8, (case.heads_kv,))
        rows = torch.repeat_interleave(torch.arange(case.batch), torch.tensor(of_k).diff())
        scaled = []
        for name, x in (("k_descale", k), ("v_descale", v)):
            if case.in_k and scaled:  # v is the same numbers
                arguments[name] = arguments["k_descale"]
                scaled.append(tuple(y[..., : case.head_dim_v] for y in scaled[0]))
                break
            descale = torch.rand(shape, generator=generator) * 0.1 + 0.01
            if case.fp8 == "a head of zeros":
                descale[0] = 0.0
            arguments[name] = descale
            by_row = descale.expand(case.batch, case.heads_kv)[rows][..., None]
            codes = (x.float() / by_row).nan_to_num()  # 0 / 0, in one of 900 problems with a head of zeros
            stored = codes.clamp(-448, 448).to(FP8)
            if case.int8:
                stored = codes.round().clamp(-128, 127).to(torch.int8)
            scaled.append((stored, stored.float() * by_row))
        (stored_k, k), (stored_v, v) = scaled

    where = _places(case, generator, arguments)
    before, after = dict[str, Tensor](), dict[str, Tensor]()
    rows = torch.cat([torch.arange(pad, n + more) for pad, n, more in zip(pads, case.lengths, new)]).long()
    sequence = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(itertools.pairwise(of_k))]).long()
    place = where(sequence, rows)
    is_old = torch.ones(len(rows), dtype=torch.bool)
    is_old[fresh] = False
    for name, x in {"k_cache": stored_k, "v_cache": stored_v, **scales}.items():
        # int8 has no NaN, but few numbers as large; rows of 656 bytes that are all ones have NaN alone
        nothing = -128 if case.int8 else 255 if x.dtype is torch.uint8 else torch.nan
        before[name] = torch.full((*arguments["cache_shape"], *x.shape[1:]), nothing).to(x.dtype)
        after[name] = before[name].clone()
        after[name][place] = x
        # Of rows that sequences share, whichever was written last above: torch leaves open which that is.
        old = place[0][is_old], place[1][is_old]
        before[name][old] = after[name][old]
        if scales and x.dtype is torch.uint8:
            before[name], after[name] = before[name].view(nvfp4.DTYPE), after[name].view(nvfp4.DTYPE)
    del arguments["cache_shape"]

    is_dense = isinstance(case.queries, int)
    arguments |= dict(
        q=given_q.view(case.batch, case.queries, *q.shape[1:]) if is_dense else given_q,
        **before,
        cache_seqlens=torch.tensor(case.lengths, dtype=torch.int32),
        learnable_sink=inputs.sink,
        softmax_scale=case.softmax_scale,
        causal=case.causal,
        window_size=case.window_size,
        softcap=case.softcap,
    )
    if not is_dense:
        arguments |= dict(cu_seqlens_q=inputs.cu_seqlens_q, max_seqlen_q=max(queries))
    if case.new:
        fresh_k, fresh_v = given_k[fresh], inputs.v[fresh]
        if isinstance(case.new, int):
            fresh_k, fresh_v = (x.view(case.batch, case.new, *x.shape[1:]) for x in (fresh_k, fresh_v))
        else:
            arguments["cu_seqlens_k_new"] = torch.tensor([0, *new]).cumsum(0).int()
        arguments |= dict(k=fresh_k, v=fresh_v)
    if case.leftpad:
        arguments["cache_leftpad"] = torch.tensor(case.leftpad, dtype=torch.int32)

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    solved = inputs._replace(q=q, k=k, v=v)
    problem = replace(problem, inputs=type(inputs)(*map(moved, solved)), dout=moved(problem.dout))
    return Built(
        case,
        problem,
        {name: moved(x) for name, x in arguments.items()},
        {name: x.to(device) for name, x in after.items()},
    )


def build_beyond_float16(case: CacheCase, seed: int) -> Built:
    """With dense bfloat16 queries of four heads of magnitude 2^60, 2^62, 1 and 0, beside each other in a tile."""
    built = build(replace(case, softmax_scale=case.head_dim**-0.5 * 2.0**-60), seed)
    factors = torch.tensor([2.0**60, 2.0**62, 1.0, 0.0]).bfloat16()[:, None]
    q = built.problem.inputs.q * factors
    built.problem = replace(built.problem, inputs=built.problem.inputs._replace(q=q))
    built.arguments["q"] = q.view(built.arguments["q"].shape)
    return built


def _places(case: CacheCase, generator: torch.Generator, arguments: dict[str, Any]):
    """Where rows of sequences lie in the cache; adds page_table or cache_batch_idx, and the cache's shape."""
    spare = 3
    if case.page_size is None:
        order = torch.arange(case.batch)
        if case.batch_idx:
            order = torch.randperm(case.batch + spare, generator=generator)[: case.batch]
            arguments["cache_batch_idx"] = order.int()
        arguments["cache_shape"] = case.batch + spare * case.batch_idx, case.capacity
        return lambda sequence, row: (order[sequence], row)
    size, width = case.page_size, -(-case.capacity // case.page_size)
    used = [-(-(n + new) // size) for n, new in zip(case.lengths, case.of_each(case.new))]
    numbers = torch.randperm(case.batch * width + spare, generator=generator).int()
    # A sequence begins in the last page, after which there is no memory.
    first = next((b * width for b, count in enumerate(used) if count), 0)
    last = int(numbers.argmax())
    numbers[[first, last]] = numbers[[last, first]]
    table = numbers[: case.batch * width].view(case.batch, width).clone()
    table[:, : case.shared] = table[0, : case.shared].clone()
    own = table.clone()
    for b, count in enumerate(used):
        table[b, count:] = torch.tensor([-1, 1 << 30])[b % 2]
    arguments |= dict(page_table=table, cache_shape=(len(numbers), size))
    return lambda sequence, row: (own[sequence, row // size].long(), row % size)


def shared_front(built: Built) -> Built:
    """Sequences whose first pages are the same ones hold the same keys there: the last writer's."""
    case, i = built.case, built.problem.inputs
    rows = case.shared * (case.page_size or 0)
    starts = i.cu_seqlens_k.tolist()
    k, v = i.k.clone(), i.v.clone()
    for start in starts[:-1]:
        for x, name in ((k, "k_cache"), (v, "v_cache")):
            pages = numbers(built.after, name)[built.arguments["page_table"][0, : case.shared].long()]
            x[start : start + rows] = pages.flatten(0, 1).to(x.dtype)
    built.problem = replace(built.problem, inputs=i._replace(k=k, v=v))
    return built
