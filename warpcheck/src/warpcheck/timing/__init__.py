"""Time of emulated kernels: what a chip would take for what the machine ran."""
