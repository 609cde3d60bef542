"""Attention kernels for NVIDIA Blackwell in CuTe DSL, with portable paths for every other device."""

from . import masks, scores
from .api import flash_attn_func, flash_attn_varlen_func
from .dispatch import NoBackend
from .dropout import dropout_mask
from .explained import explain
from .flex import flex_attention
from .integrations.sdpa import register_sdpa
from .integrations.transformers import register_transformers
from .kvcache import flash_attn_with_kvcache
from .mods.blocks import create_block_mask
from .mods.trace import ModError
from .states import merge_states

__version__ = "0.1.0"
__all__ = [
    "ModError",
    "NoBackend",
    "__version__",
    "create_block_mask",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "masks",
    "merge_states",
    "register_sdpa",
    "register_transformers",
    "scores",
]
