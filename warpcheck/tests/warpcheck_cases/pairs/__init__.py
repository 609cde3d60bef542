"""Pairs of small CUDA C++ kernels: a right one, and the same one with a fault.

A file of kernels is an area. `// PAIR` before a kernel gives its launch, as `warpcheck ptx` takes it, and after the
bar its arguments. The comment below says what the kernel does, and its fault. `RIGHT(...)` is code of the right kernel
alone, `WRONG(...)` of the other.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from warpcheck.findings import Severity
from warpcheck.machine import interleavings, load_core
from warpcheck.machine.arguments import written
from warpcheck.nvrtc import compile_cuda

from warpcheck import Emulated

FOLDER = Path(__file__).parent
CHIP = "sm_90a"
_PAIR = re.compile(
    r"^// PAIR (?P<launch>[^|\n]*)\| (?P<args>.*)\n(?P<text>(?:// .*\n)+)KERNEL (?P<name>\w+)\(", re.MULTILINE
)
BOX = (32, 2)  # of a tensor map


@dataclass(frozen=True)
class Pair:
    """area: the file. hangs: the wrong kernel ends on no chip. outputs: arguments that must be written wholly."""

    area: str
    name: str
    purpose: str
    fault: str
    args: tuple[str, ...]
    grid: int = 1
    block: int = 32
    cluster: int = 1
    smem: int = 0
    cooperative: bool = False
    hangs: bool = False
    outputs: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.area}.{self.name}"

    def ptx(self, faulty: bool, *defines: str) -> str:
        return _compiled(self.area, (*["-DFAULT"] * faulty, *defines))

    def arrays(self) -> list[np.ndarray | None]:
        """One for each argument; None for a tensor map. Fresh memory holds NaN."""
        rng = np.random.default_rng(0)
        arrays: list[np.ndarray | None] = []
        for arg in self.args:
            if arg.startswith("map="):
                arrays.append(None)
            elif arg.endswith("=fresh"):
                arrays.append(np.full_like(written(arg.replace("=fresh", "=zeros"), rng), 0).view(np.uint8) | 0xFF)
            else:
                arrays.append(np.asarray(written(arg, rng)))
        return arrays


@functools.cache
def pairs() -> tuple[Pair, ...]:
    return tuple(pair for path in sorted(FOLDER.glob("*.cu")) for pair in _pairs_of(path))


def _pairs_of(path: Path) -> list[Pair]:
    text = path.read_text()
    found = [_pair(path.stem, match) for match in _PAIR.finditer(text)]
    if len(found) != text.count("// PAIR"):
        raise ValueError(f"{path.name} has {text.count('// PAIR')} pairs, of which {len(found)} can be read")
    return found


def _pair(area: str, match: re.Match[str]) -> Pair:
    text = " ".join(line.removeprefix("// ") for line in match["text"].splitlines())
    purpose, fault = text.split(" Fault: ")
    options: dict[str, Any] = {}
    for word in match["launch"].split():
        name, _, value = word.partition("=")
        options[name] = (int(value),) if name == "outputs" else int(value) if value else True
    return Pair(area, match["name"], purpose, fault, tuple(match["args"].split()), **options)


@functools.cache
def _compiled(area: str, options: tuple[str, ...]) -> str:
    path = FOLDER / f"{area}.cu"
    return compile_cuda(path.read_text(), CHIP, name=path.name, options=[f"-I{FOLDER}", *options])


def emulated(pair: Pair, faulty: bool, *, seed: int = 0, seeds: int = 10, **options: Any) -> Emulated:
    """The chip after the launch; `findings` has what was told in all orders."""
    (seed, first), *others = interleavings(seed, seeds)
    gpu = Emulated(CHIP, seed=seed, schedule=first, on_finding="collect", **options)
    gpu.repeat(others)
    arrays = pair.arrays()
    args = [_map(arrays[int(arg[4:])]) if arg.startswith("map=") else array for arg, array in zip(pair.args, arrays)]
    gpu.launch(
        pair.ptx(faulty), pair.name, grid=pair.grid, block=pair.block, cluster=pair.cluster, smem_bytes=pair.smem,
        cooperative=pair.cooperative, args=args, outputs=pair.outputs,
    )  # fmt: skip
    return gpu


def told(gpu: Emulated) -> list[str]:
    """Kinds of the errors that were found, each once."""
    return sorted({finding.kind for finding in gpu.findings.of(Severity.ERROR)})


def _map(array: np.ndarray | None) -> bytes:
    assert array is not None and array.dtype == np.float32
    lines, columns = array.shape
    return load_core().encode_tensormap({
        "base": array.ctypes.data, "type": 7, "tf32": False, "swizzle": 0, "atomicity": 0, "interleave": 0,
        "nan_fill": False, "extent": [columns, lines], "stride": [0, 4 * columns], "box": list(BOX),
        "element_stride": [1, 1],
    })  # fmt: skip
