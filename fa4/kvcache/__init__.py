"""Attention on a key/value cache: `flash_attn_with_kvcache`."""

from .api import flash_attn_with_kvcache

__all__ = ["flash_attn_with_kvcache"]
