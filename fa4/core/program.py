"""From a configuration to a launcher: what plan, compiler and caches agree on, whatever the kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from .. import jit
from ..device import Chip
from ..mods.record import ModSpec
from .constant import Constant


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Program(Constant):
    """A `cute.jit` host function, `launch`, that starts kernels, and what it is compiled with.

    `launch` takes run-time arguments, the configuration and the stream. Compile keys are `name` and the fields of the
    configuration.
    """

    name: str

    launch: ClassVar[Callable[..., None]]

    def __repr__(self) -> str:
        return self.name  # the compiler names what it dumps by it

    def stand_ins(self, cfg: Any) -> tuple:
        """The run-time arguments of `launch`, without memory."""
        raise NotImplementedError

    def compile(self, cfg: Any, chip: Chip) -> Any:
        """Compile `launch`, without any tensor."""
        return jit.compile_kernel(self.launch, *self.stand_ins(cfg), cfg, jit.current_stream(), chip=chip)

    def launcher(self, cfg: Any, chip: Chip) -> jit.Launcher:
        """What takes the run-time arguments, tensors for stand-ins, and runs on the caller's current stream."""
        return jit.compiled(compile_key(self.name, cfg), functools.partial(self.compile, cfg, chip), chip)


def compile_key(name: str, cfg: Any) -> tuple:
    """Plain values that tell the configurations of a program apart, for `jit.compiled`."""
    return (name, *(_plain(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)))


def _plain(value: Any) -> Any:
    if isinstance(value, type):
        return str(value)
    if isinstance(value, ModSpec):
        return value.key()
    return dataclasses.astuple(value) if dataclasses.is_dataclass(value) else value
