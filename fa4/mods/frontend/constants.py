"""Names used by code, and constant objects: nothing in a constant changes, so a traversal need not follow it."""

from __future__ import annotations

import collections
import dis
import enum
import functools
import types
from typing import Any, NamedTuple

from ..ir.ready import ReadyMade


class Unseen(TypeError):
    """A change of something that the function may read could not be detected."""


# Packages whose functions and classes are constants. Attributes of their modules are not.
_PACKAGES = frozenset(
    ("abc", "builtins", "collections", "dataclasses", "enum", "functools", "itertools", "math", "numbers", "numpy",
     "operator", "torch", "types", "typing")
)  # fmt: skip
# Modules of these packages whose functions return process state.
_MODULES_OF_STATE = tuple(
    f"torch.{name}"
    for name in ("accelerator", "backends", "compiler", "cuda", "distributed", "jit", "mps", "mtia", "xpu")
)
# Names that let a function read what its code does not name.
_HIDING = frozenset(
    ("getattr", "hasattr", "vars", "dir", "globals", "locals", "eval", "exec", "compile", "open", "input", "id",
     "attrgetter", "methodcaller", "import_module", "format_map", "asdict", "astuple", "__import__", "__dict__",
     "__dir__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__", "__globals__", "__closure__",
     "__builtins__", "__name__", "__doc__", "__annotations__", "__subclasses__", "f_globals", "f_locals", "f_back")
)  # fmt: skip
# Attributes of a tensor that are not compared.
STATE_OF_TENSOR = frozenset(
    ("_version", "grad", "_grad", "grad_fn", "_grad_fn", "is_leaf", "_base", "_cdata", "names", "output_nr",
     "retains_grad")
)  # fmt: skip
TEXT = dict.fromkeys(("__repr__", "__str__", "__format__"))  # methods that convert an object to text
_METHODS_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_FIELD = type(vars(collections.namedtuple("_", "x"))["x"])  # field of a named tuple
_IN_C = (*_METHODS_IN_C, types.GetSetDescriptorType, types.MemberDescriptorType, _FIELD)
IMMUTABLE = (object, int, str, float)  # their C methods read nothing but the object


class _Names(NamedTuple):
    """Names used by code: globals and attributes."""

    of_globals: tuple[str, ...]
    of_attributes: dict[str, None]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> _Names:
    """Return the names used by code and by the functions in it.

    Raises:
        Unseen: the code reads something without naming it.
    """
    of_globals, of_attributes = dict[str, None](), dict[str, None]()
    for step in dis.get_instructions(code):
        op, name = step.opname, step.argval
        if op.startswith(("IMPORT", "MATCH_CLASS")):
            raise Unseen(f"reads by {op}")
        if op.startswith(("FORMAT", "CONVERT")) or (op == "LOAD_CONST" and isinstance(name, str) and "%" in name):
            of_attributes.update(TEXT)
        if op.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")):
            of_globals[name] = None
        elif isinstance(name, str) and op.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")):
            of_attributes[name] = None
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = names_in(const)
            of_globals.update(dict.fromkeys(inner.of_globals))
            of_attributes.update(inner.of_attributes)
    hidden = _HIDING.intersection((*of_globals, *of_attributes))
    if hidden or "format" in of_attributes:  # "{0.attribute}".format(x)
        raise Unseen(f"uses {', '.join(hidden) or 'format'}")
    return _Names(tuple(of_globals), of_attributes)


def is_of_package(module: Any) -> bool:
    """Whether a module, by its name, belongs to a package whose functions and classes are constants."""
    return root(module) in _PACKAGES


def root(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def is_constant(x: Any) -> bool:
    """Whether nothing in x changes.

    Raises:
        Unseen: x is a function that reads what its caller does not name.
    """
    if isinstance(x, type):
        is_in_c = not x.__flags__ & 1 << 9
        if is_in_c or is_of_package(x.__module__):
            check_name(x)
            return True
        return issubclass(x, ReadyMade)
    if isinstance(x, types.FunctionType):  # a package's decorator returns a closure over the caller's function
        module = x.__globals__.get("__name__")
        if x.__closure__ is not None or not is_of_package(module):
            return False
        check_name(x)
        check_no_state(x.__name__, module)
        return True
    if isinstance(x, types.BuiltinFunctionType):
        of, module = x.__self__, (x.__module__ or "").lstrip("_")  # C modules often have a leading underscore
        check_name(x)
        check_no_state(x.__name__, module)
        if of is None or isinstance(of, types.ModuleType):
            return is_of_package(module)
        return is_constant(of) if isinstance(of, type) else root(type(of).__module__) == "torch"
    if isinstance(x, _IN_C):
        if not isinstance(x, _FIELD):
            check_name(x)
        return True
    if isinstance(x, enum.Enum):
        return is_constant(type(x))
    return type(x).__module__ in ("torch._ops", "dataclasses")


def check_name(x: Any) -> None:
    """Raise if a function or class, under any alias, reads what its caller does not name."""
    name = x.__name__
    if name in _HIDING or name in STATE_OF_TENSOR or (name == "format" and x is not format):
        raise Unseen(f"uses {name}")


def check_no_state(name: str, module: Any) -> None:
    """Raise if a function of a package's module, or any function of the module, returns process state."""
    if (
        name.startswith("get_")
        or name.endswith("_enabled")
        or name == "initial_seed"
        or module == "torch._C"
        or module.startswith(_MODULES_OF_STATE)
    ):
        raise Unseen(f"asks {module} for its state")


def is_in_python(x: type) -> bool:
    """Whether a class has no C methods except those of immutable types: others have hidden state."""
    return not any(
        isinstance(value, _METHODS_IN_C) and value.__objclass__ not in IMMUTABLE for value in vars(x).values()
    )
