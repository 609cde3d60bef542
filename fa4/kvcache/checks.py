"""Checks of a call on a cache: every error names the argument, the value passed, and the expected one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime import nvfp4, scaled_rows
from ..runtime.spec import BYTES, CONVERTED, Cache
from ..runtime.torch_internals import carries_tangent, is_mapped
from ..torch_ops.checks import check_dtype, check_e2m1_scales, check_int32, check_plain, shown
from ..torch_ops.run.prepare import ALIGNMENT

_BYTES_SHOWN = " or ".join(map(str, BYTES))
_NARROW = (*BYTES, nvfp4.DTYPE)
_NARROW_SHOWN = ", ".join(map(str, BYTES)) + f" or {nvfp4.DTYPE}"


class Tensors(NamedTuple):
    """The tensors of a call, as the caller passed them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    cache_seqlens: int | Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    page_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    q_descale: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def capacity(self) -> int:
        return Cache(self.page_table).capacity(self.k_cache)


def widened_queries(q: Tensor, k_cache: Tensor, q_descale: Tensor | None) -> Tensor:
    """Return e4m3 queries in bfloat16, which holds them exactly: kernels convert keys of 8 or 4 bits, not queries.

    Raises:
        TypeError: q is e4m3 and the cache is not of 8 or 4 bits, or q_descale is given with another q.
    """
    dtype, of_cache = getattr(q, "dtype", None), getattr(k_cache, "dtype", None)
    if dtype is not torch.float8_e4m3fn:
        if q_descale is not None:
            raise TypeError(f"q_descale is given with q of dtype {dtype}, expected torch.float8_e4m3fn")
        return q
    if of_cache not in _NARROW:
        expected = f"expected {_NARROW_SHOWN} of the cache"
        raise TypeError(f"q has dtype {dtype} with a k_cache of dtype {of_cache}, {expected}")
    return q.to(torch.bfloat16)


def check(t: Tensors, table: str = "page_table") -> None:
    """Check shapes, dtypes, devices and layouts. table: name under which the caller passed page_table."""
    _check_queries(t)
    _check_cache(t)
    for name in ("rotary_seqlens", "cache_batch_idx", "cache_leftpad"):
        x = getattr(t, name)
        if x is not None:
            check_int32(name, x, t.q, t.batch)
    _check_pages(t, table)  # before counting the rows that it gives a sequence
    _check_seqlens(t)
    _check_new(t)
    _check_rotary(t)
    _check_descales(t)


def check_out(out: Tensor, q: Tensor, head_dim_v: int, has_address: bool) -> None:
    """Check that kernels can write their result to the caller's `out`."""
    check_plain("out", out, q)
    shape = *q.shape[:-1], head_dim_v
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {shown(out)}, expected {shape} to go with q and v_cache")
    if out.dtype != q.dtype:
        raise TypeError(f"out has dtype {out.dtype}, expected {q.dtype}")
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}, expected a contiguous tensor")
    if has_address and out.data_ptr() % ALIGNMENT:
        raise ValueError(f"out begins {out.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}, expected 0")


def _check_tensor(name: str, x: Tensor, like: Tensor, ndim: int, axes: str) -> None:
    check_plain(name, x, like)
    if x.ndim != ndim:
        raise ValueError(f"{name} has {x.ndim} dimensions, shape {shown(x)}, expected {ndim}: {axes}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} has stride {x.stride(-1)} on its last axis, expected 1: call {name}.contiguous()")


def _check_queries(t: Tensors) -> None:
    packed = t.cu_seqlens_q is not None
    axes = "(total, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    _check_tensor("q", t.q, t.q, 3 if packed else 4, axes)
    check_dtype("q", t.q)
    if t.q.shape[-1] == 0:
        raise ValueError(f"q has shape {shown(t.q)}, expected a last axis of at least 1")
    if t.cu_seqlens_q is not None:
        check_int32("cu_seqlens_q", t.cu_seqlens_q, t.q, None)


def _check_cache(t: Tensors) -> None:
    axes = "(batch, rows, heads, head_dim)" if t.page_table is None else "(pages, rows of a page, heads, head_dim)"
    for name, x in (("k_cache", t.k_cache), ("v_cache", t.v_cache)):
        _check_tensor(name, x, t.q, 4, axes)
        if x.dtype not in (t.q.dtype, *CONVERTED):
            raise TypeError(f"{name} has dtype {x.dtype}, expected {t.q.dtype} like q, or {_NARROW_SHOWN}")
        if x.dtype != t.k_cache.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, expected {t.k_cache.dtype} like k_cache")
    k, v = t.k_cache, t.v_cache
    if k.dtype is scaled_rows.DTYPE:
        _check_scaled_rows(t)
    elif nvfp4.columns_of(k) != t.q.shape[-1]:
        expected = f"(*, *, *, {t.q.shape[-1]})"
        if k.dtype is nvfp4.DTYPE:
            if t.q.shape[-1] % nvfp4.PER_BYTE:
                raise ValueError(f"q has {t.q.shape[-1]} columns, expected an even number to go with k_cache of 4 bits")
            expected = f"two of q's columns a byte, (*, *, *, {t.q.shape[-1] // nvfp4.PER_BYTE}),"
        raise ValueError(f"k_cache has shape {shown(k)}, expected {expected} to go with q {shown(t.q)}")
    if v.shape[:3] != k.shape[:3] or v.shape[3] == 0:
        raise ValueError(f"v_cache has shape {shown(v)}, expected {shown(k, 3, '*')} to go with k_cache {shown(k)}")
    if k.shape[2] == 0 or t.q.shape[-2] == 0 or t.q.shape[-2] % k.shape[2]:
        raise ValueError(f"q has {t.q.shape[-2]} heads, expected a positive multiple of k_cache's {k.shape[2]}")
    if t.page_table is None and t.cache_batch_idx is None and k.shape[0] != t.batch:
        raise ValueError(
            f"k_cache has shape {shown(k)}, expected ({t.batch}, *, *, *): a sequence for each of q, or cache_batch_idx"
        )


def is_first_columns(k: Tensor, v: Tensor) -> bool:
    """Return whether v is the memory of k's first columns."""
    strides = zip(v.shape, v.stride(), k.stride())
    return v.data_ptr() == k.data_ptr() and all(of_v == of_k for size, of_v, of_k in strides if size != 1)


def _check_scaled_rows(t: Tensors) -> None:
    """Check the shapes of 656-byte rows, and that v_cache is their first columns."""
    k, v = t.k_cache, t.v_cache
    row, columns = scaled_rows.BYTES_OF_ROW, scaled_rows.LATENT
    if t.k_descale is not None and t.k_descale.dtype == nvfp4.SCALE_DTYPE:
        raise TypeError(f"k_cache has dtype {k.dtype}, expected k_cache.view({nvfp4.DTYPE}) to go with its scales")
    if t.q.dtype != torch.bfloat16:
        raise TypeError(f"q has dtype {t.q.dtype}, expected torch.bfloat16 to go with a k_cache of {row}-byte rows")
    if t.q.shape[-1] != scaled_rows.HEAD_DIM:
        expected = f"{scaled_rows.HEAD_DIM} columns to go with a k_cache of {row}-byte rows"
        raise ValueError(f"q has shape {shown(t.q)}, expected {expected}")
    if k.shape[2:] != (1, row):
        raise ValueError(f"k_cache has dtype torch.uint8 and shape {shown(k)}, expected (*, *, 1, {row})")
    is_in_k = torch.compiler.is_compiling() or is_first_columns(k, v)
    if v.shape[3] != columns or not is_in_k:
        raise ValueError(f"v_cache has shape {shown(v)}, expected k_cache[..., :{columns}] of {row}-byte rows")


def _check_seqlens(t: Tensors) -> None:
    n = t.cache_seqlens
    if isinstance(n, Tensor):
        check_int32("cache_seqlens", n, t.q, t.batch)
    elif n is not None and (isinstance(n, bool) or not isinstance(n, (int, torch.SymInt))):
        raise TypeError(f"cache_seqlens is a {type(n).__name__}, expected an int or an int32 torch.Tensor")
    check_number(t)


def check_number(t: Tensors) -> None:
    """Check an int cache_seqlens. Needed for cached calls too: a signature holds only its type."""
    n = t.cache_seqlens
    if n is not None and not isinstance(n, Tensor) and not 0 <= n <= t.capacity:
        raise ValueError(f"cache_seqlens is {n}, expected 0 to the {t.capacity} rows of the cache")


def _check_pages(t: Tensors, name: str) -> None:
    table = t.page_table
    if table is None:
        return
    if t.cache_batch_idx is not None:
        raise ValueError(f"cache_batch_idx and {name} are both given, expected one: {name} has a row a sequence")
    _check_tensor(name, table, t.q, 2, "(batch, pages of a sequence)")
    if table.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {table.dtype}, expected torch.int32")
    if table.shape[0] != t.batch:
        raise ValueError(f"{name} has shape {shown(table)}, expected ({t.batch}, *): a row for each sequence of q")
    if t.k_cache.shape[1] == 0:
        raise ValueError(f"k_cache has shape {shown(t.k_cache)}, expected pages of at least 1 row")


def _check_new(t: Tensors) -> None:
    if t.k is None or t.v is None:
        if t.k is not None or t.v is not None:
            missing, present = ("v", "k") if t.v is None else ("k", "v")
            raise ValueError(f"{present} is given without {missing}, expected both: new rows for k_cache and v_cache")
        if t.cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new is given without k and v, expected these")
        return
    packed = t.cu_seqlens_k_new is not None
    if packed:
        check_int32("cu_seqlens_k_new", t.cu_seqlens_k_new, t.q, t.batch + 1)
    if t.cache_seqlens is None:
        raise ValueError("k and v are given without cache_seqlens, expected these: where in the cache new rows go")
    axes = "(total, heads, head_dim)" if packed else "(batch, new rows, heads, head_dim)"
    heads = t.k_cache.shape[2]
    for name, x in (("k", t.k), ("v", t.v)):
        _check_tensor(name, x, t.q, 3 if packed else 4, axes)
        if x.dtype != t.q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, expected {t.q.dtype} like q")
        columns = t.q.shape[-1] if x is t.k else nvfp4.columns_of(t.v_cache)
        if x.shape != (*t.k.shape[:-2], heads, columns) or (not packed and x.shape[0] != t.batch):
            rows = "*" if packed else f"{t.batch}, {'*' if x is t.k else t.k.shape[1]}"
            raise ValueError(f"{name} has shape {shown(x)}, expected ({rows}, {heads}, {columns})")
    scales = (("k_descale", t.k_descale), ("v_descale", t.v_descale)) if t.k_cache.dtype is nvfp4.DTYPE else ()
    for name, cache in (("k_cache", t.k_cache), ("v_cache", t.v_cache), *scales):
        if cache is not None:
            _check_memory(name, cache)


def _check_memory(name: str, cache: Tensor) -> None:
    """Raise if rows of a cache that is written share memory."""
    repair = f"expected memory of its own for each row where new rows are appended: call {name}.contiguous()"
    shared = [axis for axis, step in enumerate(cache.stride()) if step == 0 and cache.shape[axis] > 1]
    if shared:
        raise ValueError(f"{name} has stride 0 on axis {shared[0]} of {cache.shape[shared[0]]} entries, {repair}")
    if torch.compiler.is_compiling():  # torch.compile would recompile for another stride order
        return
    reach = 0  # extent of the axes with smaller strides
    for step, entries in sorted((step, n) for step, n in zip(cache.stride(), cache.shape) if n > 1):
        if step <= reach and cache.numel():
            raise ValueError(f"{name} has strides {cache.stride()} for shape {shown(cache)}, {repair}")
        reach += step * (entries - 1)


def _check_rotary(t: Tensors) -> None:
    cos, sin = t.rotary_cos, t.rotary_sin
    if cos is None and sin is None:
        if t.rotary_seqlens is not None:
            raise ValueError("rotary_seqlens is given without rotary_cos and rotary_sin, expected these")
        return
    if cos is None or sin is None:
        missing, present = ("sin", "cos") if sin is None else ("cos", "sin")
        raise ValueError(f"rotary_{present} is given without rotary_{missing}, expected both")
    if t.k_cache.dtype is scaled_rows.DTYPE:  # the rotated columns are the last
        rows = f"{scaled_rows.BYTES_OF_ROW}-byte rows"
        raise ValueError(f"rotary_cos is given with a k_cache of {rows}, expected rows that are rotated")
    if t.k is None:
        raise ValueError("rotary_cos is given without k and v, expected these: keys in the cache are rotated already")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        _check_tensor(name, x, t.q, 2, "(positions, rotary_dim / 2)")
        if x.dtype not in (t.q.dtype, torch.float32):
            raise TypeError(f"{name} has dtype {x.dtype}, expected {t.q.dtype} like q, or torch.float32")
        if x.dtype != cos.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, expected {cos.dtype} like rotary_cos")
        if x.shape != cos.shape:
            raise ValueError(f"{name} has shape {shown(x)}, expected {shown(cos)} like rotary_cos")
    if not 0 < 2 * cos.shape[1] <= t.q.shape[-1] or cos.shape[0] == 0:
        raise ValueError(
            f"rotary_cos has shape {shown(cos)}, expected (positions, 1 to {t.q.shape[-1] // 2}): half of head_dim"
        )


def _check_descales(t: Tensors) -> None:
    if t.k_cache.dtype is nvfp4.DTYPE:
        return _check_scales(t)
    heads = t.k_cache.shape[2]
    for name, x in (("q_descale", t.q_descale), ("k_descale", t.k_descale), ("v_descale", t.v_descale)):
        if x is None:
            continue
        if t.k_cache.dtype not in BYTES:
            raise ValueError(f"{name} is given with a cache of dtype {t.k_cache.dtype}, expected {_BYTES_SHOWN}")
        check_plain(name, x, t.q)
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}, expected torch.float32")
        if x.shape not in ((), (1,), (heads,), (t.batch, heads)):
            raise ValueError(f"{name} has shape {shown(x)}, expected (), ({heads},) or ({t.batch}, {heads})")


def _check_scales(t: Tensors) -> None:
    """Check the scales of a cache of 4-bit numbers."""
    if t.q_descale is not None:
        raise ValueError(
            f"q_descale is given with a cache of dtype {nvfp4.DTYPE}, whose scales have no place for it: multiply "
            "softmax_scale by it"
        )
    for name, x, cache in (("k_descale", t.k_descale, t.k_cache), ("v_descale", t.v_descale, t.v_cache)):
        check_e2m1_scales(name, x, f"{name[0]}_cache", cache)
        if x is not None and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} on its last axis, expected 1: call {name}.contiguous()")


def refuse_derivatives(t: Tensors, sink: Tensor | None) -> None:
    """Raise if autograd or forward-mode differentiation would differentiate one of the tensors."""
    for name, x in (*zip(Tensors._fields, t), ("learnable_sink", sink)):
        if not isinstance(x, Tensor):
            continue
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad, and flash_attn_with_kvcache has no gradients: call it under torch.no_grad() or "
                f"pass {name}.detach()"
            )
        if carries_tangent(x):
            raise NotImplementedError(f"{name} carries a tangent, and flash_attn_with_kvcache has no derivatives")


def refuse_mapped(t: Tensors, table: str) -> None:
    """Raise for a call inside torch.func.vmap that is not on whole caches. table: see `check`."""
    if not any(isinstance(x, Tensor) and is_mapped(x) for x in t):
        return
    names = (table if name == "page_table" else name for name, x in zip(Tensors._fields, t) if x is not None)
    given = [name for name in names if name not in ("q", "k_cache", "v_cache")] or ["k_cache of 8-bit numbers"]
    raise NotImplementedError(
        f"{given[0]} is given inside torch.func.vmap, expected q, k_cache and v_cache alone: make the mapped axis part "
        "of the batch"
    )
