"""What every backend stands on: the spec of a call, the table of backends, compiled kernels, chips and devices."""
