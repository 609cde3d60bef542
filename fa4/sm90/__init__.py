"""Hopper (sm_90): wgmma and TMA, warp-specialised kernels."""
