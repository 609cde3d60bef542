"""Matrix products in the precision of their operands, independent of torch's TF32 settings."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product a @ b."""
    if _may_round(a):
        return torch.bmm(a.double(), b.double()).to(a.dtype)
    return torch.bmm(a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, batched, in place."""
    if _may_round(a):
        total.add_(product(a, b))
    else:
        total.baddbmm_(a, b)


def _may_round(x: Tensor) -> bool:
    """True if torch may round the operands of a product to TF32 or bfloat16 (torch.set_float32_matmul_precision and
    similar settings). These settings are per process and affect other threads, so they are read and never changed."""
    if x.dtype != torch.float32:
        return False
    backend = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(x.device.type)
    setting = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if setting is None:  # torch before 2.9 has one setting for all backends
        return backend is not None and torch.get_float32_matmul_precision() != "highest"
    return setting not in ("ieee", "none")
