"""Machine code of a planned kernel, as nvdisasm shows it."""

import re
from pathlib import Path
from typing import Any

from warpcheck.host.modules import fatbins_in

from bench import static


def _cubin(kernel: Any, cfg: Any, chip: Any, directory: Path) -> Path:
    exported, cubin = directory / "kernel.o", directory / "kernel.cubin"
    kernel.compile(cfg, chip).export_to_c(str(exported), "kernel")
    (binary,) = fatbins_in(exported.read_bytes())
    cubin.write_bytes(binary[binary.index(b"\x7fELF") :])
    return cubin


def machine_kernels(kernel: Any, cfg: Any, chip: Any, directory: Path) -> list[static.Kernel]:
    """What is counted in the kernels of a launch. Tests need the fixture `disassembler`."""
    return static.kernels(_cubin(kernel, cfg, chip, directory))


def machine_code(forward: Any, directory: Path) -> tuple[list[str], static.Kernel]:
    """Instructions of a forward's kernel, and what is counted in them. Tests need the fixture `disassembler`."""
    cubin = _cubin(forward.kernel, forward.cfg, forward.chip, directory)
    (kernel,) = static.kernels(cubin)
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", static.disassemble(cubin, "-c")), kernel
