"""Programs: from a configuration to a launcher, for plan, compiler and caches of every kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from ..mods.ir.record import ModSpec
from ..runtime import jit
from ..runtime.device import Chip
from .constant import Constant


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Program(Constant):
    """A `cute.jit` host function, `launch`, that starts kernels, and its compilation.

    `launch` takes run-time arguments, the configuration and the stream. A compile key is `name` and the fields of the
    configuration.
    """

    name: str

    launch: ClassVar[Callable[..., None]]

    def __repr__(self) -> str:
        return self.name  # the compiler uses it in the names of its dumps

    def fake_args(self, cfg: Any) -> tuple:
        """Return fake run-time arguments of `launch`, without memory."""
        raise NotImplementedError

    def compile(self, cfg: Any, chip: Chip) -> Any:
        """Compile `launch` with fake arguments."""
        return jit.compile_kernel(self.launch, *self.fake_args(cfg), cfg, jit.current_stream(), chip=chip)

    def launcher(self, cfg: Any, chip: Chip) -> jit.Launcher:
        """Return a launcher that takes the run-time arguments and runs on the caller's current stream."""
        return jit.compiled(compile_key(self.name, cfg), functools.partial(self.compile, cfg, chip), chip)


def compile_key(name: str, cfg: Any) -> tuple:
    """Return a tuple of simple values that identifies a program's configuration, for `jit.compiled`."""
    return (name, *(_plain(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)))


def _plain(value: Any) -> Any:
    if isinstance(value, type):
        return str(value)
    if isinstance(value, ModSpec):
        return value.key()
    return dataclasses.astuple(value) if dataclasses.is_dataclass(value) else value
