"""Programs: from a configuration to a launcher, for plan, compiler and caches of every kernel."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from ..mods.ir.record import ModSpec
from ..runtime import jit
from ..runtime.device import Chip
from .constant import Constant

Cfg = TypeVar("Cfg")  # configuration, a dataclass whose fields are a compile key


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Program(Constant, Generic[Cfg]):
    """A `cute.jit` host function, `launch`, that starts kernels, and its compilation.

    `launch` takes run-time arguments, the configuration and the stream. A compile key is `name` and the fields of the
    configuration.
    """

    name: str

    launch: ClassVar[Callable[..., None]]

    def __repr__(self) -> str:
        return self.name  # the compiler uses it in the names of its dumps

    def fake_args(self, cfg: Cfg) -> tuple:
        """Return fake run-time arguments of `launch`, without memory."""
        raise NotImplementedError

    def compile(self, cfg: Cfg, chip: Chip) -> Any:
        """Compile `launch` with fake arguments."""
        return jit.compile_kernel(self.launch, *self.fake_args(cfg), cfg, jit.current_stream(), chip=chip)

    def launcher(self, cfg: Cfg, chip: Chip) -> jit.Launcher:
        """Return a launcher that takes the run-time arguments and runs on the caller's current stream."""
        return _compiled(self, cfg, chip)


@dataclasses.dataclass(frozen=True)
class ProgramRef(Generic[Cfg]):
    """A program by name: what a launch needs of it. Its device code is imported when the program is compiled.

    module: has the program as an attribute, `attribute`.
    """

    name: str
    module: str
    attribute: str = "KERNEL"

    def load(self) -> Program[Cfg]:
        """Import the program, which needs CuTe DSL."""
        program = getattr(importlib.import_module(self.module), self.attribute)
        assert program.name == self.name, f"{self.module} has {program.name}, expected {self.name}"
        return program

    def compile(self, cfg: Cfg, chip: Chip) -> Any:
        return self.load().compile(cfg, chip)

    def request(self, cfg: Cfg, chip: Chip) -> jit.Request:
        """Return what `launcher` compiles."""
        return _request(self, cfg, chip)

    def launcher(self, cfg: Cfg, chip: Chip) -> jit.Launcher:
        """Return a launcher, see `Program.launcher`."""
        if chip.emulated:
            return self.load().launcher(cfg, chip)  # which registers roles and barriers for reports
        return _compiled(self, cfg, chip)


def _compiled(program: Program[Cfg] | ProgramRef[Cfg], cfg: Cfg, chip: Chip) -> jit.Launcher:
    return jit.compiled(*_request(program, cfg, chip))


def _request(program: Program[Cfg] | ProgramRef[Cfg], cfg: Cfg, chip: Chip) -> jit.Request:
    names = tuple(field.name for field in dataclasses.fields(cfg))  # type: ignore[arg-type]
    build = functools.partial(program.compile, cfg, chip)
    return jit.Request(compile_key(program.name, cfg), build, chip, names)


def compile_key(name: str, cfg: Any) -> tuple:
    """Return a tuple of simple values that identifies a program's configuration, for `jit.compiled`."""
    return (name, *(_plain(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)))


def _plain(value: Any) -> Any:
    if isinstance(value, ModSpec):
        return value.key()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.astuple(value)
    return str(value) if isinstance(value, type) else value
