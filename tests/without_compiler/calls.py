"""A process that makes some calls of fa4 on a chip that it does not have. Prints the number of launches of each call.

Argument "record": kernels are neither compiled nor launched; FA4_RECORD names the file of problems. "launch": CuTe DSL
cannot be imported; kernels come from FA4_CACHE_DIR, and run up to the launch, with the stub in place of CuTe DSL's
runtime library. "installed": the same, but CuTe DSL could be imported.
"""

import ctypes
import json
import sys

if sys.argv[1] == "launch":
    sys.modules["cutlass"] = None  # type: ignore[assignment]  # an import raises ImportError

import torch
from torch.utils.dlpack import to_dlpack

import fa4
from fa4.runtime import jit
from fa4.runtime.device import chip_by_number, emulating

_CUDA = 2  # DLPack's number
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def on_cuda(x):
    """Return tensors, in tuples, as if their memory were that of a GPU."""
    import tvm_ffi

    if isinstance(x, tuple):
        return tuple(map(on_cuda, x))
    if not isinstance(x, torch.Tensor):
        return x
    capsule = to_dlpack(x.detach())
    ctypes.c_int32.from_address(_pointer_of(capsule, b"dltensor") + 8).value = _CUDA
    return tvm_ffi.from_dlpack(capsule)


def training():
    q, k, v = (torch.ones(2, 100, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    fa4.flash_attn_func(q, k, v, causal=True).sum().backward()


def packed():
    q, k, v = (torch.ones(100, 2, 128, dtype=torch.float16) for _ in range(3))
    ends = torch.tensor([0, 40, 90], dtype=torch.int32)
    fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=50, max_seqlen_k=50, window_size=(9, 0)
    )


def cache():
    q, k, v = (torch.ones(2, 1, heads, 128, dtype=torch.bfloat16) for heads in (8, 2, 2))
    pages = [torch.ones(64, 128, 2, 128, dtype=torch.bfloat16) for _ in range(2)]
    cos, sin = (torch.ones(4096, 32, dtype=torch.bfloat16) for _ in range(2))
    table, used = torch.arange(64, dtype=torch.int32).view(2, 32), torch.tensor([3000, 4], dtype=torch.int32)
    fa4.flash_attn_with_kvcache(
        q, *pages, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=used, page_table=table, causal=True
    )


def latent():
    q_nope, q_rope = (torch.ones(2, 1, 16, columns, dtype=torch.bfloat16) for columns in (512, 64))
    rows = torch.ones(16, 64, 1, 576, dtype=torch.bfloat16)
    table, used = torch.arange(16, dtype=torch.int32).view(2, 8), torch.tensor([300, 4], dtype=torch.int32)
    fa4.mla_attention_with_kvcache(
        q_nope, q_rope, rows, softmax_scale=0.1, cache_seqlens=used, page_table=table, causal=True
    )


def function():
    q, k, v = (torch.ones(1, 2, 100, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.ones(2, requires_grad=True)
    fa4.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j)).sum().backward()


def main() -> None:
    real, stub, counts = jit._load, None, {}
    if sys.argv[1] == "record":
        jit.compiled = lambda *given, **named: lambda *arguments: None
    else:
        directory = jit.cache_directory()
        stub = ctypes.CDLL(str(directory / "libcute_dsl_runtime.so"))

        def load(entry):
            launcher = real(entry)
            return lambda *arguments: launcher(*map(on_cuda, arguments))

        jit._load = load
    with emulating(chip_by_number(90)):
        for call in (training, packed, cache, latent, function):
            before = stub.stub_launches() if stub else 0
            call()
            counts[call.__name__] = (stub.stub_launches() if stub else 0) - before
    assert not any(name.split(".")[0] == "cutlass" for name, module in sys.modules.items() if module is not None)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
