"""fa4 beneath torch's scaled_dot_product_attention and varlen_attn, through torch's registry of flash attentions.

    fa4.register_sdpa()
    torch.nn.attention.activate_flash_attention_impl("fa4")
    ...
    torch.nn.attention.restore_flash_attention_impl()

While it is active, fa4 answers the aten operators that torch's flash attention is made of. What fa4 would run in plain
torch, or does not do, goes to the kernel that was there before, and a warning tells the reason once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import calls, checks, dispatch, ops
from ..checks import Dropout, Options
from ..device import chip_of
from ..memory import empty
from ..mods.record import Mods
from ..remembered import Remembered
from ..spec import AttentionInputs, AttentionSpec, Flags, Saved

NAME = "fa4"
DEVICES = ("cuda", "cpu")


def register_sdpa(*, devices: Iterable[str] = ("cuda",), activate: bool = False) -> None:
    """Make "fa4" known to `torch.nn.attention.activate_flash_attention_impl`.

    Once activated, `scaled_dot_product_attention`, `torch.nn.attention.varlen.varlen_attn` and nested tensors run on
    fa4, forward and backward, wherever torch can take flash attention, which it then prefers to cuDNN's.
    `torch.nn.attention.restore_flash_attention_impl()` gives torch its own kernels and order back.

    Args:
        devices: whose tensors fa4 serves: "cuda", "cpu" or both. On a CPU fa4 runs tiled torch, which is slower than
            torch's own kernel: for tests, and for `fa4.emulator.emulate`, where CPU tensors are an emulated chip's.
        activate: activate it at once. Activation initialises CUDA, where there is any.

    Raises:
        RuntimeError: this torch has no such registry.
        ValueError: an unknown device.
    """
    import torch.nn.attention

    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):  # 2.10 registers, and never gives back
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.nn.attention.restore_flash_attention_impl (2.11 has): call "
            "fa4.flash_attn_func instead, or update torch"
        )
    devices = tuple(devices)
    if not devices or not set(devices) <= set(DEVICES):
        raise ValueError(f"devices is {devices!r}, expected some of {DEVICES}")
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=functools.partial(_activate, devices))
    if activate:
        torch.nn.attention.activate_flash_attention_impl(NAME)


class _Refusal(Exception):
    """fa4 does not serve the call; the reason."""


class _Handle:
    """What torch keeps while fa4 is active."""

    def __init__(self, library: torch.library.Library, preference: contextlib.ExitStack) -> None:
        self._library: torch.library.Library | None = library
        self._preference = preference

    def remove(self) -> None:
        self._library = None  # registrations live as long as their library
        self._preference.close()


def _activate(devices: tuple[str, ...]) -> _Handle:
    if "cuda" in devices and torch.cuda.is_available():
        # At its first choice of all torch may put cuDNN first: that is to lie behind us when we ask for another order.
        x = torch.zeros(1, 1, 1, 8, dtype=torch.float16, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that they are overridden
        for device in devices:
            key = device.upper()
            for name, serve in {**_OPERATORS, **(_CPU_OPERATORS if device == "cpu" else {})}.items():
                library.impl(name, _kernel(name, serve, _kernel_before(name, key)), key, with_keyset=True)
    return _Handle(library, _preferring_flash())


def _preferring_flash() -> contextlib.ExitStack:
    """From now until it is closed torch takes flash attention first, of what is enabled: by itself it prefers cuDNN on
    new GPUs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cuda, stack = torch.backends.cuda, contextlib.ExitStack()
    if cuda.flash_sdp_enabled():
        enabled = [SDPBackend.FLASH_ATTENTION]
        enabled += [SDPBackend.CUDNN_ATTENTION] if cuda.cudnn_sdp_enabled() else []
        enabled += [SDPBackend.EFFICIENT_ATTENTION] if cuda.mem_efficient_sdp_enabled() else []
        enabled += [SDPBackend.MATH] if cuda.math_sdp_enabled() else []
        stack.enter_context(sdpa_kernel(enabled, set_priority=True))
        atexit.register(stack.close)  # torch's context, still open, would complain of an interpreter that ends
        stack.callback(atexit.unregister, stack.close)
    return stack


def _kernel_before(name: str, key: str) -> Any:
    """torch's kernel of an operator; None where it has none."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


def _kernel(name: str, serve: Callable[..., Any], before: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return serve(*args, **kwargs)
        except _Refusal as refusal:
            reason = str(refusal)
        if before is None:
            raise NotImplementedError(f"fa4 does not serve aten::{name} here, and torch has no kernel for it: {reason}")
        _tell(reason)
        return before.call_boxed(keys, *args, **kwargs)

    return kernel


_told: set[str] = set()


def _tell(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        warnings.warn(f"fa4 leaves this attention to torch's own kernel: {reason}. Said once.", stacklevel=3)


# The road to fa4 ------------------------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """What came of the checks of a call, for others like it."""

    flags: Flags
    route: ops.Route
    max_seqlens: tuple[int, int]


_ways: Remembered[_Way | str] = Remembered()  # a text is the reason of a refusal
_last: calls.Last | None = None  # a call like the one before is told from others by less than a key


def _way(inputs: AttentionInputs, options: Options) -> tuple[AttentionInputs, Flags, ops.Route]:
    """The arguments of fa4's operators and the road to a kernel, if there is one."""
    global _last
    options = options._replace(softmax_scale=_interned(options.softmax_scale))
    if _last is not None and _last.is_like(inputs.varlen, inputs, options):
        return _with_lengths(inputs, _last.known)
    key = calls.key_of(inputs.varlen, inputs, options)
    before = None if key is None else _ways.find(key)
    known: _Way | str
    if before is not None:
        known = before
    else:
        try:
            known = _find(inputs, options)
        except (_Refusal, TypeError, ValueError) as error:
            known = str(error)
        if key is not None:
            _ways.keep(key, known)
    if isinstance(known, str):
        raise _Refusal(known)
    if before is not None:  # what comes twice is likely to come again
        _last = calls.Last.of(inputs.varlen, inputs, options, known)
    return _with_lengths(inputs, known)


_scales: dict[float, float] = {}


def _interned(scale: float | None) -> float | None:
    """One object for one number: torch makes a new one for each call, and calls are told by their options' objects."""
    if scale is None:
        return None
    if len(_scales) >= _MOST_SCALES:
        _scales.clear()
    return _scales.setdefault(scale, scale)


_MOST_SCALES = 1024


def _with_lengths(inputs: AttentionInputs, known: _Way) -> tuple[AttentionInputs, Flags, ops.Route]:
    inputs = AttentionInputs._make((*inputs[:8], *known.max_seqlens))
    if inputs.varlen:
        try:
            checks.lengths(inputs)
        except ValueError as error:
            raise _Refusal(str(error)) from None
    return inputs, known.flags, known.route


def _find(inputs: AttentionInputs, options: Options) -> _Way:
    if inputs.v.shape[-1] != inputs.q.shape[-1]:
        raise _Refusal("the head_dim of value is not that of query")
    inputs, flags = checks.call(inputs.varlen, inputs, options)
    chip = chip_of(inputs.q.device)
    if chip.device_type == "cuda" and not chip.emulated:
        spec = AttentionSpec.of(inputs, flags)
        if not dispatch.select(spec, inputs.extent, chip).requires:  # torch's own kernels are faster than tiled torch
            refused = dispatch.explain(spec, inputs.extent, chip).refused
            raise _Refusal("fa4 has no kernel: " + "; ".join(f"{name} {', '.join(why)}" for name, why in refused))
    return _Way(flags, ops.route(inputs, flags), inputs[8:])


def _forward(
    inputs: AttentionInputs, options: Options, mods: Mods | None = None, num_splits: int | None = None
) -> tuple[Tensor, Tensor]:
    inputs, flags, route = _way(inputs, options)
    if mods is not None:
        return ops.route(inputs, flags, mods).forward(inputs, mods)
    if num_splits is not None and num_splits != route.plan.splits:
        raise _Refusal(f"num_splits is {num_splits}, and fa4 chose {route.plan.splits}")
    return route.forward(inputs)


def _backward(
    saved: Saved, inputs: AttentionInputs, options: Options, mods: Mods | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    inputs, flags, _ = _way(inputs, options._replace(deterministic=deterministic))
    flags = flags._replace(needs_backward=True)
    if mods is None:
        dq, dk, dv, _ = torch.ops.fa4.backward(*saved, *inputs, *flags)
    else:
        dq, dk, dv, *_ = torch.ops.fa4.backward_with_mods(*saved, *inputs, *mods, *flags)
    return dq, dk, dv


def _in_layout_of(x: Tensor, model: Tensor) -> Tensor:
    """x with the strides that torch.empty_like(model) has, which torch.compile relies on."""
    if x.stride() == model.stride():  # dense, so that empty_like keeps its strides
        return x
    result = torch.empty_like(model)
    return x if x.stride() == result.stride() else result.copy_(x)


def _rows_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim), and back."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _random_numbers(query: Tensor, mods: Mods | None) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's operators return for dropout: seed and offset together, an offset that nobody reads, and a mask.
    Without dropout nobody reads any, and they are not set: that would be two kernels a call."""
    offset, no_mask = empty((), torch.uint64, query.device), empty((0,), query.dtype, query.device)
    if mods is None or mods.dropout_seed is None:
        return empty((2,), torch.uint64, query.device), offset, no_mask
    return mods.dropout_seed.view(torch.uint64), offset, no_mask


def _dropout(
    query: Tensor, dropout_p: float, seed: Tensor | None = None, return_debug_mask: bool = False
) -> Mods | None:
    """A call's dropout, if it has any, by a new seed or that of the forward."""
    if return_debug_mask:
        raise _Refusal("return_debug_mask is asked for, and fa4 has none")
    if not dropout_p:
        return None
    if seed is None:
        dropout_p, seed = Dropout(dropout_p).checked(query.device)
    return Mods([], [], "", "", [], 0, 0, [], dropout_p, None if seed is None else seed.view(torch.int64))


# The operators, with torch's arguments --------------------------------------------------------------------------------


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    mods = _dropout(query, dropout_p, return_debug_mask=return_debug_mask)
    for name, x in (("alibi_slopes", alibi_slopes), ("block_table", block_table)):
        if x is not None:
            raise _Refusal(f"{name} is given")
    if seqused_k is not None and cum_seq_q is None:
        raise _Refusal("seqused_k is given without cumulative lengths")
    inputs = AttentionInputs(query, key, value, None, cum_seq_q, cum_seq_k, None, seqused_k, max_q, max_k)
    options = Options(scale, is_causal, (window_size_left, window_size_right))
    out, lse = _forward(inputs, options, mods, num_splits)
    return out, lse, *_random_numbers(query, mods)


def _flash_attention_forward_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result, lse, *_ = _flash_attention_forward(*args, **kwargs)
    out.copy_(result)
    return lse


def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(query, key, value, None, cum_seq_q, cum_seq_k, None, None, max_q, max_k)
    options = Options(scale, is_causal, (window_size_left, window_size_right))
    return _backward(Saved(out, logsumexp, grad_out), inputs, options, _dropout(query, dropout_p, rng_state))


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    mods = _dropout(query, dropout_p, return_debug_mask=return_debug_mask)
    q, k, v = _rows_first(query, key, value)
    out, lse = _forward(AttentionInputs(q, k, v), Options(scale, is_causal), mods)
    (out,) = _rows_first(out)
    sizes = None, None, query.shape[2], key.shape[2]
    return _in_layout_of(out, query), lse, *sizes, *_random_numbers(query, mods)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    mods = _dropout(query, dropout_p, philox_seed)
    q, k, v, out, grad_out = _rows_first(query, key, value, out, grad_out)
    grads = _backward(Saved(out, logsumexp, grad_out), AttentionInputs(q, k, v), Options(scale, is_causal), mods)
    return tuple(_in_layout_of(grad, x) for grad, x in zip(_rows_first(*grads), (query, key, value)))


def _refuse_on_a_cpu(query: Tensor, key: Tensor, dropout_p: float, is_causal: bool, attn_mask: Tensor | None) -> None:
    if dropout_p:
        raise _Refusal("dropout_p is given, and torch's operator for CPUs has no place for a seed")
    if attn_mask is not None:
        raise _Refusal("attn_mask is given")
    if is_causal and query.shape[2] != key.shape[2]:
        raise _Refusal("is_causal with other numbers of keys than queries, which torch aligns at the first key")


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _refuse_on_a_cpu(query, key, dropout_p, is_causal, attn_mask)
    out, lse, *_ = _sdpa_forward(query, key, value, dropout_p, is_causal, scale=scale)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    _refuse_on_a_cpu(query, key, dropout_p, is_causal, attn_mask)
    q, k, v, out, grad_out = _rows_first(query, key, value, out, grad_out)
    saved = Saved(out, logsumexp.contiguous(), grad_out)
    return _rows_first(*_backward(saved, AttentionInputs(q, k, v), Options(scale, is_causal)))


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_attention_forward_inplace,
    "_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
_CPU_OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}
