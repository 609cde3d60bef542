"""Host memory that represents device memory: aligned as by CUDA, poisoned until it is written."""

from __future__ import annotations

import ctypes

POISON = 0xFF  # of every byte of fresh memory: a NaN in every floating-point type
CUDA_ALIGNMENT = 512  # of every allocation of cudaMalloc and of torch's CUDA allocator, bytes


def aligned_buffer(nbytes: int) -> ctypes.Array:
    """Return zeroed bytes aligned to CUDA_ALIGNMENT."""
    whole = (ctypes.c_char * (nbytes + CUDA_ALIGNMENT))()
    start = -(-ctypes.addressof(whole) // CUDA_ALIGNMENT) * CUDA_ALIGNMENT
    buffer = (ctypes.c_char * nbytes).from_address(start)
    setattr(buffer, "owner", whole)  # noqa: B010  (keeps the memory; the type does not declare it)
    return buffer
