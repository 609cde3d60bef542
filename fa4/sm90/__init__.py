"""Hopper (sm_90) kernels: wgmma and TMA, warp-specialised."""
