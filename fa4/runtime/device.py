"""Chip of a tensor. The only caller of `torch.cuda.get_device_capability`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import toolchain
from .chips import CHIPS


class NoTarget(ValueError):
    """The installed CuTe DSL has no target that runs on a chip; the message says why."""


@functools.cache
def target_for(number: int) -> str:
    """Return the CuTe DSL target whose code runs on compute capability `number`, for example "sm_100a".

    An unlisted chip gets the oldest target of its major version, whose code runs on every later minor version; a new
    major version gets the installed DSL's own name. Targets of an older major version do not work: compiled code
    contains no PTX for the driver to translate.

    Raises:
        NoTarget: there is no such target.
    """
    family = sorted(listed for listed in CHIPS if listed // 10 == number // 10 and listed <= number)
    if family:
        facts = CHIPS.get(number, CHIPS[family[0]])
        if facts.toolkit > 12 and toolchain.has_compiler() and toolchain.toolkit() < facts.toolkit:
            raise NoTarget(
                f"for sm_{number} CuTe DSL must be built for CUDA {facts.toolkit}: pip install 'fa4-kernels[cu13]'"
            )
        return facts.target if number in CHIPS else f"sm_{facts.number}"
    if number > 80 and f"sm_{number}" in _dsl_targets():
        return f"sm_{number}"
    raise NoTarget(f"the installed CuTe DSL compiles nothing that runs on sm_{number}")


def _dsl_targets() -> frozenset[str]:
    """Return the names of CuTe DSL's targets; imports CuTe DSL."""
    try:
        from cutlass.base_dsl import Arch
    except ImportError:
        return frozenset()
    return frozenset(Arch.__members__)


@dataclass(frozen=True, slots=True)
class Chip:
    """Device that runs kernels. `number` is 10 * major + minor of the compute capability, 0 for no NVIDIA GPU.

    `target` is "" if the installed compiler has none for the chip. `dry_run` records compilations inside
    `fa4.runtime.jit.compile_only`; as part of the record, it keeps anything cached by chip from outliving the dry run.
    `shared`: other kernels, for example communication, occupy some of its multiprocessors at the same time. `sampled`:
    an emulated chip runs only some clusters of each grid, to predict its time.
    """

    device_type: str
    number: int = 0
    target: str = ""
    sms: int = 0
    smem_per_block: int = 0
    l2: int = 0
    name: str = ""
    emulated: bool = False
    dry_run: Any = None
    shared: bool = False
    sampled: bool = False

    @property
    def compiles(self) -> bool:
        """Whether the installed CuTe DSL has a target for this chip; `no_target` says why not."""
        return bool(self.target)

    @property
    def no_target(self) -> str:
        """Return why nothing can be compiled for this NVIDIA GPU; "" if something can."""
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


def chip_by_number(number: int, *, sms: int | None = None, emulated: bool = False) -> Chip:
    """Return the chip record of a compute capability, for example 100 for B200.

    An unlisted capability that some target serves gets the sizes of the smallest chip of its major version.

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
        l2=facts.l2,
        emulated=emulated,
    )


def chip_by_target(target: str, *, sms: int | None = None) -> Chip:
    """Return the chip record of a compiler's target with all features, for example "sm_100a" for B200; see
    `chip_by_number`."""
    return chip_by_number(int(target.removeprefix("sm_").removesuffix("a")), sms=sms)


@functools.cache
def _cuda_chip(index: int) -> Chip:
    major, minor = torch.cuda.get_device_capability(index)
    properties: Any = torch.cuda.get_device_properties(index)  # the stubs miss fields of CUDA builds
    return Chip(
        device_type="cuda",
        number=10 * major + minor,
        target=_target_or_none(10 * major + minor),
        sms=properties.multi_processor_count,
        smem_per_block=properties.shared_memory_per_block_optin,
        l2=properties.L2_cache_size,
        name=properties.name,
    )


_CPU = Chip(device_type="cpu")


class DeviceContext(NamedTuple):
    """Replacement of the chips of this machine, and whether others use them too."""

    emulated: Chip | None = None
    recorder: Any = None  # of a dry run
    shared: bool = False


# None outside `emulating`, `dry_run` and `sharing`, and a distinct object inside each: anything cached for a chip is
# valid while this object is the same.
device_context: ContextVar[DeviceContext | None] = ContextVar("fa4_stage", default=None)


def chip_of(device: torch.device) -> Chip:
    """Return the chip of a torch device. CPU tensors inside `emulating(chip)` are on the emulated chip."""
    emulated, recorder, shared = device_context.get() or DeviceContext()
    if device.type == "cpu":
        chip = emulated or _CPU
    elif device.type == "cuda" and torch.version.hip is None:
        # Inside `emulating` the emulator may replace torch.cuda, for different chips over time: do not cache.
        index = torch.cuda.current_device() if device.index is None else device.index
        if emulated is None:
            chip = _cuda_chip(index)
        else:
            chip = dataclasses.replace(_cuda_chip.__wrapped__(index), emulated=True, sampled=emulated.sampled)
    else:
        chip = Chip(device_type=device.type)
    if recorder is None and not shared:
        return chip
    return dataclasses.replace(chip, dry_run=recorder, shared=shared)


def emulating(chip: Chip) -> contextlib.AbstractContextManager[None]:
    """Dispatch this thread's CPU tensors to `chip`'s backends inside this context (see `fa4.emulator.emulate`)."""
    return inside((device_context.get() or DeviceContext())._replace(emulated=chip))


def dry_run(recorder: Any) -> contextlib.AbstractContextManager[None]:
    """Attach `recorder` to every chip that `chip_of` returns to this thread inside this context; see
    `fa4.runtime.jit`."""
    return inside((device_context.get() or DeviceContext())._replace(recorder=recorder))


_SHARED = DeviceContext(shared=True)


def sharing(with_others: bool = True) -> contextlib.AbstractContextManager[None]:
    """Mark chips as `shared` inside this context: other kernels occupy some multiprocessors at first."""
    outer = device_context.get()
    shared = _SHARED if outer is None else outer._replace(shared=True)
    return inside(shared if with_others else outer)


def is_shared() -> bool:
    """Return whether chips are shared in this context."""
    context = device_context.get()
    return context is not None and context.shared


def is_emulating() -> bool:
    """Return whether kernels that are launched in this context run on an emulated chip."""
    context = device_context.get()
    return context is not None and context.emulated is not None and context.emulated.emulated


@contextlib.contextmanager
def inside(context: DeviceContext | None) -> Iterator[None]:
    """Set the device context of this thread inside this context."""
    token = device_context.set(context)
    try:
        yield
    finally:
        device_context.reset(token)
