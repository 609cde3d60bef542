"""Forward parts that all chips share: host code here, small kernels in `kernels`, parts of kernels in `device`."""
