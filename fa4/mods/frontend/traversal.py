"""Everything a function can read while it is traced, found without running it.

The traversal starts at the function and follows the names in its code: cells, defaults, globals, attributes of modules,
classes, instances and functions, items of containers, and the functions among these. Each attribute named by any code
on the way is looked up in each object on the way. This is a superset of what the function reads. `Unseen` is raised
where the traversal cannot follow.
"""

from __future__ import annotations

import abc
import builtins
import collections
import enum
import functools
import sys
import types
import typing
from typing import Any

import torch
from torch import Tensor

from ..ir.ready import ReadyMade, plain_key
from . import constants
from .guards import MISSING, IdentityGuard

_MOST_OBJECTS = 1000  # of a traversal; beyond, tracing is faster
_TEXT_FUNCTIONS = frozenset(map(id, (str, repr, ascii, format, print)))
# Special methods that only named calls reach, or that read nothing during a trace.
_NOT_CALLED = frozenset(
    (*constants.TEXT, "__setattr__", "__delattr__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__",
     "__setstate__", "__replace__", "__copy__", "__deepcopy__", "__dict__", "__weakref__", "__annotate__",
     "__annotate_func__")
)  # fmt: skip
_BASES = (object, abc.ABC, typing.Generic, typing.Protocol, tuple)
_CONTAINERS = (tuple, list, set, frozenset, dict, torch.Size, collections.deque, collections.OrderedDict)


class Traversal:
    """Traversal from a function. key: everything reached, by value; tensors: the tensors reached, in order.

    Raises:
        constants.Unseen: a change of something reached could not be detected.
    """

    def __init__(self, function: Any, guard: IdentityGuard) -> None:
        self.tensors: list[Tensor] = []
        self._start, self._guard = function, guard
        self._reached: list[Any] = []
        self._numbers: dict[int, int] = {}  # position of each object reached, by id
        self._attributes: dict[str, None] = {}  # names of attributes in the code
        self._objects: list[tuple[int, Any, int]] = []  # with attributes: number, object, count of names looked up
        self._own_bases: dict[type, list[type]] = {}  # non-constant bases of the objects' classes
        keys: list[Any] = [self._key_of(function)]
        visited = 0
        while visited < len(self._reached) or self._look_up(keys):
            while visited < len(self._reached):
                if visited >= _MOST_OBJECTS:
                    raise constants.Unseen("leads to too many objects")
                keys.append(self._visit(self._reached[visited], visited))
                visited += 1
        if self.tensors and (state_names := constants.STATE_OF_TENSOR.intersection(self._attributes)):
            raise constants.Unseen(f"asks for {', '.join(state_names)} of a tensor")
        self.key = tuple(keys)

    def _key_of(self, x: Any) -> tuple:
        """Return the key of a reference to x. The content of x follows when x is visited."""
        plain = plain_key(x)
        if plain is not None:
            return plain
        if isinstance(x, Tensor):
            return self._key_of_tensor(x)
        number = self._numbers.get(id(x))
        if number is None:
            if constants.is_constant(x):
                if id(x) in _TEXT_FUNCTIONS:
                    self._attributes.update(constants.TEXT)
                return "constant", x
            number = self._numbers[id(x)] = len(self._reached)
            self._reached.append(x)
        elif x is self._start:
            self._guard.is_complete = False
        return "object", number

    def _keys_of(self, xs: Any) -> tuple:
        return tuple(self._key_of(x) for x in xs)

    def _key_of_tensor(self, x: Tensor) -> tuple:
        position = next((i for i, names_done in enumerate(self.tensors) if names_done is x), None)
        if position is None:
            if not constants.is_of_package(type(x).__module__):
                raise constants.Unseen("a tensor of a class that torch does not know")
            if x.layout is not torch.strided:
                raise constants.Unseen(f"a tensor of layout {x.layout}")
            position = len(self.tensors)
            self.tensors.append(x)
            self._add_attributes(x, -1 - position)
            return "tensor", position, type(x), *self._guard.add_tensor(x)
        return "tensor", position

    def _add_attributes(self, x: Any, number: int) -> None:
        """Look up names in the attributes set on x, and record whether one may hold the function."""
        attributes = x.__dict__
        if not attributes:
            self._guard.empty.append(attributes)
            return
        self._objects.append((number, x, 0))
        for value in attributes.values():
            if isinstance(value, types.FunctionType):  # such as `__wrapped__`
                if value.__closure__ or value.__defaults__ or value.__kwdefaults__:
                    self._key_of(value)
            elif plain_key(value) is None:
                self._guard.is_complete = False

    def _visit(self, x: Any, number: int) -> tuple:
        if isinstance(x, types.FunctionType):
            return self._visit_function(x, number)
        if isinstance(x, ReadyMade) and constants.root(type(x).__module__) == "fa4":
            return type(x), *self._keys_of(x._values)
        if type(x) in _CONTAINERS:
            return self._visit_container(x, number)
        is_module = isinstance(x, types.ModuleType)
        if type(x) is types.ModuleType or (is_module and constants.is_of_package(type(x).__module__)):
            return self._visit_module(x, number)
        if isinstance(x, type):
            return self._visit_class(x, number)
        if isinstance(x, enum.Enum):
            return self._visit_member(x, number)
        if type(x) is functools.partial:
            self._add_attributes(x, number)
            return functools.partial, *self._keys_of((x.func, x.args, x.keywords))
        if isinstance(x, (staticmethod, classmethod)):
            return type(x), self._key_of(x.__func__)
        if type(x) in (property, functools.cached_property):
            return type(x), self._key_of(x.fget if isinstance(x, property) else x.func)
        # These may hold the function.
        self._guard.is_complete = False
        if isinstance(x, types.MethodType):
            return types.MethodType, *self._keys_of((x.__func__, x.__self__))
        if isinstance(x, (types.BuiltinFunctionType, types.MethodWrapperType)):
            constants.check_name(x)
            if x.__self__ is None or isinstance(x.__self__, types.ModuleType):
                raise constants.Unseen(f"{x.__name__} may read what nobody sees")
            return types.BuiltinFunctionType, x.__name__, self._key_of(x.__self__)
        self._objects.append((number, x, 0))
        if type(x) is types.SimpleNamespace:
            return (types.SimpleNamespace,)
        if constants.is_constant(type(x)):
            raise constants.Unseen(f"a {type(x).__name__} may change unseen")
        return "instance", self._key_of(type(x)), *self._keys_of(tuple.__iter__(x) if isinstance(x, tuple) else ())

    def _visit_function(self, x: types.FunctionType, number: int) -> tuple:
        guard = self._guard
        guard.add_function(x)
        try:
            cells = [(cell, cell.cell_contents) for cell in x.__closure__ or ()]
        except ValueError:
            raise constants.Unseen("a variable without a value") from None
        guard.cells += cells
        if x.__dict__:
            self._add_attributes(x, number)
        module = x.__globals__.get("__name__")
        if not (isinstance(module, str) and getattr(sys.modules.get(module), "__dict__", None) is x.__globals__):
            guard.is_complete = False  # created by exec: its globals may hold the function
        contents = *(content for _, content in cells), x.__defaults__, x.__kwdefaults__
        if constants.is_of_package(module):
            constants.check_no_state(x.__name__, module)
            return x.__code__, *self._keys_of(contents)
        names = constants.names_in(x.__code__)
        self._attributes.update(names.of_attributes)
        return x.__code__, *self._keys_of(contents), *self._lookup(x.__globals__, names.of_globals, _builtins_of(x))

    def _visit_module(self, x: types.ModuleType, number: int) -> tuple:
        if sys.modules.get(x.__name__) is not x:
            self._guard.is_complete = False
        self._objects.append((number, x, 0))
        if not constants.is_of_package(x.__name__):
            return types.ModuleType, x.__name__, *self._lookup(x.__dict__, ("__getattr__",))
        constants.check_no_state("", x.__name__)
        return types.ModuleType, x.__name__

    def _visit_member(self, x: enum.Enum, number: int) -> tuple:
        data: Any = type(x)._member_type_  # type: ignore[attr-defined]
        self._objects.append((number, x, 0))
        payload = None if data is object else data.__repr__(x)
        return enum.Enum, self._key_of(type(x)), payload, *self._lookup(x.__dict__, ("_name_", "_value_"))

    def _visit_container(self, x: Any, number: int) -> tuple:
        if type(x) is collections.OrderedDict:
            self._add_attributes(x, number)
        if isinstance(x, (tuple, frozenset)):
            return type(x), *self._keys_of(x)
        items = self._guard.add_items(x)
        return type(x), *(map(self._keys_of, items) if isinstance(x, dict) else self._keys_of(items))

    def _visit_class(self, x: type, number: int) -> tuple:
        """Include special methods, which Python calls without a name in the code."""
        is_enum = type(x) is enum.EnumMeta and x._member_type_ in constants.IMMUTABLE  # type: ignore[attr-defined]
        follows = (is_enum or type(x) in (type, abc.ABCMeta)) and all(
            base in _BASES or (is_enum and (base in constants.IMMUTABLE or base.__module__ == "enum"))
            if constants.is_constant(base)
            else constants.is_in_python(base)
            for base in x.__mro__
        )
        if not follows:
            raise constants.Unseen(f"a class like {x.__name__} may change unseen")
        if not _is_importable(x):
            self._guard.is_complete = False
        self._guard.add_class(x)
        self._objects.append((number, x, 0))
        special = [name for name, value in vars(x).items() if _is_special(name, value)]
        if is_enum:  # read by `Kind[name]` and `Kind(value)`
            special += ["_member_map_", "_missing_"]
            if issubclass(x, enum.Flag):
                special.append("_value2member_map_")
        return type, x.__qualname__, *self._keys_of(x.__bases__), *self._lookup(vars(x), special)

    def _lookup(self, space: Any, names: Any, otherwise: dict | None = None) -> tuple:
        """Return the values of names in a dict, else in `otherwise`; record missing names too."""
        found = []
        for name in names:
            x = space.get(name, MISSING)
            self._guard.names.append((space, name, x))
            if x is MISSING and otherwise is not None:
                x = otherwise.get(name, MISSING)
                if not constants.is_constant(x):
                    self._guard.names.append((otherwise, name, x))
            if x is not MISSING:
                found.append((name, self._key_of(x)))
        return tuple(found)

    def _look_up(self, keys: list[Any]) -> bool:
        """Look up the names found in code so far; return whether an object has any of them."""
        names, before = tuple(self._attributes), len(keys)
        for i, (number, x, names_done) in enumerate(self._objects):
            found = self._attributes_of(x, names[names_done:])
            if found:
                keys.append((number, *found))
            self._objects[i] = number, x, len(names)
        return len(keys) > before

    def _attributes_of(self, x: Any, names: tuple[str, ...]) -> tuple:
        if isinstance(x, types.ModuleType):
            if not constants.is_of_package(x.__name__):
                return self._lookup(x.__dict__, names)
            present = [name for name in names if name in x.__dict__]
            for name in present:
                constants.check_no_state(name, x.__name__)
            return self._lookup(x.__dict__, present)
        if isinstance(x, Tensor):
            return self._lookup(x.__dict__, names)
        if isinstance(x, type):
            return self._lookup(vars(x), names)  # each base is an object of its own
        attributes = self._lookup(x.__dict__, names) if hasattr(x, "__dict__") else ()
        bases = self._own_bases.get(type(x))
        if bases is None:
            bases = self._own_bases[type(x)] = [base for base in type(x).__mro__ if not constants.is_constant(base)]
        for base in bases:
            for name in names:
                slot = vars(base).get(name)
                if isinstance(slot, types.MemberDescriptorType) and hasattr(x, name):
                    attributes = *attributes, (name, self._key_of(slot.__get__(x)))
        return attributes


def _is_special(name: str, value: Any) -> bool:
    """Whether Python may call this class attribute without a name in the code."""
    return (
        name.startswith("__")
        and name not in _NOT_CALLED
        and (value is None or callable(value) or hasattr(type(value), "__get__"))
    )


def _is_importable(x: type) -> bool:
    return getattr(sys.modules.get(x.__module__), x.__qualname__, None) is x


def _builtins_of(x: types.FunctionType) -> dict:
    found = x.__globals__.get("__builtins__", builtins)
    return found if isinstance(found, dict) else vars(found)
