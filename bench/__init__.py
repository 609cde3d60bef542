"""Benchmarks: cases x providers, checked against the oracle, rows to bench/results."""
