"""Predicted time of emulated kernels: a clock model of chips for recorded launches."""
