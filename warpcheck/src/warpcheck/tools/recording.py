"""A kernel launch as a file: PTX, shape, parameters, and the memory before and after it.

`Recorder` writes recordings; `warpcheck.tools.compare` runs them on a chip. Memory has other addresses there, so
pointers among the parameters (plain pointers, and the base address in a tensor map) are translated.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Recording:
    """One launch. before, after: contents of each memory range of `bases`; names: descriptions of the ranges.

    cooperative: all its CTAs are resident.
    programmatic: it may start before the grid before it has ended (programmatic dependent launch).
    """

    name: str
    chip: str
    ptx: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: tuple[bytes, ...]
    bases: tuple[int, ...]
    names: tuple[str, ...]
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    programmatic: bool = False
    cooperative: bool = False

    def save(self, path: Path) -> None:
        """Write a compressed .npz file."""
        fields = asdict(self)
        arrays: dict[str, Any] = {}
        for name in ("params", "before", "after"):
            for i, raw in enumerate(fields.pop(name)):
                arrays[f"{name}{i}"] = np.frombuffer(raw, np.uint8)
        np.savez_compressed(path, fields=np.array(json.dumps(fields)), **arrays)

    @staticmethod
    def load(path: Path) -> Recording:
        with np.load(path) as file:
            fields = json.loads(str(file["fields"]))
            for name in ("params", "before", "after"):
                count = sum(1 for key in file.files if key.startswith(name))
                fields[name] = tuple(file[f"{name}{i}"].tobytes() for i in range(count))
        for name in ("grid", "block", "cluster", "bases", "names"):
            fields[name] = tuple(fields[name])
        return Recording(**fields)

    def moved_params(self, addresses: Sequence[int]) -> list[bytes]:
        """The parameters with every pointer into range i moved to addresses[i]."""
        return [self._moved(raw, addresses) for raw in self.params]

    def _moved(self, raw: bytes, addresses: Sequence[int]) -> bytes:
        words = list(struct.unpack(f"<{len(raw) // 8}Q", raw[: len(raw) // 8 * 8]))
        for i, word in enumerate(words):
            for base, content, address in zip(self.bases, self.before, addresses):
                if base <= word < base + len(content):
                    words[i] = word - base + address
        return struct.pack(f"<{len(words)}Q", *words) + raw[len(words) * 8 :]


class Recorder:
    """Records the next launches of an emulated chip, `limit` at most, as NAME.0.npz, NAME.1.npz, ... in `folder`."""

    def __init__(self, gpu: Any, folder: Path, name: str, limit: int = 8) -> None:
        self.gpu, self.folder, self.name, self.limit = gpu, folder, name, limit
        self.count = 0
        self._run = gpu.run
        gpu.runtime.run = self.run

    def run(self, launch: Any) -> None:
        ranges = [a for a in self.gpu.allocations() if a.nbytes]
        before = tuple(ctypes.string_at(a.base, a.nbytes) for a in ranges)
        self._run(launch)
        if self.count < self.limit:
            after = tuple(ctypes.string_at(a.base, a.nbytes) for a in ranges)
            Recording(
                self.name, self.gpu.machine.chip, launch.ptx, launch.entry, launch.grid, launch.block, launch.cluster,
                launch.smem_bytes, launch.params, tuple(a.base for a in ranges), tuple(a.name for a in ranges),
                before, after, launch.programmatic, launch.cooperative,
            ).save(self.folder / f"{self.name.replace(' ', '_')}.{self.count}.npz")  # fmt: skip
        self.count += 1
