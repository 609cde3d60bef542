"""Torch's operators in the graph's own: what a traced function may use. One line each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def kind_of(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


Record = Callable[..., int]  # (recorder, kind of the result, *arguments, **keyword arguments) -> node


def _node(recorder: Any, x: Any, kind: str, keep: bool = False) -> int:
    """A tensor's or number's node, as a `kind`. keep: a number stays in the code, where it decides which."""
    if isinstance(x, Tensor):
        return recorder.builder.to(kind, recorder.node(x))
    return recorder.builder.const(x, kind) if keep else recorder.builder.number(x, kind)


def _common(recorder: Any, *xs: Any) -> str:
    """The kind in which values are compared."""
    kinds = {recorder.builder.kind(recorder.node(x)) if isinstance(x, Tensor) else _number_kind(x) for x in xs}
    return next(kind for kind in ("float", "int", "bool") if kind in kinds)


def _number_kind(x: Any) -> str:
    return {bool: "bool", int: "int", float: "float"}[type(x)]


def _unary(op: str) -> Record:
    return lambda r, kind, x: r.builder.op(op, _node(r, x, kind))


def _binary(op: str, of_bools: str | None = None, keep: bool = False) -> Record:
    def record(r, kind, a, b, alpha=1):
        name = of_bools if kind == "bool" and of_bools else op
        second = _node(r, b, kind, keep)
        if alpha != 1:
            second = r.builder.op("mul", second, r.builder.number(alpha, kind))
        return r.builder.op(name, _node(r, a, kind), second)

    return record


def _compare(op: str) -> Record:
    def record(r, kind, a, b):
        common = _common(r, a, b)
        a, b = (_node(r, x, common) for x in (a, b))
        if common == "bool" and op in ("eq", "ne"):
            differ = r.builder.op("xor", a, b)
            return differ if op == "ne" else r.builder.op("not", differ)
        if common == "bool":
            a, b = (r.builder.to("int", x) for x in (a, b))
        return r.builder.op(op, a, b)

    return record


def _logical(op: str) -> Record:
    return lambda r, kind, *xs: r.builder.op(op, *(_node(r, x, "bool") for x in xs))


def _bitwise(op: str) -> Record:
    """Of bools the logical operator."""
    return lambda r, kind, *xs: r.builder.op(op if kind == "bool" else f"bit{op}", *(_node(r, x, kind) for x in xs))


def _bitwise_not(r, kind, x):
    node = _node(r, x, kind)
    return r.builder.op("not", node) if kind == "bool" else r.builder.op("bitxor", node, r.builder.const(-1, "int"))


def _rsub(r, kind, a, b, alpha=1):
    return OPERATORS["sub"](r, kind, b, a, alpha=alpha)


def _divide(r, kind, a, b, rounding_mode=None):
    if kind == "int":
        if rounding_mode != "floor":
            raise TypeError(f"rounding_mode {rounding_mode!r} of integers")
        return r.builder.op("floordiv", _node(r, a, kind), _node(r, b, kind, keep=True))
    quotient = r.builder.op("div", _node(r, a, kind), _node(r, b, kind))
    return quotient if rounding_mode is None else r.builder.op(rounding_mode, quotient)


def _floor_divide(r, kind, a, b):
    return _divide(r, kind, a, b, "floor")


def _remainder(r, kind, a, b):
    """With the sign of b."""
    first, second = _node(r, a, kind), _node(r, b, kind, keep=True)
    if kind == "int":
        return r.builder.op("mod", first, second)
    whole = r.builder.op("floor", r.builder.op("div", first, second))
    return r.builder.op("sub", first, r.builder.op("mul", whole, second))


def _pow(r, kind, base, exponent):
    builder = r.builder
    if isinstance(base, Tensor) and not isinstance(exponent, Tensor):
        x = _node(r, base, kind)
        if exponent in (2, 3, 4):
            square = builder.op("mul", x, x)
            return {2: square, 3: builder.op("mul", square, x), 4: builder.op("mul", square, square)}[exponent]
        if exponent in (1, 0):
            return x if exponent else builder.const(1, kind)
        roots = {0.5: "sqrt", -0.5: "rsqrt"}
        if kind == "float" and exponent in roots:
            return builder.op(roots[exponent], x)
        if kind == "float" and exponent == -1:
            return builder.op("div", builder.const(1.0, kind), x)
    if kind == "float" and isinstance(base, (int, float)) and base > 0:
        scaled = builder.op("mul", _node(r, exponent, kind), builder.const(math.log2(base), kind))
        return builder.op("exp2", scaled)
    if kind != "float":
        raise TypeError("powers of integers other than the second, third and fourth")
    return builder.op("pow", _node(r, base, kind), _node(r, exponent, kind))


def _clamp(r, kind, x, min=None, max=None):
    node = _node(r, x, kind)
    for op, bound in (("max", min), ("min", max)):
        if bound is not None:
            node = r.builder.op(op, node, _node(r, bound, kind))
    return node


def _where(r, kind, condition, a, b):
    return r.builder.op("where", _node(r, condition, "bool"), _node(r, a, kind), _node(r, b, kind))


def _masked_fill(r, kind, x, mask, value):
    return _where(r, kind, mask, value, x)


def _same(r, kind, x, *_, **__):
    return _node(r, x, kind)


def _copy(r, kind, x, source, *_):
    return _node(r, source, kind)


def _is_nan(r, kind, x):
    node = _node(r, x, "float")
    return r.builder.op("ne", node, node)


def _is_inf(r, kind, x):
    return r.builder.op("eq", r.builder.op("abs", _node(r, x, "float")), r.builder.const(math.inf, "float"))


def _sign(r, kind, x):
    node, zero = _node(r, x, kind), r.builder.const(0, kind)
    above, below = (r.builder.to(kind, r.builder.op(op, node, zero)) for op in ("gt", "lt"))
    return r.builder.op("sub", above, below)


def _constant(position: int | None, value: float = 0) -> Record:
    """A tensor filled with the argument at `position`, or with `value`."""
    return lambda r, kind, *args, **_: r.builder.number(value if position is None else args[position], kind)


LIKE_CONSTANTS = {
    "zeros": _constant(None, 0), "ones": _constant(None, 1), "full": _constant(1), "scalar_tensor": _constant(0),
    "zeros_like": _constant(None, 0), "ones_like": _constant(None, 1), "full_like": _constant(1),
    "new_zeros": _constant(None, 0), "new_ones": _constant(None, 1), "new_full": _constant(2),
}  # fmt: skip

OPERATORS: dict[str, Record] = {
    **LIKE_CONSTANTS,
    **{name: _unary(name) for name in (
        "neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "floor", "ceil",
        "trunc", "erf")},
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor", "not")},
    **{f"bitwise_{name}": _bitwise(name) for name in ("and", "or", "xor")},
    **{f"__{name}__": _bitwise(name) for name in ("and", "or", "xor")},
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), _binary("shl", keep=True)),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), _binary("shr", keep=True)),
    **dict.fromkeys(("alias", "clone", "detach", "expand", "_to_copy", "lift_fresh", "lift_fresh_copy", "view", "sum",
                     "_unsafe_view", "squeeze", "unsqueeze", "any", "all", "amax", "amin"), _same),
    "bitwise_not": _bitwise_not, "add": _binary("add", "or"), "sub": _binary("sub"), "mul": _binary("mul", "and"),
    "rsub": _rsub, "div": _divide, "floor_divide": _floor_divide, "remainder": _remainder, "pow": _pow,
    "maximum": _binary("max", "or"), "minimum": _binary("min", "and"), "clamp": _clamp, "clamp_min": _clamp,
    "clamp_max": lambda r, kind, x, bound: _clamp(r, kind, x, None, bound),
    "relu": lambda r, kind, x: _clamp(r, kind, x, 0), "where": _where, "masked_fill": _masked_fill, "copy": _copy,
    "reciprocal": lambda r, kind, x: r.builder.op("div", r.builder.const(1.0, kind), _node(r, x, kind)),
    "sgn": _sign,
    "sign": _sign,
    "isnan": _is_nan, "isinf": _is_inf,
}  # fmt: skip


Reduce = Callable[[Any, str, list[int]], int]  # (builder, kind of the result, nodes of a row's elements) -> node


def _folded(op: str, of: str | None = None) -> Reduce:
    """of: the kind in which elements are taken, None for the result's."""

    def reduce(builder, kind, nodes):
        first, *others = (builder.to(of or kind, node) for node in nodes)
        for node in others:
            first = builder.op(op, first, node)
        return first

    return reduce


# Of rows: their elements, in order.
REDUCTIONS: dict[str, Reduce] = {
    "any": _folded("or", "bool"), "all": _folded("and", "bool"), "sum": _folded("add"), "amax": _folded("max"),
    "amin": _folded("min"),
}  # fmt: skip
