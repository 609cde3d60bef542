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
from typing import Any

import torch

from .operators import CPU_OPERATORS, OPERATORS
from .ways import Refusal

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
            for name, serve in {**OPERATORS, **(CPU_OPERATORS if device == "cpu" else {})}.items():
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
        except Refusal as refusal:
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
