"""A mask of a window that a function gives, and whether a function is traced once."""

from fa4.mods.frontend.call import cached_trace
from fa4.mods.frontend.trace import trace_mask


def by(read):
    """A mask of a window that `read` gives."""
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= read()


def traced_once(function):
    traces = []

    def trace(x):
        traces.append(x)
        return trace_mask(x)

    for _ in range(2):
        cached_trace(trace, function)
    return len(traces) == 1
