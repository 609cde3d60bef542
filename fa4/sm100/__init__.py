"""Blackwell datacenter GPUs (sm_100a, sm_103a): tensor memory, tcgen05 matrix operations, TMA, warp roles.

The vocabulary, shared by both directions: `roles` (who runs where), `channels` (who hands what to whom), `tmem` and
`smem` (where things lie), `mma` and `copy` (what moves and multiplies them), `exp2` (the softmax's exponential).
"""
