"""What scores and outputs of a work tile are multiplied by: the call's scale, and the descales of 8-bit numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32


class Scales(NamedTuple):
    """log2, over_cap: `plan.Scalars.scale_log2` and `scale_over_cap` for this tile. of_v: None without descales."""

    log2: Float32
    over_cap: Float32
    of_v: Float32 | None

    @staticmethod
    def of(context: Any, work: Any) -> Scales:
        cfg, args = context.cfg, context.args
        log2, over_cap = args.scale_log2, args.scale_over_cap
        if not cfg.has_bytes:
            return Scales(log2, over_cap, None)
        place = work.batch, work.head_kv
        of_k, of_v = at_least(args.cache.k_descale[place]), args.cache.v_descale[place]
        if cfg.has_softcap or cfg.has_score_mod:
            return Scales(log2, over_cap * of_k, of_v)
        return Scales(log2 * of_k, over_cap, of_v)


def at_least(descale: Float32) -> Float32:
    """A descale that may meet the -inf of hidden keys: instead of 0 one that acts as 0 on any finite score."""
    return cute.arch.fmax(descale, Float32(1e-30))
