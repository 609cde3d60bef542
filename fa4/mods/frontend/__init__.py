"""From a caller's Python function to a graph: tracing, what a trace depends on, block masks."""
