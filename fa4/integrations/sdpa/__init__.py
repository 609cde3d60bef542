"""fa4 as the kernel of torch's scaled_dot_product_attention and varlen_attn, by torch's flash attention registry.

    fa4.register_sdpa()
    torch.nn.attention.activate_flash_attention_impl("fa4")
    ...
    torch.nn.attention.restore_flash_attention_impl()

While it is active, fa4 runs the aten operators of torch's flash attention. Calls that fa4 does not support, or would
run in plain torch, go to torch's own kernel; a warning states each reason once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .cached_calls import Refusal
from .operators import CPU_OPERATORS, OPERATORS

NAME = "fa4"
DEVICES = ("cuda", "cpu")


def register_sdpa(*, devices: Iterable[str] = ("cuda",), activate: bool = False) -> None:
    """Register "fa4" with `torch.nn.attention.activate_flash_attention_impl`.

    After activation `scaled_dot_product_attention`, `torch.nn.attention.varlen.varlen_attn` and nested tensors run on
    fa4, forward and backward, wherever torch can use flash attention, and torch prefers flash attention to cuDNN.
    `torch.nn.attention.restore_flash_attention_impl()` restores torch's own kernels and order.

    Args:
        devices: devices whose tensors fa4 serves: "cuda", "cpu" or both. On a CPU fa4 runs tiled torch, which is slower
            than torch's own kernel: use it for tests, and for `fa4.emulator.emulate`, which uses CPU tensors.
        activate: activate it at once. Activation initialises CUDA if there is a GPU.

    Raises:
        RuntimeError: this torch has no registry that can be restored.
        ValueError: an unknown device.
    """
    import torch.nn.attention

    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):  # 2.10 registers, but cannot restore
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


def _activate(devices: tuple[str, ...]) -> types.SimpleNamespace:
    """Register the kernels, and return the object that torch holds while fa4 is active."""
    if "cuda" in devices and torch.cuda.is_available():
        # torch may put cuDNN first when it first selects a backend: trigger this before setting another order.
        x = torch.zeros(1, 1, 1, 8, dtype=torch.float16, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    libraries = [torch.library.Library("aten", "IMPL")]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # about overriding
        for device in devices:
            key = device.upper()
            for name, serve in {**OPERATORS, **(CPU_OPERATORS if device == "cpu" else {})}.items():
                libraries[0].impl(name, _kernel(name, serve, _torch_kernel(name, key)), key, with_keyset=True)
    preference = _prefer_flash()
    preference.callback(libraries.clear)  # the end of a library ends its registrations
    return types.SimpleNamespace(remove=preference.close)


def _prefer_flash() -> contextlib.ExitStack:
    """Make torch prefer flash attention among the enabled backends until the returned stack is closed. By default torch
    prefers cuDNN on new GPUs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cuda, stack = torch.backends.cuda, contextlib.ExitStack()
    if cuda.flash_sdp_enabled():
        enabled = [SDPBackend.FLASH_ATTENTION]
        enabled += [SDPBackend.CUDNN_ATTENTION] if cuda.cudnn_sdp_enabled() else []
        enabled += [SDPBackend.EFFICIENT_ATTENTION] if cuda.mem_efficient_sdp_enabled() else []
        enabled += [SDPBackend.MATH] if cuda.math_sdp_enabled() else []
        stack.enter_context(sdpa_kernel(enabled, set_priority=True))
        atexit.register(stack.close)  # an open context would raise at interpreter exit
        stack.callback(atexit.unregister, stack.close)
    return stack


def _torch_kernel(name: str, key: str) -> Any:
    """Return torch's own kernel of an operator, or None."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


def _kernel(name: str, serve: Callable[..., Any], torch_kernel: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return serve(*args, **kwargs)
        except Refusal as refusal:
            reason = str(refusal)
        if torch_kernel is None:
            raise NotImplementedError(f"fa4 does not serve aten::{name} here, and torch has no kernel for it: {reason}")
        _warn_once(reason)
        return torch_kernel.call_boxed(keys, *args, **kwargs)

    return kernel


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"fa4 leaves this attention to torch's own kernel: {reason}. Said once.", stacklevel=3)
