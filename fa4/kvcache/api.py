"""`flash_attn_with_kvcache`, with flash-attn's names and meanings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..runtime import nvfp4, scaled_rows
from ..runtime.spec import CONVERTED, AttentionInputs, Cache
from ..runtime.torch_internals import autocast_anywhere, is_transformed, needs_dispatcher
from ..torch_ops import checks as common
from ..torch_ops import mod_ops, out_8bit
from ..torch_ops.autocast import autocast_dtype, cast_all
from ..torch_ops.checks import Options, WindowSize
from ..torch_ops.ops import spec_and_plan
from ..torch_ops.signature import Signature
from . import calls, checks
from .calls import CachedKvCall
from .ops import append_by_operator, forward, is_plain
from .record import AppendArguments
from .values import check_values

WIDEST_SEPARATE = 256  # columns up to which kernels load K and V by themselves

if TYPE_CHECKING:
    from ..mods.frontend.call import MaskMod, ScoreMod


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    learnable_sink: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention on a key/value cache, after appending new keys and values if there are any.

    Without k and v, sequence b's keys are rows 0 to cache_seqlens[b] of its part of the cache. With them, the new rows
    are first written in place from row cache_seqlens[b] on, and are keys too. Masks are aligned bottom-right, so that
    with causal=True the last query attends to all keys. Lengths, pages and indices are read on the device only, so a
    CUDA graph can be captured once and replayed with other values. No gradients. Arguments not listed here are those of
    `flash_attn_func`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); with cu_seqlens_q packed, (total_q, heads_q, head_dim). float8_e4m3fn
            with a cache of 8 or 4 bits: it is converted to bfloat16, exactly, and counts as such.
        k_cache: (batch, rows, heads_kv, head_dim), or with page_table (pages, rows of a page, heads_kv, head_dim); q's
            dtype, or float8_e4m3fn or int8; or float4_e2m1fn_x2 with head_dim / 2 bytes a row (NVFP4), as
            `fa4.quantize(..., "nvfp4")` returns it. uint8: rows of 656 bytes, see `fa4.mla_attention_with_kvcache`.
        v_cache: the same with head_dim_v columns; of 656-byte rows k_cache[..., :512].
        k, v: (batch, new rows, heads_kv, head_dim or head_dim_v) in q's dtype; with cu_seqlens_k_new packed.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), q's dtype or float32: rotate k by its row index in the
            cache. Rotate q likewise if causal or windowed, else all of a sequence's q by cache_seqlens. The first
            rotary_dim columns are rotated.
        rotary_interleaved: pairs are columns 2i and 2i + 1; else i and i + rotary_dim / 2.
        rotary_seqlens: (batch,) int32, positions for rotation instead of cache_seqlens.
        cache_seqlens: (batch,) int32, or one int for all: rows in use before the call. None means all rows.
        cache_batch_idx: (batch,) int32, the cache's sequence for each sequence of q; without page_table.
        cache_leftpad: (batch,) int32: index of a sequence's first key row.
        page_table: (batch, pages of a sequence) int32: row r of sequence b is row r % size of page page_table[b, r //
            size] in k_cache. Pages may be shared. Entries past the rows in use are not read.
        block_table: another name for page_table.
        cu_seqlens_q, cu_seqlens_k_new: (batch + 1,) int32: 0, then running sums, of packed q, and of packed k and v.
        max_seqlen_q, max_seqlen_k: upper bounds of a sequence's queries, and of its keys including the new ones; they
            size the launch and never change results. max_seqlen_q may be a 0-dim tensor. None, or a tensor on an
            accelerator (reading it would synchronise), means total_q, and all rows.
        q_descale, k_descale, v_descale: float32 factors on 8-bit q, K and V: one, (heads_kv,) or (batch, heads_kv);
            finite, 0 or more. New rows are divided by the factor, rounded, and clamped to the cache's range. With an
            NVFP4 cache k_descale and v_descale are its scales, float8_e4m3fn, shaped like the cache with head_dim / 16
            columns; new rows and their scales are written as `fa4.quantize` would.
        out_descale: as in `flash_attn_func`: out becomes float8_e4m3fn.
        num_splits: number of parts that a sequence's keys are split into, for more CTAs in flight; 0 leaves it to the
            backend. It changes results by rounding only. Backends without split-KV treat it as 1.
        batch_invariant: results of a sequence do not depend on the rest of the batch, bitwise: keys are split into
            parts whose size follows from the cache's rows alone, or into num_splits parts if that is not 0.
        out: shaped like the result, in q's dtype, contiguous, aligned to 16 bytes: it is written and returned. It must
            not overlap q, k, v or the caches.

    Values of lengths, page numbers and factors are checked on a CPU; on other devices only with FA4_CHECK_LENGTHS=1,
    which synchronises.

    Under `torch.autocast`, q, k and v are cast to autocast's dtype if the caches have it, or 8 or 4 bits. Caches are
    never converted, because new rows are written there.

    `torch.func.vmap` maps calls on whole caches that pass q, k_cache and v_cache only.

    Returns:
        out like q with head_dim_v columns and, with return_lse, lse (batch, heads_q, seqlen_q), packed (heads_q,
        total_q).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or no backend can serve the call.
        NotImplementedError: an argument, or a tensor that score_mod captured, requires grad or carries a tangent.
    """
    table = "page_table" if block_table is None else "block_table"
    if page_table is None:
        page_table = block_table
    elif block_table is not None:
        raise ValueError("page_table and block_table are both given, expected one: they are names of the same")
    return_lse = common.boolean("return_lse", return_lse, "a bool")
    if out_descale is not None:
        if out is not None:
            raise ValueError("out and out_descale are both given, expected one: an out of 8 bits is made from another")
        out_8bit.check(out_descale, {"q": q})
    q = checks.widened_queries(q, k_cache, q_descale)
    if autocast_anywhere() and isinstance(q, Tensor):
        are_cast = getattr(k_cache, "dtype", None) in (autocast_dtype(q), *CONVERTED)
        q, k, v = cast_all(q, k, v) if are_cast else (q, k, v)
    t = checks.Tensors(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_seqlens, cache_seqlens, cache_batch_idx,
        cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new, k_descale, v_descale, q_descale,
    )  # fmt: skip
    opts = (
        softmax_scale, causal, window_size, softcap, backend, num_splits, batch_invariant, rotary_interleaved,
        _is_in_k(k_cache, v_cache),
    )  # fmt: skip
    tensors, by_dispatcher, signature = (*t, learnable_sink), False, None
    cache = calls.cache_of(score_mod, mask_mod)
    cached = None if cache is None else cache.last.find(tensors, opts)
    if cached is None:
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
            if getattr(x, "is_nested", False):  # it has no shape for a signature
                raise TypeError(f"{name} is a nested tensor, expected a plain one: q may be packed, with cu_seqlens_q")
        by_dispatcher = needs_dispatcher((q, k_cache, v_cache, *(x for x in tensors[3:] if isinstance(x, Tensor))))
        signature = None if by_dispatcher else Signature.of("cache", tensors, opts)
        cached = (cache and cache.routes.find(signature)) or _checked(t, learnable_sink, opts, table)
        checks.check_number(t)
    sizes = cached.max_seqlens(q, cu_seqlens_q is not None, max_seqlen_q, max_seqlen_k)
    by_operator = by_dispatcher or q.is_meta
    if out is not None:
        checks.check_out(out, q, nvfp4.columns_of(v_cache), has_address=not by_operator)
    if not by_operator:
        check_values(t, cached.flags, sizes, table)

    seqlens = _seqlens(t)
    is_nvfp4 = k_cache.dtype is nvfp4.DTYPE
    if k_cache.dtype in CONVERTED and not is_nvfp4:
        k_descale, v_descale = _descale(t, k_descale), _descale(t, v_descale)
    scores_descale = k_descale if q_descale is None else k_descale * _descale(t, q_descale)  # q's is one of the scores
    layout = Cache(page_table, cache_batch_idx, cache_leftpad, scores_descale, v_descale)
    inputs = AttentionInputs(q, k_cache, v_cache, learnable_sink, cu_seqlens_q, None, None, seqlens, *sizes)
    if by_dispatcher and not torch.compiler.is_compiling() and is_transformed() and not is_plain(inputs, layout):
        checks.refuse_mapped(t, table)
    if score_mod is not None or mask_mod is not None:
        cached = cached.with_mods(inputs, score_mod, mask_mod)
        if cache is None and signature is not None:
            cache = mod_ops.keep(score_mod, mask_mod, None)
    if cache is not None and signature is not None:
        cache.keep(signature, tensors, opts, cached)
    flags, mods = cached.flags, cached.mods
    if not by_operator:
        inputs = inputs._replace(max_seqlen_k=cached.planned_keys(sizes[1]))
    if k is not None and v is not None and seqlens is not None:
        if backend != "auto" and not by_operator and not cached.has_run:
            spec_and_plan(inputs, flags, mods, layout)  # refuse an unsuitable backend before rows are written
        same_position = flags.window_left is None and flags.window_right is None
        nothing, factors = (None, None), (k_descale, v_descale)
        factors, scales = (nothing, factors) if is_nvfp4 else (factors, nothing)
        new = AppendArguments(
            q, k_cache, v_cache, k, v, seqlens, cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens,
            page_table, cache_batch_idx, *factors, bool(rotary_interleaved), same_position, backend, *scales,
        )  # fmt: skip
        q, seqlens = append_by_operator(new) if by_operator else cached.append(new)
        inputs = inputs._replace(q=q, seqused_k=seqlens)
    if by_operator:
        result, lse = forward(inputs, layout, mods, flags)
        result = result if out is None else out.copy_(result)
    else:
        result, lse = cached.run(inputs, layout, out)
    if out_descale is not None:
        result = out_8bit.rounded(result, out_descale)
    return (result, lse) if return_lse else result


def _checked(t: checks.Tensors, sink: Tensor | None, opts: tuple, table: str) -> CachedKvCall:
    """Check a call's arguments and return what follows from them. opts: its options, as the caller wrote them."""
    softmax_scale, causal, window_size, softcap, backend, num_splits, batch_invariant, interleaved, v_in_k = opts
    checks.check(t, table)
    checks.refuse_derivatives(t, sink)
    options = Options(softmax_scale, causal, window_size, softcap, False, backend)
    flags = common.flags(t.q, t.k_cache, t.v_cache, sink, options)
    batch_invariant = common.boolean("batch_invariant", batch_invariant, "a bool")
    common.boolean("rotary_interleaved", interleaved, "a bool")
    num_splits = common.count("num_splits", num_splits)
    flags = flags._replace(num_splits=num_splits, batch_invariant=batch_invariant, v_in_k=v_in_k)
    return CachedKvCall(flags, t.capacity)


def _is_in_k(k_cache: Any, v_cache: Any) -> bool:
    """Whether v_cache is the memory of k_cache's first columns: then a kernel for wide heads loads it once. False where
    tensors have no memory."""
    try:
        if k_cache.dtype is scaled_rows.DTYPE:
            return True
        if k_cache.dtype is nvfp4.DTYPE or k_cache.shape[-1] <= WIDEST_SEPARATE or torch.compiler.is_compiling():
            return False
        return checks.is_first_columns(k_cache, v_cache)
    except (AttributeError, IndexError, RuntimeError):  # no tensors, or without memory
        return False


def _seqlens(t: checks.Tensors) -> Tensor | None:
    """Return the rows in use before the call, on the device; None if these are all rows and no kernel needs them."""
    n = t.cache_seqlens
    if isinstance(n, Tensor) or (n is None and t.page_table is None and t.cache_leftpad is None):
        return n
    return torch.full((t.batch,), t.capacity if n is None else n, dtype=torch.int32, device=t.q.device)


def _descale(t: checks.Tensors, x: Tensor | None) -> Tensor:
    """Expand to (batch, heads_kv), contiguous along heads."""
    if x is None:
        x = torch.ones((), dtype=torch.float32, device=t.q.device)
    x = x.expand(t.batch, t.k_cache.shape[2])
    return x if x.stride(1) == 1 else x.contiguous()
