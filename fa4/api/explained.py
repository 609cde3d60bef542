"""`fa4.explain`: what a call would run, and why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kvcache import checks as cache_checks
from ..mods.frontend.call import MaskMod, ScoreMod
from ..mods.ir.record import Mods
from ..runtime import dispatch
from ..runtime.device import Chip, chip_of
from ..runtime.spec import CONVERTED, AttentionInputs, AttentionSpec, Cache, Feature, Flags, Operands, ProblemSize
from ..torch_ops import checks, e2m1, jagged, low_precision, mod_ops, recipes
from ..torch_ops.autocast import cast_all
from ..torch_ops.checks import WindowSize
from ..torch_ops.descales import Descales, check_descales, operands_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    learnable_sink: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    precision: str | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str = "auto",
) -> dispatch.Explanation:
    """Return which backend and tiles a call with these arguments gets, and why the preferred backends do not serve it.

    Takes the arguments of `flash_attn_func` or `flash_attn_varlen_func`, without `return_lse`, `dropout_seed` and
    `out_descale`, which change nothing here. Also takes those arguments of `flash_attn_with_kvcache` that affect the
    choice, with the caches as k and v. For 8- and 4-bit q, k and v, and with precision, the answer is about the 16-bit
    tensors that they are dequantised to, or about a kernel that multiplies such numbers; with precision and a q, k or v
    that requires grad, it tells the backward, too. Packed q, k, v without cu_seqlens count as one sequence. Runs
    nothing, and reads only a block mask's counts, for the fraction of visited blocks. The returned record prints as
    text. Tensors on the "meta" device work if only shapes are known.

    Raises:
        TypeError, ValueError: the call would raise it for one of its arguments.
    """
    checks.refuse_nested(q, k, v)
    if any(x is not None for x in (cache_seqlens, cache_batch_idx, cache_leftpad, page_table)):
        q, q_factor, q_descale = cache_checks.widened_queries(q, k, q_descale), q_descale, None
    else:
        q_factor = None
    descales, is_8bit = (q_descale, k_descale, v_descale), getattr(q, "dtype", None) in recipes.LOW
    is_e2m1 = e2m1.has_e2m1(q)
    if not is_8bit:
        q, k, v = cast_all(q, k, v)
    has_factors = any(x is not None for x in descales) and getattr(k, "dtype", None) not in CONVERTED
    if is_8bit or precision is not None or has_factors:
        low_precision.check_operands(q, k, v, precision, descales)
    if is_e2m1:
        e2m1.check(q.ndim == 3, (q, k, v), descales)
        q, k, v = e2m1.stand_ins(q, k, v)
    elif is_8bit:
        q, k, v = (torch.empty_like(x, dtype=torch.bfloat16) for x in (q, k, v))
    if jagged.is_jagged((q, k, v)):
        tensors, (max_seqlen_q, max_seqlen_k) = jagged.packed((q, k, v, learnable_sink, None, None, None, seqused_k))
        score_mod, mask_mod, block_mask = jagged.packed_mods((q, k, v), (score_mod, mask_mod, block_mask))
        q, k, v, _, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = tensors
    packed = isinstance(q, Tensor) and q.ndim == 3
    cache = _cache(q, k, Cache(page_table, cache_batch_idx, cache_leftpad))
    options = checks.Options(softmax_scale, causal, window_size, softcap, deterministic, backend)
    if cache is not None or cache_seqlens is not None:
        _check_cache(q, k, v, cache or Cache(), cache_seqlens, cu_seqlens_q, (k_descale, v_descale, q_factor))
        flags = checks.flags(q, k, v, learnable_sink, options)
        longest_q = checks.max_seqlen("max_seqlen_q", max_seqlen_q, q.shape[0]) if packed else q.shape[1]
        longest_k = k.shape[1] if cache is None else cache.capacity(k)
        # Of seqused_k only its presence matters.
        lengths: Any = (cu_seqlens_q, cu_seqlens_k, seqused_q, q, longest_q, longest_k)
        inputs = AttentionInputs(q, k, v, learnable_sink, *lengths)
    else:
        if packed and cu_seqlens_q is None:  # (only its shape matters)
            cu_seqlens_q = torch.empty(2, dtype=torch.int32, device=q.device) if cu_seqlens_k is None else cu_seqlens_k
        if packed and cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
        inputs, flags = checks.call(packed, AttentionInputs(q, k, v, learnable_sink, *lengths), options)
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if x is not None and not packed:
                raise ValueError(
                    f"{name} is given with q of shape {checks.shown(q)}, expected (total, heads, head_dim)"
                )
        if is_8bit and not is_e2m1:
            check_descales(inputs, descales)
    flags = flags._replace(
        num_splits=checks.count("num_splits", num_splits),
        batch_invariant=checks.boolean("batch_invariant", batch_invariant, "a bool"),
    )
    if packed and block_mask is not None:
        inputs = mod_ops.bounded(block_mask, inputs, (max_seqlen_q, max_seqlen_k))
    mods = None
    has_dropout = not checks.drops_nothing(dropout_p)
    if score_mod is not None or mask_mod is not None or block_mask is not None or has_dropout:
        if cache is not None and has_dropout:
            raise ValueError(f"dropout_p is {dropout_p}, expected 0: attention on a cache has no dropout")
        dropout_p = checks.probability("dropout_p", dropout_p)
        random = dropout_p, q if dropout_p else None  # only its presence matters
        mods, flags = mod_ops.prepare(inputs, flags, score_mod, mask_mod, block_mask, random)
    visited = None if mods is None else mod_ops.visited(mods)
    spec = AttentionSpec.of(inputs, flags, mods, cache)
    operands = low_precision.PRECISIONS.get(precision or "")
    if is_8bit:
        operands = Operands.NVFP4 if is_e2m1 else operands_of(inputs, Descales(*descales))
    native = None
    if operands is not None:
        dtype = torch.bfloat16 if is_8bit else q.dtype
        native = low_precision.native_spec(inputs, mods, flags, dtype, operands)
    found = dispatch.explain(native or spec, inputs.extent, chip_of(q.device), backend, visited)
    if native is not None:  # rows of 16-bit products of the same backend come before
        found = replace(found, refused=tuple(x for x in found.refused if x[0] != found.chosen))
    elif is_8bit or operands is not None:
        reasons = _dequantised(replace(spec, operands=operands), inputs.extent, chip_of(q.device), backend)
        found = replace(found, refused=(*found.refused, (f"products of {4 if is_e2m1 else 8} bits", reasons)))
    if precision is not None and flags.needs_backward:
        found = replace(found, backward=_trained(inputs, mods, flags, precision))
    return found


def _dequantised(spec: AttentionSpec, extent: ProblemSize, chip: Chip, backend: str) -> tuple[str, ...]:
    """Return why no kernel multiplies the 8- or 4-bit numbers of a call. The spec has no operands for scales that none
    takes."""
    operands = spec.operands
    if operands is None:
        return (
            "need scales of a tensor or a head; or of 32 columns of q and k, with a head_dim that is a multiple of 32, "
            'and of 32 tokens of v (axis="tokens")',
        )
    spec = replace(spec, needs_backward=False, deterministic=False)
    products = Feature.OPERANDS_8BIT if operands.bits == 8 else Feature.OPERANDS_4BIT
    rows = [row for row in dispatch.BACKENDS if products in row.features and row.on(chip)]
    if backend != "auto":
        rows = [row for row in rows if row.name == backend]
    if not rows:
        return (f"no kernel has them on {chip}" + ("" if backend == "auto" else f" with backend={backend!r}"),)
    of_blocks = [row for row in rows if Feature.BLOCK_SCALES in row.features]
    if operands is Operands.MXFP8 and of_blocks:
        rows = of_blocks
    queries, keys = extent.max_seqlen_q, extent.max_seqlen_k
    told = [
        *(f"need {row.least_queries} queries or more to pay" for row in rows if queries < row.least_queries),
        *(f"take up to {row.most_keys} keys" for row in rows if row.most_keys is not None and keys > row.most_keys),
        *(reason for row in rows for reason in row.refusals(spec, chip)),
    ]
    return tuple(dict.fromkeys(told)) or ("need a key, and a softmax_scale that is not negative",)


def _trained(inputs: AttentionInputs, mods: Mods | None, flags: Flags, precision: str) -> str | None:
    """Return the backend of the backward of a call that rounds to 8 bits, and the bits of what it multiplies."""
    chip, dtype = chip_of(inputs.q.device), inputs.q.dtype
    spec, operands = None, low_precision.in_backward(precision)
    if operands is not None and mods is None:
        spec = low_precision.native_spec(inputs, mods, flags, dtype, operands, is_backward=True)
    bits = 16 if spec is None else 8
    backend = flags.backend if spec is not None else dispatch.for_16_bits(flags.backend)
    found = dispatch.explain(spec or AttentionSpec.of(inputs, flags, mods), inputs.extent, chip, backend)
    name = found.backward or found.chosen
    return None if name is None else f"{name} in {bits} bits"


def _check_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    cache_seqlens: int | Tensor | None,
    cu_seqlens_q: Tensor | None,
    descales: tuple[Tensor | None, ...],
) -> None:
    """Run the checks of `flash_attn_with_kvcache`, with k and v in place of k_cache and v_cache in messages."""
    tensors = cache_checks.Tensors(
        q, k, v, cache_seqlens=cache_seqlens, cache_batch_idx=cache.batch_idx, cache_leftpad=cache.leftpad,
        page_table=cache.page_table, cu_seqlens_q=cu_seqlens_q,
        **dict(zip(("k_descale", "v_descale", "q_descale"), descales)),
    )  # fmt: skip
    if cu_seqlens_q is not None:
        checks.check_int32("cu_seqlens_q", cu_seqlens_q, q, None)
    try:
        cache_checks.check(tensors)
    except (TypeError, ValueError) as error:
        raise type(error)(re.sub(r"\b([kv])_cache\b", r"\1", str(error))) from None


def _cache(q: Tensor, k: Tensor, cache: Cache) -> Cache | None:
    """Return the cache that k is, or None if k is a padded or packed batch."""
    are_tensors = isinstance(q, Tensor) and isinstance(k, Tensor)
    has_own_layout = are_tensors and (q.ndim < k.ndim or k.dtype in CONVERTED)
    return cache if has_own_layout or any(x is not None for x in cache) else None
