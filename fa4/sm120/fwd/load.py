"""Load role, one warp: TMA loads of Q, K and V to shared memory, in the order in which the products read them.

Waits:   load_compute_Q.free, load_compute_K.free, load_compute_V.free
Signals: load_compute_Q.full, load_compute_K.full, load_compute_V.full
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import const_expr

from ...fwd.device.load import load_k, load_qkv, load_v
from ...pipeline.cursor import Lane, produce
from . import e2m1
from .context import Sm120ForwardContext


@cute.jit
def load(context: Sm120ForwardContext):
    cfg, ends = context.cfg, context.ends("load")
    q = [produce(ends.load_compute_Q, Lane(consumer, cfg.consumers)) for consumer in range(cfg.consumers)]
    loads = (e2m1.load_k, e2m1.load_v) if const_expr(cfg.multiplies_e2m1) else (load_k, load_v)
    load_qkv(context, q, produce(ends.load_compute_K), produce(ends.load_compute_V), *loads)
