"""Commands beside `run` and `ptx`: mutants of a kernel, recorded launches, a real chip beside the emulated one."""
