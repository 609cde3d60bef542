"""CUDA C++ to PTX by NVRTC (`pip install nvidia-cuda-nvrtc`), without toolkit and GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Callable, Sequence
from typing import Any

from warpcheck.toolkit import packages

_HEADERS = (
    "\n-I names directories of headers; those of CUDA come with: pip install nvidia-cuda-runtime nvidia-cuda-cccl"
)


class CompilationError(RuntimeError):
    """NVRTC refused the source; the message is its log."""


def compile_cuda(source: str, chip: str, *, name: str = "kernel.cu", options: Sequence[str] = ()) -> str:
    """Compile a CUDA C++ text to PTX with line information, so that findings name its lines.

    Args:
        chip: "sm_90a", ...
        name: the file that findings name.
        options: further ones of NVRTC, such as "-I/path" or "--maxrregcount=128". Headers of installed CUDA packages
            are found.

    Raises:
        CompilationError: the source does not compile.
        RuntimeError: NVRTC is not installed.
    """
    nvrtc = library()

    def call(function: str, *args: Any) -> int:
        return getattr(nvrtc, function)(*args)

    program = ctypes.c_void_p()
    _check(call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        arch = chip.replace("sm_", "compute_")
        words = [f"--gpu-architecture={arch}", "--generate-line-info", "--std=c++17", *_headers(), *options]
        status = call(
            "nvrtcCompileProgram", program, len(words), (ctypes.c_char_p * len(words))(*(w.encode() for w in words))
        )
        if status:
            log = _text(call, "nvrtcGetProgramLog", program).strip() or f"NVRTC's error {status}"
            raise CompilationError(log + (_HEADERS if "cannot open source file" in log else ""))
        return _text(call, "nvrtcGetPTX", program)
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


def _text(call: Callable[..., int], function: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(call(f"{function}Size", program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(call(function, program, buffer))
    return buffer.value.decode()


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC's error {status}")


def _headers() -> list[str]:
    return [f"-I{folder / 'include'}" for folder in packages() if (folder / "include").is_dir()]


@functools.cache
def library() -> ctypes.CDLL:
    """NVRTC's library. Raises RuntimeError where it is not installed."""
    found = sorted(
        path for folder in packages() for path in folder.glob("lib*/libnvrtc.so.*") if "alt" not in path.name
    )
    path = str(found[-1]) if found else ctypes.util.find_library("nvrtc")
    if path is None:
        raise RuntimeError("NVRTC compiles CUDA C++ and is not installed: pip install nvidia-cuda-nvrtc")
    return ctypes.CDLL(path)
