"""Factors of a work tile: the softmax scale of the call, the descales of 8-bit K and V, the unit of 4-bit ones."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from ...core.bytes import UNIT
from ..launch import ForwardContext
from ..variant import ForwardVariant
from .work import Work


class Scales(NamedTuple):
    """log2, over_cap: `scale_log2` and `scale_over_cap` of `plan.Scalars`, times the descale of K if it applies there.
    v_descale: descale of V, or None."""

    log2: Float32
    over_cap: Float32
    v_descale: Float32 | None

    @staticmethod
    def of(context: ForwardContext, work: Work) -> Scales:
        cfg, args = context.cfg, context.args
        log2, over_cap = args.scale_log2, args.scale_over_cap
        if not cfg.has_bytes or cfg.multiplies_e2m1:
            return Scales(log2, over_cap, None)
        k_descale, v_descale = (factor(context, work, name) for name in ("k_descale", "v_descale"))
        if cfg.has_softcap or cfg.has_score_mod:
            return Scales(log2, over_cap * nonzero_descale(k_descale), v_descale)
        return Scales(nonzero_descale(log2 * k_descale), over_cap, v_descale)

    def of_row(self, cfg: ForwardVariant, q_scale: Float32) -> Scales:
        """Return those of a row of Q that has been divided by a scale."""
        if cfg.has_softcap or cfg.has_score_mod:
            return self._replace(over_cap=self.over_cap * q_scale)
        return self._replace(log2=nonzero_descale(self.log2 * q_scale))


def factor(context: ForwardContext, work: Work, name: str) -> Float32:
    """Return the factor on the operands of K ("k_descale") or V ("v_descale")."""
    if context.cfg.is_nvfp4:
        return Float32(UNIT)
    return getattr(context.args.cache, name)[work.batch, work.head_kv]


def nonzero_descale(descale: Float32) -> Float32:
    """Replace a descale of 0 by 1e-30, which acts as 0 on a finite score: 0 times the -inf of a masked key is NaN."""
    return cute.arch.fmax(descale, Float32(1e-30))
