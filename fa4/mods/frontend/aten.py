"""Map from torch operators to graph operators: everything that a traced function may use. One line each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

Record = Callable[..., int]  # (recorder, kind of the result, *arguments, **keyword arguments) -> node


def _node(recorder: Any, x: Any, kind: str, keep: bool = False) -> int:
    """Return the node of a tensor or number, as a `kind`. keep: a number stays a constant."""
    if isinstance(x, Tensor):
        return recorder.builder.to(kind, recorder.node(x))
    return recorder.builder.const(x, kind) if keep else recorder.builder.number(x, kind)


def _common(recorder: Any, *xs: Any) -> str:
    """Return the kind in which values are compared."""
    kinds = {recorder.builder.kind(recorder.node(x)) if isinstance(x, Tensor) else type(x).__name__ for x in xs}
    return next(kind for kind in ("float", "int", "bool") if kind in kinds)


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
    """For bools, the logical operator."""
    return lambda r, kind, *xs: r.builder.op(op if kind == "bool" else f"bit{op}", *(_node(r, x, kind) for x in xs))


def _bitwise_not(r, kind, x):
    node = _node(r, x, kind)
    return r.builder.op("not", node) if kind == "bool" else r.builder.op("bitxor", node, r.builder.const(-1, "int"))


def _divide(r, kind, a, b, rounding_mode=None):
    if kind == "int":
        builder, first, second = r.builder, _node(r, a, kind), _node(r, b, kind, keep=True)
        quotient = builder.op("floordiv", first, second)
        if rounding_mode == "floor":
            return quotient
        return builder.op("add", quotient, builder.to(kind, _is_below(builder, first, second)))
    quotient = r.builder.op("div", _node(r, a, kind), _node(r, b, kind))
    return quotient if rounding_mode is None else r.builder.op(rounding_mode, quotient)


def _remainder(r, kind, a, b):
    """Has the sign of b."""
    first, second = _node(r, a, kind), _node(r, b, kind, keep=True)
    if kind == "int":
        return r.builder.op("mod", first, second)
    whole = r.builder.op("floor", r.builder.op("div", first, second))
    return r.builder.op("sub", first, r.builder.op("mul", whole, second))


def _is_below(builder, first, second):
    """Whether an integer quotient's floor is below its truncation."""
    rest, zero = builder.op("mod", first, second), builder.const(0, "int")
    opposite = builder.op("lt", builder.op("bitxor", first, second), zero)
    return builder.op("and", builder.op("ne", rest, zero), opposite)


def _fmod(r, kind, a, b):
    """Has the sign of a."""
    builder, first, second = r.builder, _node(r, a, kind), _node(r, b, kind, keep=True)
    if kind == "int":
        rest = builder.op("mod", first, second)
        return builder.op("where", _is_below(builder, first, second), builder.op("sub", rest, second), rest)
    whole = builder.op("trunc", builder.op("div", first, second))
    return builder.op("sub", first, builder.op("mul", whole, second))


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


def _is_nan(r, kind, x):
    node = _node(r, x, "float")
    return r.builder.op("ne", node, node)


def _is_inf(r, kind, x):
    return r.builder.op("eq", r.builder.op("abs", _node(r, x, "float")), r.builder.const(math.inf, "float"))


def _sign(r, kind, x):
    node, zero = _node(r, x, kind), r.builder.const(0, kind)
    above, below = (r.builder.to(kind, r.builder.op(op, node, zero)) for op in ("gt", "lt"))
    return r.builder.op("sub", above, below)


# Composed operators. They are as accurate as the arithmetic where results are small or arguments large; erfc, like erf
# in kernels, only has an absolute error bound.


class _Floats:
    """Graph operators on float nodes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def __getattr__(self, op: str) -> Callable[..., int]:
        return lambda *args: self.builder.op(op, *(self(x) for x in args))

    def __call__(self, x: int | float) -> int:
        """Return a node unchanged; return a constant node for a number."""
        return self.builder.const(x, "float") if isinstance(x, float) else x

    def either(self, a: int, b: int) -> int:
        return self.builder.op("or", a, b)

    def both(self, a: int, b: int) -> int:
        return self.builder.op("and", a, b)


def _composed(formula: Callable[..., int]) -> Record:
    """Record formula(operators on nodes, *nodes of the arguments)."""
    return lambda r, kind, *xs: formula(_Floats(r.builder), *(_node(r, x, "float") for x in xs))


def _cosine_of_arc(f, x):
    """sqrt(1 - x^2)."""
    return f.sqrt(f.mul(f.sub(1.0, x), f.add(1.0, x)))


def _cosh(f, x):
    return f.mul(0.5, f.add(f.exp(x), f.exp(f.neg(x))))


def _expm1(f, x):
    """tanh(x / 2) = (exp(x) - 1) / (exp(x) + 1)."""
    return f.mul(f.tanh(f.mul(0.5, x)), f.add(f.exp(x), 1.0))


def _asinh(f, x):
    """With a = |x|: log(a + sqrt(a^2 + 1)), where a^2 may be infinite."""
    a = f.abs(x)
    inverse = f.div(1.0, a)
    root = f.sqrt(f.add(f.mul(inverse, inverse), 1.0))
    size = f.log1p(f.add(a, f.div(a, f.add(inverse, root))))
    return f.where(f.lt(x, 0.0), f.neg(size), size)


def _acosh(f, x):
    above = f.sub(x, 1.0)
    return f.log1p(f.add(above, f.mul(f.sqrt(above), f.sqrt(f.add(x, 1.0)))))


def _hypot(f, x, y):
    a, b = f.abs(x), f.abs(y)
    small, large = f.min(a, b), f.max(a, b)
    ratio = f.where(f.eq(small, large), 1.0, f.div(small, large))  # also for zeros and infinities
    return f.mul(large, f.sqrt(f.add(f.mul(ratio, ratio), 1.0)))


def _copysign(f, x, sign):
    is_negative = f.either(f.lt(sign, 0.0), f.lt(f.div(1.0, sign), 0.0))  # -0 too
    size = f.abs(x)
    return f.where(is_negative, f.neg(size), size)


def _round_half_even(f, x):
    """Round to the nearest integer, ties to even."""
    size = f.abs(x)
    whole = f.floor(size)
    part, half = f.sub(size, whole), f.mul(0.5, whole)
    is_odd = f.ne(half, f.floor(half))
    rounds_up = f.either(f.gt(part, 0.5), f.both(f.eq(part, 0.5), is_odd))
    size = f.where(rounds_up, f.add(whole, 1.0), whole)
    return f.where(f.lt(x, 0.0), f.neg(size), size)


def _round(r, kind, x, decimals=0):
    if kind == "int":
        return _node(r, x, kind)
    f, node, factor = _Floats(r.builder), _node(r, x, kind), 10.0 ** abs(decimals)
    if not decimals:
        return _round_half_even(f, node)
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    return r.builder.op(back, _round_half_even(f, r.builder.op(there, node, f(factor))), f(factor))


_COMPOSED: dict[str, Callable[..., int]] = {
    "expm1": _expm1, "cosh": _cosh, "asinh": _asinh, "acosh": _acosh, "hypot": _hypot,
    "atanh": lambda f, x: f.mul(0.5, f.sub(f.log1p(x), f.log1p(f.neg(x)))),
    "sinh": lambda f, x: f.mul(f.tanh(x), _cosh(f, x)), "tan": lambda f, x: f.div(f.sin(x), f.cos(x)),
    "asin": lambda f, x: f.atan2(x, _cosine_of_arc(f, x)), "acos": lambda f, x: f.atan2(_cosine_of_arc(f, x), x),
    "atan": lambda f, x: f.atan2(x, 1.0), "log10": lambda f, x: f.mul(f.log(x), 1 / math.log(10)),
    "erfc": lambda f, x: f.sub(1.0, f.erf(x)), "reciprocal": lambda f, x: f.div(1.0, x), "copysign": _copysign,
}  # fmt: skip


def _constant(position: int | None, value: float = 0) -> Record:
    """Record a tensor filled with the argument at `position`, or with `value`."""
    return lambda r, kind, *args, **_: r.builder.number(value if position is None else args[position], kind)


LIKE_CONSTANTS = {
    "zeros": _constant(None, 0), "ones": _constant(None, 1), "full": _constant(1), "scalar_tensor": _constant(0),
    "zeros_like": _constant(None, 0), "ones_like": _constant(None, 1), "full_like": _constant(1),
    "new_zeros": _constant(None, 0), "new_ones": _constant(None, 1), "new_full": _constant(2),
    "empty": _constant(None, 0), "empty_like": _constant(None, 0),  # created and filled by autograd
}  # fmt: skip

OPERATORS: dict[str, Record] = {
    **LIKE_CONSTANTS,
    **{name: _unary(name) for name in (
        "neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "floor", "ceil",
        "trunc", "erf", "log1p")},
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor", "not")},
    **{f"bitwise_{name}": _bitwise(name) for name in ("and", "or", "xor")},
    **{f"__{name}__": _bitwise(name) for name in ("and", "or", "xor")},
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), _binary("shl", keep=True)),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), _binary("shr", keep=True)),
    **dict.fromkeys(("alias", "clone", "detach", "expand", "_to_copy", "lift_fresh", "lift_fresh_copy", "view", "sum",
                     "_unsafe_view", "squeeze", "unsqueeze", "any", "all", "amax", "amin"),
                    lambda r, kind, x, *_, **__: _node(r, x, kind)),
    **dict.fromkeys(("copy", "fill"), lambda r, kind, x, source, *_: _node(r, source, kind)),
    "bitwise_not": _bitwise_not, "add": _binary("add", "or"), "sub": _binary("sub"), "mul": _binary("mul", "and"),
    "rsub": lambda r, kind, a, b, alpha=1: OPERATORS["sub"](r, kind, b, a, alpha=alpha),
    "div": _divide, "floor_divide": lambda r, kind, a, b: _divide(r, kind, a, b, "floor"), "remainder": _remainder,
    "pow": _pow,
    "maximum": _binary("max", "or"), "minimum": _binary("min", "and"), "clamp": _clamp, "clamp_min": _clamp,
    "clamp_max": lambda r, kind, x, bound: _clamp(r, kind, x, None, bound),
    "relu": lambda r, kind, x: _clamp(r, kind, x, 0), "where": _where,
    "masked_fill": lambda r, kind, x, mask, value: _where(r, kind, mask, value, x),
    "atan2": _binary("atan2"), "fmod": _fmod, "round": _round,
    **{name: _composed(formula) for name, formula in _COMPOSED.items()},
    "sgn": _sign, "sign": _sign, "isnan": _is_nan, "isinf": _is_inf,
}  # fmt: skip


Reduce = Callable[[Any, str, list[int]], int]  # (builder, kind of the result, nodes of a row's elements) -> node


def _folded(op: str, of: str | None = None) -> Reduce:
    """of: the kind to which elements are converted; None means the result's kind."""

    def reduce(builder, kind, nodes):
        first, *others = (builder.to(of or kind, node) for node in nodes)
        for node in others:
            first = builder.op(op, first, node)
        return first

    return reduce


# Reductions of a row, over its elements in order.
REDUCTIONS: dict[str, Reduce] = {
    "any": _folded("or", "bool"), "all": _folded("and", "bool"), "sum": _folded("add"), "amax": _folded("max"),
    "amin": _folded("min"),
}  # fmt: skip
