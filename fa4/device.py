"""Which chip a tensor lives on. The only caller of `torch.cuda.get_device_capability`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# What CuTe DSL compiles for on each compute capability. 9.x and 10.x kernels use instructions of the exact chip
# ("a" targets); the others are forward compatible within their major version.
_TARGETS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (11, 0): "sm_110a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
# Shared memory a block may use, bytes, by compute capability (CUDA C++ Programming Guide, technical specifications).
_SMEM_PER_BLOCK = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 103: 160, 120: 170, 121: 48}


@dataclass(frozen=True, slots=True)
class Chip:
    """A place where kernels run. `number` is 10 * major + minor of the compute capability, 0 for no NVIDIA GPU."""

    device_type: str
    number: int = 0
    target: str = ""
    sms: int = 0
    smem_per_block: int = 0
    name: str = ""
    emulated: bool = False

    def __str__(self) -> str:
        if not self.number:
            return self.device_type
        return f"sm_{self.number}" + (" (emulated)" if self.emulated else f" ({self.name})" if self.name else "")


def chip_by_number(number: int, *, sms: int | None = None, emulated: bool = False, name: str = "") -> Chip:
    """The chip record of a compute capability, for example 100 for B200.

    Raises:
        ValueError: the number is not a compute capability that fa4 knows.
    """
    capability = divmod(number, 10)
    if capability not in _TARGETS:
        known = ", ".join(str(10 * major + minor) for major, minor in _TARGETS)
        raise ValueError(f"chip number {number} is not known, expected one of {known}")
    return Chip(
        device_type="cpu" if emulated else "cuda",
        number=number,
        target=_TARGETS[capability],
        sms=_MULTIPROCESSORS.get(number, 1) if sms is None else sms,
        smem_per_block=_SMEM_PER_BLOCK[number] * 1024,
        name=name,
        emulated=emulated,
    )


@functools.cache
def _cuda_chip(index: int) -> Chip:
    major, minor = torch.cuda.get_device_capability(index)
    properties: Any = torch.cuda.get_device_properties(index)  # the stubs miss fields that CUDA builds have
    target = _TARGETS.get((major, minor), "")
    return Chip(
        device_type="cuda",
        number=10 * major + minor,
        target=target,
        sms=properties.multi_processor_count,
        smem_per_block=properties.shared_memory_per_block_optin,
        name=properties.name,
    )


_CPU = Chip(device_type="cpu")
_emulated: Chip | None = None


def chip_of(device: torch.device) -> Chip:
    """The chip behind a torch device. CPU tensors inside `emulating(chip)` live on the emulated chip."""
    if device.type == "cpu":
        return _CPU if _emulated is None else _emulated
    if device.type == "cuda" and torch.version.hip is None:
        return _cuda_chip(torch.cuda.current_device() if device.index is None else device.index)
    return Chip(device_type=device.type)


@contextlib.contextmanager
def emulating(chip: Chip) -> Iterator[None]:
    """CPU tensors dispatch to `chip`'s backends inside this context (used by `fa4.emulator.emulate`)."""
    global _emulated
    before, _emulated = _emulated, chip
    try:
        yield
    finally:
        _emulated = before
