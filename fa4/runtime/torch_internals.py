"""Private entry points of torch that save host time, each with a public fallback for versions of torch without it.

No other host module on the path of a call uses private parts of torch. An entry point is used if it passes a probe. If
only torch's private state can tell whether an operator must be dispatched, the fallback answer is yes: calls then take
torch's dispatcher, slower and with the same results.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def entry(path: str, fallback: Any, probe: Callable[[Any], Any] = lambda found: True) -> Any:
    """Return torch.`path`, or the fallback if it is missing or its probe is false or raises."""
    try:
        found = pkgutil.resolve_name(f"torch.{path}")
        return found if probe(found) else fallback
    except Exception:  # another torch may raise anything
        return fallback


def _yes() -> bool:
    return True


def _is_bool(found: Any) -> bool:
    return isinstance(found(), bool)


# State of torch that requires the dispatcher:
profiler_enabled = entry("_C._autograd._profiler_enabled", _yes, _is_bool)
tracing = entry("_C._is_tracing", torch.jit.is_tracing, _is_bool)
in_function_mode = entry("_C._is_torch_function_mode_enabled", _yes, _is_bool)
dispatch_modes = entry("_C._len_torch_dispatch_stack", _yes, lambda found: found() >= 0)
transform: Callable[[], Any] | None = entry("_C._functorch.peek_interpreter_stack", None, lambda found: (found(),))
is_compiling = torch.compiler.is_compiling
# Other state:
deterministic_algorithms = entry(
    "_C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled, _is_bool
)
autocast_anywhere = entry("_C._is_any_autocast_enabled", _yes, _is_bool)
# whether torch.func.vmap maps a tensor
is_mapped = entry("_C._functorch.is_batchedtensor", lambda x: True, lambda found: not found(torch.empty(0)))
_driver_version: Callable[[], int] = entry("_C._cuda_getDriverVersion", lambda: 0, callable)
current_raw_stream: Callable[[int], int] = entry(
    "_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream, callable
)
current_cuda_device = entry("_C._cuda_getDevice", torch.cuda.current_device, callable)  # requires a CUDA tensor


def cuda_of_driver() -> int:
    """Return the newest major version of CUDA that the driver knows; 0 without a GPU."""
    return _driver_version() // 1000 if torch.version.cuda and torch.cuda.is_available() else 0


_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_PLAIN_OR_SCALAR = _PLAIN | {type(None), int, bool}  # the checks report other types


def needs_dispatcher(arguments: tuple) -> bool:
    """Whether these arguments (q, k and v first, others may be None) need torch's dispatcher: tracing, a mode, a
    profiler, a function transform or a tensor subclass."""
    return (
        modes_need_dispatcher()
        or may_be_transformed()
        or tracing()
        or not _PLAIN.issuperset(map(type, arguments[:3]))
        or not _PLAIN_OR_SCALAR.issuperset(map(type, arguments[3:]))
    )


def modes_need_dispatcher() -> bool:
    """The part of `needs_dispatcher` that does not depend on the tensors."""
    return is_compiling() or dispatch_modes() > 0 or in_function_mode() or profiler_enabled()


def is_transformed() -> bool:
    """Whether a transform of torch.func is known to be active."""
    return transform is not None and transform() is not None


def may_be_transformed() -> bool:
    """Whether a transform of torch.func is active, or cannot be detected."""
    return transform is None or transform() is not None


def may_carry_tangents() -> bool:
    """Whether forward-mode differentiation is active, or cannot be detected."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def carries_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation would differentiate x."""
    return may_carry_tangents() and forward_ad.unpack_dual(x).tangent is not None


def _through_a_view(arguments: tuple) -> tuple:
    """Unwrap by a view: a view of a dead wrapper is a view of the tensor in it."""
    return tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in arguments)


unwrap_dead_wrappers = entry(
    "_functorch.utils.unwrap_dead_wrappers", _through_a_view, lambda found: found((1, None)) == (1, None)
)
"""Unwrap arguments whose wrappers outlived a transform of torch.func."""

scaled_dot_product_attention = entry("_C._nn.scaled_dot_product_attention", None, callable)
"""torch.nn.functional's function of this name, unless replaced; None if that cannot be determined."""

# Tools of compiled code. Import the module, not its functions: an emulated GPU replaces them there.
guards = entry("_C._dynamo.guards", None)
_probe_tensor = torch.empty(2, 3, device="cpu")
reinterpret_tensor = entry(
    "_C._dynamo.guards._reinterpret_tensor",
    torch.as_strided,
    lambda found: found(_probe_tensor, (3, 2), (1, 3)).stride() == (1, 3),
)
tensor_guards = entry("_C._dynamo.guards.TensorGuards", None)


def tensor_check(tensors: tuple[Tensor, ...], shapes: list, strides: list) -> Callable[..., bool] | None:
    """Return a test of as many tensors: types, dispatch keys, dtypes, devices and requires_grad of `tensors`, and the
    given sizes and strides (None: any). None if this torch has no such test."""
    try:
        check = tensor_guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except Exception:
        return None


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without its search for torch.func transforms, for calls under none."""
    apply = getattr(super(torch.autograd.Function, function), "apply", None)
    return function.apply if apply is None else apply


FAKE = entry("_subclasses.fake_tensor.FakeTensor", None)


def has_values(x: Tensor) -> bool:
    """Whether a tensor's numbers can be read."""
    return not (x.is_meta or (type(x) not in _PLAIN if FAKE is None else isinstance(x, FAKE)))


def is_constant(number: Any) -> bool:
    """Whether a number in code that torch compiles is the same at each call."""
    try:
        from torch.fx.experimental.symbolic_shapes import has_static_value
    except ImportError:
        return True
    return has_static_value(number)
