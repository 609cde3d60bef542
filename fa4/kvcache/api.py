"""`flash_attn_with_kvcache`, by flash-attn's names and meanings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import checks as common
from .. import mod_ops, ops
from ..checks import Options, WindowSize
from ..spec import BYTES, AttentionInputs, Cache
from . import calls, checks
from .calls import Given, Known
from .ops import append_by_operator, forward
from .record import Appended

if TYPE_CHECKING:
    from ..mods.call import MaskMod, ScoreMod


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
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of few or many queries on a key/value cache, which first takes new keys and values if there are any.

    Without k and v, sequence b's keys are rows 0 to cache_seqlens[b] of its part of the cache. With them, their rows
    are first written there from row cache_seqlens[b] on, in place, and are keys too. Masks are aligned bottom-right, so
    that with causal=True the last query sees all keys. Lengths, pages and indices are read on the device only, so that
    a CUDA graph may be captured once and replayed with others. No gradients. Arguments not listed here are those of
    `flash_attn_func`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); with cu_seqlens_q packed, (total_q, heads_q, head_dim).
        k_cache: (batch, rows, heads_kv, head_dim), or with page_table (pages, rows of a page, heads_kv, head_dim); q's
            dtype, or float8_e4m3fn or int8.
        v_cache: the same with head_dim_v columns.
        k, v: (batch, new rows, heads_kv, head_dim or head_dim_v) in q's dtype; with cu_seqlens_k_new packed.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), q's dtype or float32: rotate k by the number of its row in
            the cache, and q likewise if causal or windowed, else all of a sequence's q by cache_seqlens. The first
            rotary_dim columns are turned.
        rotary_interleaved: pairs are columns 2i and 2i + 1; else i and i + rotary_dim / 2.
        rotary_seqlens: (batch,) int32, positions for rotation instead of cache_seqlens.
        cache_seqlens: (batch,) int32, or one int for all: rows in use before the call. None means all rows.
        cache_batch_idx: (batch,) int32, the cache's sequence for each of q; without page_table.
        cache_leftpad: (batch,) int32: a sequence's keys begin at this row.
        page_table: (batch, pages of a sequence) int32: where in k_cache row r of sequence b is: page
            page_table[b, r // size], row r % size. Pages may be shared. Entries past the rows in use are not looked at.
        block_table: another name for page_table.
        cu_seqlens_q, cu_seqlens_k_new: (batch + 1,) int32: 0, then running sums, of packed q, and of packed k and v.
        max_seqlen_q, max_seqlen_k: upper bounds of queries, and of keys with the new ones; they size the launch only.
            None means total_q, and all rows.
        k_descale, v_descale: float32, what numbers of 8 bits are multiplied by: one, (heads_kv,) or (batch,
            heads_kv). New rows are divided by it, rounded, and limited to what the cache can hold.
        num_splits: parts to cut the keys of a sequence into, for more blocks at work; 0 leaves it to the backend. It
            changes results by rounding only. Backends that cut none take it as 1.
        batch_invariant: results of a sequence do not depend on the rest of the batch, to the last bit: keys are cut
            into parts of a size that follows from the cache's rows alone.

    Returns:
        out like q with head_dim_v columns and, if asked, lse (batch, heads_q, seqlen_q), packed (heads_q, total_q).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or no backend can serve the call. Lengths and
            page numbers are checked on a CPU; elsewhere with FA4_CHECK_LENGTHS=1, which stalls.
        NotImplementedError: a gradient may be asked for.
    """
    if page_table is None:
        page_table = block_table
    elif block_table is not None:
        raise ValueError("page_table and block_table are both given, expected one: they are names of the same")
    t = checks.Tensors(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_seqlens, cache_seqlens, cache_batch_idx,
        cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new, k_descale, v_descale,
    )  # fmt: skip
    given = Given(
        softmax_scale, causal, window_size, softcap, backend, num_splits, batch_invariant, rotary_interleaved,
        max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    tensors, watched = (*t, learnable_sink), False
    known = calls.like_the_last(tensors, given)
    if known is None:
        watched = ops.watched((q, k_cache, v_cache, *(x for x in tensors[3:] if isinstance(x, Tensor))))
        key = None if watched else calls.key_of(tensors, given)
        known = calls.find(key, tensors, given)
        if known is None:
            known = _checked(t, learnable_sink, given)
            calls.keep(key, tensors, given, known)
        checks.check_number(t)
    if not (watched or q.is_meta):
        checks.check_values(t)

    flags, seqlens = known.flags, _seqlens(t)
    if k_cache.dtype in BYTES:
        k_descale, v_descale = _descale(t, k_descale), _descale(t, v_descale)
    place = Cache(page_table, cache_batch_idx, cache_leftpad, k_descale, v_descale)
    if k is not None and v is not None and seqlens is not None:
        same_position = flags.window_left is None and flags.window_right is None
        new = Appended(
            q, k_cache, v_cache, k, v, seqlens, cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens,
            page_table, cache_batch_idx, k_descale, v_descale, bool(rotary_interleaved), same_position,
            backend,
        )  # fmt: skip
        q, seqlens = append_by_operator(new) if watched or q.is_meta else known.append(new)
    sizes = known.max_seqlens
    inputs = AttentionInputs(q, k_cache, v_cache, learnable_sink, cu_seqlens_q, None, None, seqlens, *sizes)
    if score_mod is not None or mask_mod is not None:
        mods, flags = mod_ops.prepare(inputs, flags, score_mod, mask_mod, None)
        out, lse = forward(watched, inputs, place, mods, flags)
    elif watched or q.is_meta:
        out, lse = forward(True, inputs, place, None, flags)
    else:
        out, lse = known.run(inputs, place)
    return (out, lse) if return_lse else out


def _checked(t: checks.Tensors, sink: Tensor | None, given: Given) -> Known:
    """What follows from a call's arguments, which are checked here."""
    checks.check(t)
    options = Options(given.softmax_scale, given.causal, given.window_size, given.softcap, False, given.backend)
    flags = common.flags(t.q, t.k_cache, t.v_cache, sink, options)
    if flags.needs_backward or (t.k is not None and t.v is not None and common.needs_backward(t.q, t.k, t.v, None)):
        raise NotImplementedError("flash_attn_with_kvcache has no gradients: call it under torch.no_grad()")
    batch_invariant = common.boolean("batch_invariant", given.batch_invariant, "a bool")
    common.boolean("rotary_interleaved", given.rotary_interleaved, "a bool")
    num_splits = common.count("num_splits", given.num_splits)
    flags = flags._replace(num_splits=num_splits, batch_invariant=batch_invariant)
    longest = t.capacity
    if given.max_seqlen_k is not None:
        bound = common.count("max_seqlen_k", given.max_seqlen_k)
        longest = longest if batch_invariant else min(bound, longest)  # another bound is another cut of the keys
    rows = t.q.shape[1]
    if t.cu_seqlens_q is not None:
        rows = common.max_seqlen("max_seqlen_q", given.max_seqlen_q, t.q.shape[0])
    return Known(flags, (rows, longest))


def _seqlens(t: checks.Tensors) -> Tensor | None:
    """Rows in use before the call, on the device; None where these are all and nothing has to know."""
    n = t.cache_seqlens
    if isinstance(n, Tensor) or (n is None and t.page_table is None and t.cache_leftpad is None):
        return n
    return torch.full((t.batch,), t.capacity if n is None else n, dtype=torch.int32, device=t.q.device)


def _descale(t: checks.Tensors, x: Tensor | None) -> Tensor:
    """(batch, heads_kv), heads one after the other."""
    if x is None:
        x = torch.ones((), dtype=torch.float32, device=t.q.device)
    x = x.expand(t.batch, t.k_cache.shape[2])
    return x if x.stride(1) == 1 else x.contiguous()
