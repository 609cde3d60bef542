"""What calls trace_cache of each other."""

import sys

from fa4.mods.frontend import trace_cache
from fa4.runtime import dispatch
from fa4.torch_ops import calls
from fa4.torch_ops.growing import GrowingCalls
from fa4.torch_ops.signature import CallCache, LastCallGuard, routes


def forget_calls() -> None:
    """The next call of each kind is planned anew."""
    dispatch.planned.cache_clear()
    routes.clear()
    trace_cache._cached_mods.clear()
    for name in (calls.__name__, "fa4.kvcache.calls", "fa4.integrations.sdpa.operators"):
        for x in vars(sys.modules.get(name, calls)).values():
            if isinstance(x, (CallCache, GrowingCalls, LastCallGuard)):
                x.clear()
