"""Blackwell datacenter GPUs (sm_100a, sm_103a): tensor memory and tcgen05 matrix operations.

On the vocabulary of `fa4.pipeline`; what only this chip has, for both directions: `tmem` (tensor memory), `mma` (its
matrix operations), `signals` (its fences and commits), `exp2` (the softmax's exponential).
"""
