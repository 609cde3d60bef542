"""Attention of each query to a chosen part of the keys, with gradients: `sparse_attention`."""

from .api import sparse_attention

__all__ = ["sparse_attention"]
