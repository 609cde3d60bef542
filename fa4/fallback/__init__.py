"""The portable backend: tiled attention in plain torch, on any device, with O(N) extra memory.

The forward is online softmax over key tiles; the backward recomputes each tile from the saved lse. Only one tile of
scores exists at a time. No reduction depends on timing, so results are always deterministic. Arithmetic is float32
(float64 for float64 inputs), whatever the input dtype.

Query heads that share a key/value head are rows of the same matrix, so GQA repeats no keys. "heads" of a tile are
key/value heads times the sequences of a pass:

    q (heads, group * rows, head_dim),  k (heads, rows, head_dim),  v (heads, rows, head_dim_v)
"""

from .plan import Plan

__all__ = ["Plan"]
