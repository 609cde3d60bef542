"""Device code that kernels of several chips call in the backward: a part of a kernel, never a launch."""
