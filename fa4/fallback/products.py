"""Products of tiles in the precision of their operands, whatever torch is allowed to round them to."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of batches of matrices."""
    if _is_rounded(a):
        return torch.bmm(a.double(), b.double()).to(a.dtype)
    return torch.bmm(a, b)


def add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a tensor."""
    if _is_rounded(a):
        to.add_(product(a, b))
    else:
        to.baddbmm_(a, b)


def _is_rounded(x: Tensor) -> bool:
    """Whether torch may round the operands of a product to TF32 or bfloat16, as torch.set_float32_matmul_precision and
    its likes allow. The setting is the process's, and other threads compute by it: it is read, never changed."""
    if x.dtype != torch.float32:
        return False
    backend = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(x.device.type)
    setting = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if setting is None:  # torch before 2.9, where one setting is for all
        return backend is not None and torch.get_float32_matmul_precision() != "highest"
    return setting not in ("ieee", "none")
