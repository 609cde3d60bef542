"""Host memory that stands for a device's: aligned as CUDA aligns it, poisoned where nobody wrote."""

from __future__ import annotations

import ctypes

POISON = 0xFF  # of every byte of fresh memory: a NaN in every floating-point type
CUDA_ALIGNMENT = 512  # of every allocation of cudaMalloc and of torch's CUDA allocator, bytes


def aligned_buffer(nbytes: int) -> ctypes.Array:
    """Zeroed bytes that start at a multiple of CUDA_ALIGNMENT; they live as long as the returned array."""
    whole = (ctypes.c_char * (nbytes + CUDA_ALIGNMENT))()
    start = -(-ctypes.addressof(whole) // CUDA_ALIGNMENT) * CUDA_ALIGNMENT
    buffer = (ctypes.c_char * nbytes).from_address(start)
    setattr(buffer, "owner", whole)  # noqa: B010  (keeps the memory; the type does not declare it)
    return buffer
