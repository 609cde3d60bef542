"""Attention on a key/value cache: `flash_attn_with_kvcache`, and for latent attention `mla_attention_with_kvcache`."""

from .api import flash_attn_with_kvcache
from .latent import mla_attention_with_kvcache

__all__ = ["flash_attn_with_kvcache", "mla_attention_with_kvcache"]
