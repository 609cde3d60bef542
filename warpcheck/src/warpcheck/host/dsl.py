"""CuTe DSL on an emulated chip.

Compilations target the chip, keep their PTX and link the emulated CUDA runtime; CPU tensors count as CUDA tensors.
`installed` replaces attributes of the installed package for this, and restores them afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import re
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from warpcheck.host import assembly, stored
from warpcheck.host.launch import Runtime
from warpcheck.host.memory import Arrays
from warpcheck.host.modules import Modules, fatbins_in
from warpcheck.host.replaced import replaced
from warpcheck.libraries import names_of
from warpcheck.machine.names import with_names
from warpcheck.machine.ptx import entries

_KDL_CUDA = 2  # DLDeviceType
_ERROR_KIND = "EmulatedCudaError"  # intercept.c raises tvm-ffi errors by this name

_PyCapsule_GetPointer = ctypes.pythonapi.PyCapsule_GetPointer
_PyCapsule_GetPointer.restype = ctypes.c_void_p
_PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, the first member of every managed tensor of the unversioned protocol."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def runtime_library() -> str:
    """Path of the shared library with the emulated CUDA runtime symbols. Raises ImportError if it was not built."""
    try:
        from warpcheck.host import _intercept  # type: ignore[attr-defined]
    except ImportError as error:
        raise ImportError(
            "warpcheck is here without its compiled parts: in a checkout, `pip install -e ./warpcheck` builds them"
        ) from error
    return _intercept.__file__


_DISPATCHER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))


@contextlib.contextmanager
def installed(runtime: Runtime, arrays: Arrays, chip: str) -> Iterator[None]:
    """Let cute.compile target `chip`, and compiled functions launch on `runtime`."""
    with contextlib.ExitStack() as stack:
        library = ctypes.CDLL(runtime_library())
        dispatcher = _DISPATCHER(runtime.dispatch)
        library.warpcheck_set_dispatcher(dispatcher)
        stack.callback(library.warpcheck_set_dispatcher, None)
        stack.enter_context(_settings(chip))
        stack.enter_context(_places())
        stack.enter_context(_compilations(runtime.modules, library))
        stack.enter_context(stored.installed(runtime.modules))
        stack.enter_context(_cpu_tensors_as_cuda(arrays))
        stack.enter_context(_failures(runtime))
        yield


@contextlib.contextmanager
def _settings(chip: str) -> Iterator[None]:
    """Set the chip, the runtime library and the caches of CuTe DSL."""
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    # A hit in the disk cache would skip the compiler, so that there would be no PTX.
    settings = {"_arch": chip, "shared_libs": runtime_library(), "lineinfo": True, "disable_file_caching": True}
    with contextlib.ExitStack() as stack:
        if "CUTE_DSL_DUMP_DIR" not in os.environ:  # otherwise files would be written to the working directory
            settings["dump_dir"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="warpcheck-"))
        for dsl in _live_dsls(DSLSingletonMeta):
            stack.enter_context(replaced(dsl.envar, **settings))
        yield


def _live_dsls(meta: Any) -> list[Any]:
    from cutlass.cutlass_dsl import CuTeDSL

    CuTeDSL._get_dsl()
    return list(meta._instances.values())


@contextlib.contextmanager
def _places() -> Iterator[None]:
    """Cache source locations: one lookup per code position instead of one per operation.

    For each operation, CuTe DSL classifies every frame of the stack, searches the line table of the function, and
    creates a location. This takes half of the time of tracing.
    """
    from cutlass._mlir import ir
    from cutlass._mlir_helpers import op

    look_up, make_location = op._fast_frameinfo, op._get_location_from_frame_info
    # Keys are ids of code objects, because their hash is slow; `codes` keeps the objects alive.
    codes: dict[int, types.CodeType] = {}
    library: dict[int, bool] = {}
    cached: dict[tuple[int, int], Any] = {}
    context: Any = None
    locations: dict[int, Any] = {}  # of this context, by the ids of the values of `cached`

    def find_user_frame(start: types.FrameType | None) -> types.FrameType | None:
        frame = start
        while frame is not None and not op._INCLUDE_LIB_FRAME:
            code = id(frame.f_code)
            if code not in codes:
                codes[code] = frame.f_code
                library[code] = op._is_framework_stack_frame(frame)
            if not library[code]:
                return frame
            frame = frame.f_back
        return start

    def frame_info(frame: types.FrameType) -> Any:
        code = id(frame.f_code)
        codes.setdefault(code, frame.f_code)
        position = code, frame.f_lasti
        if position not in cached:
            cached[position] = look_up(frame)
        return cached[position]

    def location(info: Any) -> Any:
        nonlocal context, locations
        if ir.Context.current is not context:
            context, locations = ir.Context.current, {}
        found = locations.get(id(info))
        if found is None:
            found = locations[id(info)] = make_location(info)
        return found

    with replaced(
        op, _find_user_frame=find_user_frame, _fast_frameinfo=frame_info, _get_location_from_frame_info=location
    ):
        yield


@contextlib.contextmanager
def _compilations(modules: Modules, library: ctypes.CDLL) -> Iterator[None]:
    """Let every compilation register its PTX, with line information and names, and call the emulated runtime."""
    from cutlass.base_dsl.compiler import Compiler

    original = Compiler.compile

    @functools.wraps(original)
    def compile(self: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
        # A private directory, because two processes may dump different code to files of the same name.
        with tempfile.TemporaryDirectory(prefix="warpcheck-") as scratch:
            private = Path(scratch, "kernels")
            pipeline, asked = _dumping_ptx_to(private, pipeline)
            result, code = _without_ptxas(original, self, module, pipeline, args, kwargs)
            _rename_runtime_calls(result, library)
            binaries = _binaries(result)
            dumped = sorted(private.parent.glob(private.name + "*.ptx"))
            texts = [_named(path.read_text()) for path in dumped]
            if asked:
                for path in dumped:
                    shutil.copyfile(path, asked.parent / path.name.replace(private.name, asked.name, 1))
        for binary in binaries:
            modules.register(binary, texts[0] if code is not None else _ptx_of(binary, texts), code)
        return result

    with replaced(Compiler, compile=compile):
        yield


def _without_ptxas(
    compile: Callable[..., Any], compiler: Any, module: Any, pipeline: str, args: tuple, kwargs: dict
) -> tuple[Any, assembly.Unassembled | None]:
    """Compile without ptxas. Return the module with embedded PTX, and the source of machine code.

    The latter is None if the module contains machine code after all.
    """
    parts = assembly.split(pipeline)
    if parts is None:
        return compile(compiler, module, pipeline, *args, **kwargs), None
    first, rest = parts
    with replaced(compiler, _post_compile_hook=None):  # the hook expects a completely compiled module
        module = compile(compiler, module, first, *args, **kwargs)
    code = assembly.Unassembled.of(module, rest)
    embedded = assembly.embed_ptx(module)
    return compile(compiler, module, f"builtin.module({rest})", *args, **kwargs), code if embedded else None


def _named(ptx: str) -> str:
    """Add the names that libraries give to the warps and barriers of kernels."""
    for entry in entries(ptx):
        names = names_of(entry)
        if names is not None:
            ptx = with_names(ptx, entry, *names)
    return ptx


def _dumping_ptx_to(prefix: Path, pipeline: str) -> tuple[str, Path | None]:
    """Return the pass pipeline with its PTX dumped to `prefix`, and the original destination or None."""
    match = re.search(r"dump-ptx-path='?([^'\s}]+)'?", pipeline)
    if match:
        return pipeline.replace(match.group(0), f"dump-ptx-path='{prefix}'"), Path(match.group(1))
    head, brace, tail = pipeline.partition("cute-to-nvvm{")
    if not brace:
        raise ValueError(f"pipeline {pipeline!r} has no cute-to-nvvm pass to take the PTX from")
    return f"{head}{brace}dump-ptx-path='{prefix}' {tail}", None


def _rename_runtime_calls(module: Any, library: ctypes.CDLL) -> None:
    """Rename external functions so that they resolve to intercept.c, not to a runtime that the process has loaded."""
    from cutlass._mlir import ir

    for operation in list(module.body.operations):
        if operation.operation.name != "llvm.func" or len(operation.regions[0].blocks):
            continue
        name = ir.SymbolTable.get_symbol_name(operation).value
        renamed = f"warpcheck{name}" if name.startswith("_") else f"warpcheck_{name}"
        if hasattr(library, renamed):
            ir.SymbolTable.replace_all_symbol_uses(name, renamed, module.operation)
            ir.SymbolTable.set_symbol_name(operation, renamed)


def _binaries(module: Any) -> list[bytes]:
    """Return the fat binaries in a compiled module."""
    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    return fatbins_in(stream.getvalue())


def _ptx_of(binary: bytes, texts: list[str]) -> str:
    """Return the dumped PTX whose kernels are all in the binary."""
    for text in texts:
        if all(entry.encode() in binary for entry in entries(text)):
            return text
    raise RuntimeError(f"the compiler dumped {len(texts)} PTX files, none of which belongs to the binary it embedded")


@contextlib.contextmanager
def _cpu_tensors_as_cuda(arrays: Arrays) -> Iterator[None]:
    """Let CPU tensors count as CUDA tensors, so that their pointers are in global memory, as on the chip."""
    from cutlass.base_dsl.tvm_ffi_builder import spec
    from cutlass.base_dsl.tvm_ffi_builder.tvm_ffi_builder import TVMFFIBuilder
    from cutlass.cute import runtime as cute_runtime
    from cutlass.cute._tvm_ffi_args_spec_converter import ConverterContext

    init_tensor = cute_runtime._Tensor.__init__
    init_parameter = spec.Tensor.__init__
    device_id_of = ConverterContext.alloc_or_reuse_device_id

    @functools.wraps(init_tensor)
    def init(self: Any, tensor: object, *args: Any, **kwargs: Any) -> None:
        init_tensor(self, tensor, *args, **kwargs)
        view = _DLTensor.from_address(_PyCapsule_GetPointer(self._dlpack_data, b"dltensor"))
        view.device_type, view.device_id = _KDL_CUDA, 0
        arrays.add(tensor, *_extent(view))

    # Functions called through tvm-ffi check the device of each tensor in compiled code. The replacements compile the
    # check for CUDA and load CUDA as the device.
    @functools.wraps(init_parameter)
    def init_cuda(self: Any, *args: Any, **kwargs: Any) -> None:
        init_parameter(self, *args, **{**kwargs, "device_type": "cuda"})

    def cuda_device_id(self: Any, _device_type: str, _index: int | None) -> Any:
        return device_id_of(self, "cuda", 0)

    def cuda_device_type(self: Any, _tensor: Any) -> Any:
        return self.i32(_KDL_CUDA)

    with (
        replaced(cute_runtime._Tensor, __init__=init),
        replaced(spec.Tensor, __init__=init_cuda),
        replaced(ConverterContext, alloc_or_reuse_device_id=cuda_device_id),
        replaced(TVMFFIBuilder, load_dltensor_device_type=cuda_device_type),
    ):
        yield


def _extent(view: _DLTensor) -> tuple[int, int]:
    """Return address and size in bytes of the memory that a DLPack tensor covers."""
    shape = [view.shape[i] for i in range(view.ndim)]
    if 0 in shape:
        return view.data or 0, 0
    if view.strides:
        last = sum((extent - 1) * view.strides[i] for i, extent in enumerate(shape))
    else:
        last = 1
        for extent in shape:
            last *= extent
        last -= 1
    bits = view.bits * view.lanes
    return (view.data or 0) + view.byte_offset, ((last + 1) * bits + 7) // 8


@contextlib.contextmanager
def _failures(runtime: Runtime) -> Iterator[None]:
    """Raise the emulator's exception where CuTe DSL would report a CUDA error code."""
    import tvm_ffi
    from cutlass.base_dsl.jit_executor import JitCompiledFunction, JitExecutor
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    def surfacing(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:
                failure = runtime.take_failure()
                if failure is None:
                    raise
                raise failure from None

        return call

    class FromTvmFfi(RuntimeError):
        """Exception that tvm-ffi constructs for errors of intercept.c: the emulator's exception itself."""

        def __new__(cls, message: str) -> BaseException:  # type: ignore[misc]
            return runtime.take_failure() or RuntimeError(message)

    tvm_ffi.register_error(_ERROR_KIND, FromTvmFfi)
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (JitExecutor, "run_compiled_program"),
            (JitCompiledFunction, "run_compiled_program"),
            (CudaDialectJitCompiledFunction, "_load_cuda_library"),
        ):
            stack.enter_context(replaced(owner, **{name: surfacing(getattr(owner, name))}))
        yield
