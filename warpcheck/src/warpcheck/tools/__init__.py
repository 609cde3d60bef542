"""Commands for mutants of a kernel, recorded launches, and comparison with a real chip."""
