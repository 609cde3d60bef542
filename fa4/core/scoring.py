"""Stages of a backward from raw scores to P, and from dP to dS: the same stages in the same order on every chip.

    raw score -> softcap or score_mod -> logit -> mask_mod, band, end of keys -> exp2 -> P -> dropout -> dV
    dP -> dropout -> minus delta -> times P -> derivative of the softcap or of the score_mod -> dS

The derivative uses the unmasked logits. The mask writes -inf to other values: a derivative at -inf would be infinite
or NaN, and 0 * inf is NaN. A score_mod's own derivative may be infinite or NaN at a masked pair, or in a row that does
not exist: dS is set to 0 wherever P is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Float32

from .constant import Constant
from .fragment_values import FragmentValues
from .score import tanh_by_exp
from .softmax import LOG2_E

Fragment = list[list[Float32]]  # a thread's values, in the rows of `FragmentCoords`


@dataclass(frozen=True)
class Scoring(Constant):
    """Stages for a thread's fragment of a tile, with at most one of softcap and score_mod."""

    scale_over_cap: Float32 | None = None  # softmax_scale / softcap
    score_mod: FragmentValues | None = None
    mask_mod: FragmentValues | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the exponential is applied to raw scores."""
        return self.scale_over_cap is None and self.score_mod is None and self.mask_mod is None

    def logits(self, scores: Fragment) -> Fragment:
        """Return the logits of raw scores; with a softcap their tanh, which the exponent's scale multiplies later. A
        logit only gives a 16-bit P, so `tanh_by_exp` is accurate enough."""
        if self.scale_over_cap is not None:
            return [[tanh_by_exp(x * (self.scale_over_cap * (2.0 * LOG2_E))) for x in row] for row in scores]
        return scores if self.score_mod is None else self.score_mod.logits(scores)

    def masked(self, logits: Fragment, minus_lse: Callable[[int, int], Float32]) -> Fragment:
        """Return the logits, -inf where the mask_mod is false. minus_lse: (row, column) of an element -> -lse of its
        query row, -inf if all its keys are masked or it does not exist. P is then 0 for any score_mod."""
        masked = logits
        if self.score_mod is not None and not self.score_mod.traced.has_finite_logits:
            masked = [
                [Float32(cutlass.select_(minus_lse(r, c) == -Float32.inf, Float32(0.0), x)) for c, x in enumerate(row)]
                for r, row in enumerate(masked)
            ]
        return masked if self.mask_mod is None else self.mask_mod.apply_mask(masked)

    def times_softcap_grad(self, factor: Fragment, logits: Fragment) -> Fragment:
        """Return `factor`, a factor of dS (P or dP - delta), times the softcap's derivative: d logit /
        d (softmax_scale * score). logits: unmasked, from `logits`."""
        if self.scale_over_cap is None:
            return factor
        return [[x * (1.0 - tanh * tanh) for x, tanh in zip(*rows)] for rows in zip(factor, logits)]

    def score_grads(self, p: Fragment, ds: Fragment) -> Fragment:
        """Return dS, the gradients of the scaled scores, from those of the logits. Call after `logits`."""
        if self.score_mod is None:
            return ds
        of_scores = self.score_mod.score_grads(ds)
        if self.score_mod.traced.has_finite_grads:
            return of_scores
        return [
            [Float32(cutlass.select_(p_element == 0.0, Float32(0.0), x)) for p_element, x in zip(*rows)]
            for rows in zip(p, of_scores)
        ]
