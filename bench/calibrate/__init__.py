"""Microbenchmarks that the timing model is fitted to: `python -m bench.calibrate --out FILE` on a GPU."""
