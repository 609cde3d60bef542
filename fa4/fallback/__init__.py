"""The portable backend: tiled attention in plain torch, on any device, with O(N) extra memory.

Forward is online softmax over key tiles; backward recomputes each tile from the saved lse. One tile of scores
exists at a time, and no reduction depends on timing, so it is always deterministic. Arithmetic is float32 (float64
for float64 inputs), whatever the inputs' dtype.

Inside, query heads that share a key/value head become rows of the same matrix, so GQA repeats no keys; "heads" of a
tile are key/value heads over the sequences of a pass:

    q (heads, group * rows, head_dim),  k (heads, rows, head_dim),  v (heads, rows, head_dim_v)
"""

from .plan import Plan

__all__ = ["Plan"]
