"""Which chip a tensor lives on. The only caller of `torch.cuda.get_device_capability`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .chips import CHIPS


class NoTarget(ValueError):
    """The installed CuTe DSL compiles nothing that runs on a chip; the message says why."""


@functools.cache
def target_for(number: int) -> str:
    """What CuTe DSL must compile for so that the code runs on compute capability `number`, for example "sm_100a".

    A chip that the table does not have gets the oldest target of its major version, whose code runs on every later
    minor version; a new major version gets what the installed DSL itself calls it. Compiled code carries no PTX that
    a driver could translate, so an older major version's target is no way out.

    Raises:
        NoTarget: there is no such target.
    """
    family = sorted(known for known in CHIPS if known // 10 == number // 10 and known <= number)
    if family:
        facts = CHIPS.get(number, CHIPS[family[0]])
        if facts.toolkit > 12 and _dsl_toolkit() < facts.toolkit:
            raise NoTarget(
                f"for sm_{number} CuTe DSL must be built for CUDA {facts.toolkit}: pip install 'fa4-kernels[cu13]'"
            )
        return facts.target if number in CHIPS else f"sm_{facts.number}"
    if number > 80 and f"sm_{number}" in _dsl_targets():
        return f"sm_{number}"
    raise NoTarget(f"the installed CuTe DSL compiles nothing that runs on sm_{number}")


def _dsl_toolkit() -> int:
    """Major version of the CUDA toolkit that CuTe DSL was built with; imports CuTe DSL. 0 where it is missing."""
    try:
        from cutlass.base_dsl.version_info import CUDA_VERSION
    except ImportError:
        return 0
    return CUDA_VERSION.major


def _dsl_targets() -> frozenset[str]:
    """Names of the targets that CuTe DSL knows; imports CuTe DSL."""
    try:
        from cutlass.base_dsl import Arch
    except ImportError:
        return frozenset()
    return frozenset(Arch.__members__)


@dataclass(frozen=True, slots=True)
class Chip:
    """A place where kernels run. `number` is 10 * major + minor of the compute capability, 0 for no NVIDIA GPU.

    `target` is "" where the installed compiler has nothing for the chip. `dry_run` is what records compilations
    inside `fa4.jit.compile_only`; it is part of the record so that nothing cached by chip outlives the dry run.
    `shared`: kernels of others, that carry messages for example, hold some of its multiprocessors meanwhile.
    """

    device_type: str
    number: int = 0
    target: str = ""
    sms: int = 0
    smem_per_block: int = 0
    name: str = ""
    emulated: bool = False
    dry_run: Any = None
    shared: bool = False

    @property
    def compiles(self) -> bool:
        """Whether the installed CuTe DSL has a target for this chip; `no_target` says why not."""
        return bool(self.target)

    @property
    def no_target(self) -> str:
        """Why nothing can be compiled for this NVIDIA GPU; "" if something can."""
        if self.target or not self.number:
            return ""
        try:
            return f"no target was given, expected {target_for(self.number)}"
        except NoTarget as error:
            return str(error)

    def __str__(self) -> str:
        if not self.number:
            return self.device_type
        remarks = "; ".join(filter(None, ("emulated" if self.emulated else self.name, self.no_target)))
        return f"sm_{self.number}" + (f" ({remarks})" if remarks else "")


def _target_or_none(number: int) -> str:
    try:
        return target_for(number)
    except NoTarget:
        return ""


def chip_by_number(number: int, *, sms: int | None = None, emulated: bool = False, name: str = "") -> Chip:
    """The chip record of a compute capability, for example 100 for B200.

    A capability that the table does not have, but that some target serves, gets the sizes of the smallest chip of
    its major version.

    Raises:
        ValueError: the number is not a compute capability that fa4 knows or can compile for.
    """
    family = [facts for facts in CHIPS.values() if facts.number // 10 == number // 10 and facts.number <= number]
    if not family:
        raise ValueError(f"chip number {number} is not known, expected one of {', '.join(map(str, CHIPS))}")
    facts = CHIPS.get(number) or min(family, key=lambda facts: (facts.smem_per_sm, facts.sms))
    return Chip(
        device_type="cpu" if emulated else "cuda",
        number=number,
        target=_target_or_none(number),
        sms=facts.sms if sms is None else sms,
        smem_per_block=facts.smem_per_block,
        name=name,
        emulated=emulated,
    )


@functools.cache
def _cuda_chip(index: int) -> Chip:
    major, minor = torch.cuda.get_device_capability(index)
    properties: Any = torch.cuda.get_device_properties(index)  # the stubs miss fields that CUDA builds have
    return Chip(
        device_type="cuda",
        number=10 * major + minor,
        target=_target_or_none(10 * major + minor),
        sms=properties.multi_processor_count,
        smem_per_block=properties.shared_memory_per_block_optin,
        name=properties.name,
    )


_CPU = Chip(device_type="cpu")


class DeviceContext(NamedTuple):
    """What stands in for the chips that are here, and whether others use them, too."""

    emulated: Chip | None = None
    recorder: Any = None  # of a dry run
    shared: bool = False


# None outside `emulating`, `dry_run` and `sharing`, and another object inside each: what was found out about a chip
# holds as long as this is the same.
stage: ContextVar[DeviceContext | None] = ContextVar("fa4_stage", default=None)


def chip_of(device: torch.device) -> Chip:
    """The chip behind a torch device. CPU tensors inside `emulating(chip)` live on the emulated chip."""
    emulated, recorder, shared = stage.get() or DeviceContext()
    if device.type == "cpu":
        chip = emulated or _CPU
    elif device.type == "cuda" and torch.version.hip is None:
        # Inside `emulating` the emulator may answer for torch.cuda: for this chip now, and for another one later.
        of_index = _cuda_chip if emulated is None else _cuda_chip.__wrapped__
        chip = of_index(torch.cuda.current_device() if device.index is None else device.index)
    else:
        chip = Chip(device_type=device.type)
    if recorder is None and not shared:
        return chip
    return dataclasses.replace(chip, dry_run=recorder, shared=shared)


@contextlib.contextmanager
def emulating(chip: Chip) -> Iterator[None]:
    """CPU tensors of this thread dispatch to `chip`'s backends inside this context (see `fa4.emulator.emulate`)."""
    with _staged(emulated=chip):
        yield


@contextlib.contextmanager
def dry_run(recorder: Any) -> Iterator[None]:
    """Every chip that `chip_of` tells this thread carries `recorder` inside this context; see `fa4.jit`."""
    with _staged(recorder=recorder):
        yield


_SHARED = DeviceContext(shared=True)


@contextlib.contextmanager
def sharing(with_others: bool = True) -> Iterator[None]:
    """Chips are `shared` inside this context: what is launched there finds some multiprocessors taken at first."""
    if not with_others:
        yield
        return
    before = stage.get()
    token = stage.set(_SHARED if before is None else before._replace(shared=True))
    try:
        yield
    finally:
        stage.reset(token)


@contextlib.contextmanager
def _staged(**change: Any) -> Iterator[None]:
    token = stage.set((stage.get() or DeviceContext())._replace(**change))
    try:
        yield
    finally:
        stage.reset(token)
