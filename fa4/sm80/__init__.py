"""Portable kernels for sm_80 and later: cp.async, ldmatrix and mma.sync."""
