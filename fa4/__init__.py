"""Attention kernels for NVIDIA Blackwell in CuTe DSL, with portable paths for every other device."""

from .api import explain, flash_attn_func, flash_attn_varlen_func
from .dispatch import NoBackend

__version__ = "0.1.0"
__all__ = ["NoBackend", "__version__", "explain", "flash_attn_func", "flash_attn_varlen_func"]
