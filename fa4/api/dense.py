"""Public functions: check the caller's arguments and turn them into one operator call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from ..mods.frontend.call import MaskMod, ScoreMod
from ..runtime.torch_internals import autocast_anywhere
from ..torch_ops import calls, checks, low_precision, out_8bit
from ..torch_ops.autocast import cast_all
from ..torch_ops.checks import WindowSize
from ..torch_ops.recipes import LOW

if TYPE_CHECKING:
    from typing import Required

    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import Unpack


# Keywords of the dense function, and the further ones of the packed one: they type the results by return_lse. The
# functions hold defaults and meanings; a test checks that both agree.
class _DenseKeywords(TypedDict, total=False):
    seqused_k: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: WindowSize
    softcap: float
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: BlockMask | None
    learnable_sink: Tensor | None
    dropout_p: float
    dropout_seed: checks.Seed | None
    deterministic: bool | None
    precision: low_precision.Precision | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out_descale: Tensor | None
    backend: str


class _PackedKeywords(_DenseKeywords, total=False):
    cu_seqlens_q: Required[Tensor]
    cu_seqlens_k: Required[Tensor]
    max_seqlen_q: int | Tensor | None
    max_seqlen_k: int | Tensor | None
    seqused_q: Tensor | None


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **kwargs: Unpack[_DenseKeywords]
) -> Tensor: ...


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **kwargs: Unpack[_DenseKeywords]
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **kwargs: Unpack[_DenseKeywords]
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    dropout_seed: checks.Seed | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    precision: low_precision.Precision | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_descale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact softmax attention over padded batches with O(seqlen) memory.

    Key/value head h serves query heads h * g to h * g + g - 1, where g = heads_q / heads_kv (GQA, MQA).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); float16, bfloat16, float32, float64, or float8_e4m3fn; last axis
            contiguous.
        k: (batch, seqlen_k, heads_kv, head_dim), same dtype and device as q.
        v: (batch, seqlen_k, heads_kv, head_dim_v), same dtype and device as q.
        seqused_k: (batch,) int32 on q's device: number of keys used in each sequence, counted from its first key. Masks
            align to these lengths; the other rows of k and v get gradients 0. Values are checked on a CPU; on other
            devices only with FA4_CHECK_LENGTHS=1, which synchronises.
        softmax_scale: factor on the logits; None means 1 / sqrt(head_dim).
        causal: query i attends to key j only if j <= i + seqlen_k - seqlen_q (aligned bottom-right).
        window_size: (left, right); query i attends to keys from i + seqlen_k - seqlen_q - left to i + seqlen_k -
            seqlen_q + right. None, -1 or any value of at least 2^30 leaves a side open. With causal, both conditions
            apply.
        softcap: if positive, logits become softcap * tanh(logits / softcap).
        score_mod: score_mod(score, b, h, q_idx, kv_idx) returns the logit of a scaled score, as in torch's
            flex_attention. It is a function of 0-dim tensors that uses operators and elements of captured tensors, and
            is traced once instead of called for each pair. Captured tensors that require grad get gradients. Captured
            numbers may change from call to call. Batch, query head, query and key indices start at 0, in packed batches
            within each sequence.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) returns whether a query attends to a key; it applies together with
            causal and window_size, and is traced in the same way.
        block_mask: the result of `fa4.create_block_mask` or of torch's function of that name, instead of mask_mod. Only
            the blocks in its lists are visited.
        learnable_sink: (heads_q,) an extra logit per query head that takes probability but has no value.
        dropout_p: probability to set a normalised probability to 0; the kept ones are scaled to the same mean, and lse
            covers all keys. Rounded to a multiple of 1 / 256, to at least one and at most 255 of them unless it is 0 or
            1. Pass 0 in evaluation.
        dropout_seed: with the positions of query and key, determines what is dropped (see `fa4.dropout_mask`);
            identical in every backend and in the backward. An int, a pair of ints (seed, offset), or an int64 tensor
            (2,) of both on q's device, which a CUDA graph reads again at each replay. None draws both from the
            generator of q's device, which torch.manual_seed sets.
        deterministic: make gradients bitwise reproducible; None follows `torch.are_deterministic_algorithms_enabled()`.
            The forward of a kernel is always deterministic. Without deterministic, a training call of a new length may
            use another kernel until its own is compiled (see FA4_BACKGROUND).
        return_lse: also return the log-sum-exp of each row's logits (including the sink), which is differentiable.
        precision: for training with float16 or bfloat16 q, k and v. "fp8" and "mxfp8" round them to e4m3, with a scale
            for each head of k, or for blocks of 32 tokens and 32 columns. Autograd saves the 8-bit numbers. Gradients
            are those of attention on the rounded numbers (straight-through). The backward may multiply 8-bit numbers
            where a kernel does; that of "fp8-forward" and "mxfp8-forward" multiplies in 16 bits.
        q_descale, k_descale, v_descale: factors, 0 or more, on float8_e4m3fn q, k and v; see `fa4.quantize` for the
            recipes and their shapes. Heads of q may have own factors or share those of their key/value head, (batch,
            heads_kv). None means 1. On float4_e2m1fn_x2 q, k and v, the scales of recipe "nvfp4", of v along tokens:
            v is then (batch, ceil(seqlen_k / 2), heads_kv, head_dim_v), and q and k have half of head_dim's columns.
            Such calls have no gradients of q, k and v.
        out_descale: () or (1,) float32, positive: out becomes float8_e4m3fn with out ~= data * out_descale, for a
            product of 8 bits after attention. Larger numbers than 448 * out_descale saturate. No gradients.
        backend: "auto", or the name of a backend, which then serves the call or raises.

    q, k and v may be nested tensors of torch's jagged layout, (batch, lengths, heads, head_dim). Then out and lse
    (batch, heads_q, lengths) are jagged too, the call is a packed one, and a block_mask follows the rules of packed
    calls. `torch.func.vmap` maps calls without mods and dropout with one launch. Exceptions are packed tensors and
    calls with a sink whose mapped calls have different lengths: these are launched one by one.

    Under `torch.autocast`, q, k and v (but not the sink) are cast to autocast's dtype, except float64.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in q's dtype (bfloat16 for 8-bit q; with out_descale 8 bits) and,
        with return_lse, lse (batch, heads_q, seqlen_q), natural logarithm, float32 (float64 for float64 inputs). A row
        without a key has out 0 and lse -inf (the sink, if there is one).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device, layout or value, or no backend can serve the call.
        ModError: score_mod or mask_mod cannot be traced; a ValueError that names the operator and the line.
        NotImplementedError: forward-mode differentiation, or a derivative of a gradient.
    """
    if return_lse is not False:
        checks.boolean("return_lse", return_lse, "a bool")
    if out_descale is not None:
        out_8bit.check(out_descale, {"q": q, "k": k, "v": v, "learnable_sink": learnable_sink})
    has_factors = not (q_descale is k_descale is v_descale is None)
    is_low = has_factors or precision is not None or getattr(q, "dtype", None) in LOW
    if not is_low and autocast_anywhere():
        q, k, v = cast_all(q, k, v)
    tensors = (q, k, v, learnable_sink, None, None, None, seqused_k)
    options = (softmax_scale, causal, window_size, softcap, deterministic, backend)
    extras = None
    if not (score_mod is None and mask_mod is None and block_mask is None and checks.drops_nothing(dropout_p)):
        extras = calls.CallExtras(score_mod, mask_mod, block_mask, checks.Dropout(dropout_p, dropout_seed))
    if is_low:
        factors = q_descale, k_descale, v_descale
        out, lse = low_precision.attend(False, tensors, (None, None), options, extras, precision, *factors)
    else:
        out, lse = calls.attend(False, tensors, (None, None), options, extras)
    if out_descale is not None:
        out = out_8bit.rounded(out, out_descale)
    return (out, lse) if return_lse else out


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **kwargs: Unpack[_PackedKeywords]
) -> Tensor: ...


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **kwargs: Unpack[_PackedKeywords]
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **kwargs: Unpack[_PackedKeywords]
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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
    dropout_seed: checks.Seed | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    precision: low_precision.Precision | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_descale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax attention over packed sequences of different lengths.

    Sequence b occupies rows cu_seqlens[b] to cu_seqlens[b + 1] of the packed tensors; attention stays within it. The
    tensors may have more rows than cu_seqlens[-1], as in a batch padded to a fixed size: these rows of q have out 0 and
    lse -inf, and all of them have gradients 0. Arguments not listed here are those of `flash_attn_func`.

    Args:
        q: (total_q, heads_q, head_dim).
        k: (total_k, heads_kv, head_dim).
        v: (total_k, heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on q's device: 0, then the running sums of the lengths.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, an int or a 0-dim tensor; they size the launch and
            never change results. None, or a tensor on an accelerator (reading it would synchronise), means total_q,
            total_k. Lengths are checked on a CPU; on other devices only with FA4_CHECK_LENGTHS=1, which synchronises.
        seqused_q, seqused_k: (batch,) int32: number of rows used in each sequence, counted from its first row. Masks
            align to these lengths; the other rows have out 0, lse -inf and gradients 0.
        block_mask: made for (batch or None, heads_q or None, max_seqlen_q, max_seqlen_k), or for longer sequences. Its
            blocks, and the indices of its mask_mod, count from each sequence's first query and first key; b is the
            sequence. Blocks past a sequence's used rows are not visited. Where max_seqlen is None, no sequence may be
            longer than the mask.

    Returns:
        out (total_q, heads_q, head_dim_v) in q's dtype and, with return_lse, lse (heads_q, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.
    """
    if return_lse is not False:
        checks.boolean("return_lse", return_lse, "a bool")
    if out_descale is not None:
        out_8bit.check(out_descale, {"q": q, "k": k, "v": v, "learnable_sink": learnable_sink})
    has_factors = not (q_descale is k_descale is v_descale is None)
    is_low = has_factors or precision is not None or getattr(q, "dtype", None) in LOW
    if not is_low and autocast_anywhere():
        q, k, v = cast_all(q, k, v)
    tensors = (q, k, v, learnable_sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    lengths = (max_seqlen_q, max_seqlen_k)
    options = (softmax_scale, causal, window_size, softcap, deterministic, backend)
    extras = None
    if not (score_mod is None and mask_mod is None and block_mask is None and checks.drops_nothing(dropout_p)):
        extras = calls.CallExtras(score_mod, mask_mod, block_mask, checks.Dropout(dropout_p, dropout_seed))
    if is_low:
        factors = q_descale, k_descale, v_descale
        out, lse = low_precision.attend(True, tensors, lengths, options, extras, precision, *factors)
    else:
        out, lse = calls.attend(True, tensors, lengths, options, extras)
    if out_descale is not None:
        out = out_8bit.rounded(out, out_descale)
    return (out, lse) if return_lse else out
