"""Compiled functions on disk: an object file with the PTX of its kernels after its last section.

A real chip needs only the machine code in an object file; the emulated chip runs PTX. `export_to_c` therefore appends
the PTX and the modules to assemble, and `load_module` reads them. Host code that stores compiled kernels works
unchanged on an emulated chip.
"""

from __future__ import annotations

import contextlib
import functools
import json
import struct
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warpcheck.errors import EmulationError
from warpcheck.host.assembly import Unassembled
from warpcheck.host.modules import Modules, fatbins_in, unassembled

_END = struct.Struct("<QQ8s")  # bytes of the compressed texts and of all codes before it, and a mark
_MARK = b"warp.ptx"


def append_ptx(path: Path, modules: Modules) -> None:
    """Append the PTX of every kernel of the object file `path`."""
    texts = [modules.ptx_of(binary) for binary in fatbins_in(path.read_bytes())]
    codes = [unassembled(ptx) or Unassembled(b"", "") for ptx in texts]
    table = [(ptx, code.passes, len(code.bytecode)) for ptx, code in zip(texts, codes)]
    packed = zlib.compress(json.dumps(table).encode(), level=1)
    bytecodes = b"".join(code.bytecode for code in codes)
    with path.open("ab") as file:
        file.write(packed + bytecodes + _END.pack(len(packed), len(bytecodes), _MARK))


def register_stored(path: Path, modules: Modules) -> None:
    """Register the PTX of the object file `path`.

    Raises:
        EmulationError: the file has none: it was exported for a real chip, or is truncated.
    """
    data = path.read_bytes()
    table_bytes, code_bytes, mark = _END.unpack(data[-_END.size :]) if len(data) >= _END.size else (0, 0, b"")
    if mark != _MARK:
        raise EmulationError(f"{path} carries no PTX: export it inside `with emulate(...)`")
    codes = len(data) - _END.size - code_bytes
    table = codes - table_bytes
    for binary, (ptx, passes, size) in zip(
        fatbins_in(data[:table]), json.loads(zlib.decompress(data[table:codes])), strict=True
    ):
        modules.register(binary, ptx, Unassembled(data[codes : codes + size], passes) if size else None)
        codes += size


@contextlib.contextmanager
def installed(modules: Modules) -> Iterator[None]:
    """Let tvm-ffi functions be exported with their PTX, and loaded with it.

    Their host code is not optimised, because the optimisation takes longer than emulated calls save by it.
    """
    from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule
    from cutlass.cutlass_dsl import tvm_ffi_provider
    from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionBase

    from warpcheck.host.replaced import replaced

    export, load = TVMFFIJitCompiledFunctionBase.export_to_c, ExternalBinaryModule.__init__
    support = tvm_ffi_provider._aot_support

    @functools.wraps(support.export_module_to_bytes)
    def unoptimised(*args: Any, **kwargs: Any) -> bytes:
        return support.export_module_to_bytes(*args, **{**kwargs, "opt_level": 0})

    @functools.wraps(export)
    def export_to_c(self: Any, object_file_path: str, *args: Any, **kwargs: Any) -> None:
        export(self, object_file_path, *args, **kwargs)
        append_ptx(Path(object_file_path), modules)

    @functools.wraps(load)
    def init(self: Any, file_path: str, *args: Any, **kwargs: Any) -> None:
        register_stored(Path(file_path), modules)
        load(self, file_path, *args, **kwargs)

    quick = types.SimpleNamespace(**{**vars(support), "export_module_to_bytes": unoptimised})
    with (
        replaced(tvm_ffi_provider, _aot_support=quick),
        replaced(TVMFFIJitCompiledFunctionBase, export_to_c=export_to_c),
        replaced(ExternalBinaryModule, __init__=init),
    ):
        yield
