"""Private entry points of torch, which save host time, each with public API in its place where a torch lacks it.

No other host module of a call names a private part of torch. An entry point counts as there if it answers a first
question as expected. Where only torch's private state can tell whether an operator must be seen, the answer without it
is yes: calls then take torch's dispatcher, slower and with the same results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def entry(path: str, fallback: Any, question: Callable[[Any], Any] = lambda found: True) -> Any:
    """torch.`path`, or the fallback if it is missing or `question` of it is false or raises."""
    try:
        found = operator.attrgetter(path)(torch)
        return found if question(found) else fallback
    except Exception:  # whatever another torch raises
        return fallback


def _yes() -> bool:
    return True


def _is_bool(found: Any) -> bool:
    return isinstance(found(), bool)


# States of torch. Whether operators must be seen:
profiler_enabled = entry("_C._autograd._profiler_enabled", _yes, _is_bool)
tracing = entry("_C._is_tracing", torch.jit.is_tracing, _is_bool)
in_function_mode = entry("_C._is_torch_function_mode_enabled", _yes, _is_bool)
dispatch_modes = entry("_C._len_torch_dispatch_stack", _yes, lambda found: found() >= 0)
transform: Callable[[], Any] | None = entry("_C._functorch.peek_interpreter_stack", None, lambda found: (found(),))
is_compiling = torch.compiler.is_compiling
# and others:
deterministic_algorithms = entry(
    "_C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled, _is_bool
)
autocast_anywhere = entry("_C._is_any_autocast_enabled", _yes, _is_bool)
# whether a tensor is one of those that torch.func.vmap maps
is_mapped = entry("_C._functorch.is_batchedtensor", lambda x: True, lambda found: not found(torch.empty(0)))
current_cuda_device = entry("_C._cuda_getDevice", torch.cuda.current_device, callable)  # there is a CUDA tensor

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_PLAIN_OR_NOT = _PLAIN | {type(None), int, bool}  # what is no tensor is the checks' matter


def needs_dispatcher(arguments: tuple) -> bool:
    """Whether somebody has to see operators of these, q, k and v first, and some of which may be None: tracing, a mode,
    a profiler, a function transform or a tensor subclass."""
    return (
        modes_need_dispatcher()
        or may_be_transformed()
        or tracing()
        or not _PLAIN.issuperset(map(type, arguments[:3]))
        or not _PLAIN_OR_NOT.issuperset(map(type, arguments[3:]))
    )


def modes_need_dispatcher() -> bool:
    """The part of `needs_dispatcher` that tensors' types and dispatch keys do not tell."""
    return is_compiling() or dispatch_modes() > 0 or in_function_mode() or profiler_enabled()


def is_transformed() -> bool:
    """Whether a transform of torch.func is known to be at work."""
    return transform is not None and transform() is not None


def may_be_transformed() -> bool:
    """Whether a transform of torch.func is at work, or cannot be seen."""
    return transform is None or transform() is not None


def may_carry_tangents() -> bool:
    """Whether forward-mode differentiation is at work, or cannot be seen."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def _through_a_view(arguments: tuple) -> tuple:
    """A view of a wrapper without a transform is one of the tensor in it."""
    return tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in arguments)


def _unwrap() -> Callable[[tuple], tuple]:
    try:
        from torch._functorch.utils import unwrap_dead_wrappers

        return unwrap_dead_wrappers if unwrap_dead_wrappers((1, None)) == (1, None) else _through_a_view
    except Exception:
        return _through_a_view


unwrap_dead_wrappers = _unwrap()
"""Arguments as they are beneath wrappers that outlived a transform of torch.func."""

scaled_dot_product_attention = entry("_C._nn.scaled_dot_product_attention", None, callable)
"""What torch.nn.functional calls by this name, unless something stands in its place; None if that cannot be told."""

# Tools of compiled code. The module, not its functions: what stands in for a GPU replaces them there.
guards = entry("_C._dynamo.guards", None)
_turned = torch.empty(2, 3, device="cpu")
reinterpret_tensor = entry(
    "_C._dynamo.guards._reinterpret_tensor",
    torch.as_strided,
    lambda found: found(_turned, (3, 2), (1, 3)).stride() == (1, 3),
)
tensor_guards = entry("_C._dynamo.guards.TensorGuards", None)


def has_short_allocation() -> bool:
    """Whether compiled code of this torch allocates on CUDA by `guards._empty_strided_cuda`."""
    return hasattr(guards, "_empty_strided_cuda")


def tensor_check(tensors: tuple[Tensor, ...], shapes: list, strides: list) -> Callable[..., bool] | None:
    """Test of as many tensors: types, dispatch keys, dtypes, devices and requires_grad those of `tensors`, sizes and
    strides those given, or any for None. None where this torch has no such test."""
    try:
        check = tensor_guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except Exception:
        return None


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its search for transforms of torch.func, for calls under none."""
    apply = getattr(super(torch.autograd.Function, function), "apply", None)
    return function.apply if apply is None else apply


def _fake_tensor() -> tuple[type, ...]:
    try:
        from torch._subclasses.fake_tensor import FakeTensor

        return (FakeTensor,)
    except ImportError:
        return ()


FAKE = _fake_tensor()


def has_values(x: Tensor) -> bool:
    """Whether a tensor's numbers can be read."""
    return not (x.is_meta or (isinstance(x, FAKE) if FAKE else type(x) not in _PLAIN))


def is_constant(number: Any) -> bool:
    """Whether a number of code that torch compiles is the same at each call."""
    try:
        from torch.fx.experimental.symbolic_shapes import has_static_value
    except ImportError:
        return True
    return has_static_value(number)
