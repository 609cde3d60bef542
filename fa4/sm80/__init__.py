"""Portable kernels: cp.async, ldmatrix and mma.sync, which every NVIDIA GPU since Ampere has."""
