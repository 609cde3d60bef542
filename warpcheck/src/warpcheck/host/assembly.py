"""Machine code of emulated kernels, assembled on demand.

CuTe DSL's compiler ends with ptxas, a quarter of its time. The emulator runs the PTX, so a compilation embeds the PTX
instead. The module before that step is kept compressed, and the same compiler assembles it when a prediction needs the
machine code.
"""

from __future__ import annotations

import functools
import io
import re
import zlib
from dataclasses import dataclass
from typing import Any

_LAST = "cuda-to-binary"  # the pass that runs libNVVM and ptxas
_TARGETS = "compute_targets"


@dataclass(frozen=True)
class Unassembled:
    """A module in LLVM's dialect as compressed bytecode, and the remaining passes."""

    bytecode: bytes
    passes: str

    @classmethod
    def of(cls, module: Any, passes: str) -> Unassembled:
        # Nothing is dumped again.
        return cls(zlib.compress(_bytecode(module), level=1), re.sub(r"(dump-[a-z]+-path=)[^ }]*", r"\1", passes))

    def module(self) -> bytes:
        """Bytecode of the module with the machine code in it."""
        import cutlass.cutlass_dsl  # noqa: F401  (its dialects)
        from cutlass._mlir import ir
        from cutlass._mlir.passmanager import PassManager

        with ir.Context(), ir.Location.unknown():
            module = ir.Module.parse(zlib.decompress(self.bytecode))
            PassManager.parse(f"builtin.module({self.passes})").run(module.operation)
            return _bytecode(module)


def split(pipeline: str) -> tuple[str, str] | None:
    """Split a pipeline at LLVM's dialect into two.

    None if it has no such boundary, or if it dumps the machine code.
    """
    from cutlass._mlir.passmanager import PassManager

    if "dump-cubin-path=" in pipeline or "cute-to-nvvm{" not in pipeline:
        return None
    passes = str(PassManager.parse(pipeline))
    start = passes.find(_LAST)
    if start < 0:
        return None
    return pipeline.replace("cute-to-nvvm{", "cute-to-nvvm{llvm-only=true ", 1), passes[start : passes.rindex(")")]


def embed_ptx(module: Any) -> bool:
    """Embed the device code of a module in LLVM's dialect as PTX. Return False if the module does not permit it."""
    from cutlass._mlir import ir

    parts = [part for part in module.body.operations if part.operation.name == "gpu.module"]
    if len(parts) != 1 or _TARGETS not in parts[0].operation.attributes:
        return False
    attributes = parts[0].operation.attributes
    targets, count = re.subn(r"(#cuda\.compute_target<)sass,", r"\1ptx,", str(attributes[_TARGETS]))
    if count != 1:
        return False
    with module.context:
        attributes[_TARGETS] = ir.Attribute.parse(targets)
    return True


@functools.lru_cache(maxsize=32)
def assembled(code: Unassembled) -> bytes:
    """Return the fat binary with the machine code."""
    from warpcheck.host.modules import fatbins_in  # which imports this module

    (binary,) = fatbins_in(code.module())
    return binary


def _bytecode(module: Any) -> bytes:
    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    return stream.getvalue()
