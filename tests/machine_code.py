"""Machine code of a planned kernel, as nvdisasm shows it."""

import re
from pathlib import Path
from typing import Any

from warpcheck.host.modules import fatbins_in

from bench import static


def machine_code(forward: Any, directory: Path) -> tuple[list[str], static.Kernel]:
    """Instructions of a forward's kernel, and what is counted in them. Tests need the fixture `disassembler`."""
    exported, cubin = directory / "kernel.o", directory / "kernel.cubin"
    forward.kernel.compile(forward.cfg, forward.chip).export_to_c(str(exported), "kernel")
    (binary,) = fatbins_in(exported.read_bytes())
    cubin.write_bytes(binary[binary.index(b"\x7fELF") :])
    (kernel,) = static.kernels(cubin)
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", static.disassemble(cubin, "-c")), kernel
