"""Attention kernels for NVIDIA Blackwell in CuTe DSL, with portable paths for every other device."""

from . import masks, scores
from .api.call_ranges import CallRange, compile_ahead
from .api.dense import flash_attn_func, flash_attn_varlen_func
from .api.dropout import dropout_mask
from .api.explained import explain
from .api.flex import flex_attention
from .api.indexer import indexer_loss, indexer_scores, indexer_topk
from .api.latent import mla_attention
from .api.quantized import Quantized, dequantize, quantize
from .api.states import merge_states
from .integrations.sdpa import register_sdpa
from .integrations.transformers import register_transformers
from .kvcache import flash_attn_with_kvcache, mla_attention_with_kvcache
from .mods.frontend.blocks import create_block_mask
from .mods.frontend.trace import ModError
from .runtime.dispatch import NoBackend
from .sparse import sparse_attention

__version__ = "0.1.0"
__all__ = [
    "CallRange",
    "ModError",
    "NoBackend",
    "Quantized",
    "__version__",
    "compile_ahead",
    "create_block_mask",
    "dequantize",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "indexer_loss",
    "indexer_scores",
    "indexer_topk",
    "masks",
    "merge_states",
    "mla_attention",
    "mla_attention_with_kvcache",
    "quantize",
    "register_sdpa",
    "register_transformers",
    "scores",
    "sparse_attention",
]
