"""What both backward kernels share."""
