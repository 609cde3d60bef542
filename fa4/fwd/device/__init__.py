"""Device code that kernels of several chips call in the forward: a part of a kernel, never a launch."""
