"""Blackwell datacenter GPUs (sm_100a, sm_103a): tensor memory and tcgen05 matrix operations.

Kernels are built from the parts of `fa4.pipeline`. Modules here serve both directions: `tmem` (tensor memory), `mma`
(tcgen05.mma), `signals` (tcgen05 fences and commits), `exp2` (the exponential of softmax).
"""
