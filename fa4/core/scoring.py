"""A backward's way from raw scores to weights P, and back from dP to dS: the same stages in the same order on every
chip.

    raw score -> softcap or score_mod -> logit -> mask_mod, band, end of the keys -> exp2 -> P -> dropout -> dV
    dP -> dropout -> minus delta -> times P -> derivative of the softcap or of the score_mod -> dS

The logits are kept as the score function made them, for its derivative. A mask makes other values of them, -inf where
it hides the pair: a derivative at -inf would be infinite or NaN, and 0 * inf is NaN. A score_mod's own derivative may
be infinite or NaN at a pair that is hidden, or of a row that does not exist: dS is 0 wherever P is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Float32

from .constant import Constant
from .fragment_values import FragmentValues
from .score import SoftcapAgain

Lines = list[list[Float32]]  # a thread's elements, as `places.FragmentCoords` has them


@dataclass(frozen=True)
class Scoring(Constant):
    """The stages of a thread's elements of a tile; of softcap and score_mod there is at most one."""

    softcap: SoftcapAgain | None = None
    score_mod: FragmentValues | None = None
    mask_mod: FragmentValues | None = None

    @property
    def is_plain(self) -> bool:
        """Whether raw scores are what is exponentiated."""
        return self.softcap is None and self.score_mod is None and self.mask_mod is None

    def logits(self, scores: Lines) -> Lines:
        """Of raw scores; with a softcap their tanh, which the scale of the exponents multiplies."""
        if self.softcap is not None:
            return [[self.softcap.apply(x) for x in line] for line in scores]
        return scores if self.score_mod is None else self.score_mod.logits(scores)

    def masked(self, logits: Lines, minus_lse: Callable[[int, int], Float32]) -> Lines:
        """The logits, -inf where the mask_mod hides the pair. minus_lse: of the row of an element (line, across): -inf
        if the row sees nothing or does not exist. Then P is 0 whatever the score_mod made of the pair."""
        hidden = logits
        if self.score_mod is not None and not self.score_mod.of.gives_numbers:
            hidden = [
                [Float32(cutlass.select_(minus_lse(r, c) == -Float32.inf, Float32(0.0), x)) for c, x in enumerate(line)]
                for r, line in enumerate(hidden)
            ]
        return hidden if self.mask_mod is None else self.mask_mod.hidden(hidden)

    def sloped(self, factor: Lines, logits: Lines) -> Lines:
        """A factor of dS, P or dP - delta, times the softcap's derivative. logits: not masked."""
        if self.softcap is None:
            return factor
        return [[x * self.softcap.slope(t) for x, t in zip(*lines)] for lines in zip(factor, logits)]

    def slopes(self, p: Lines, ds: Lines) -> Lines:
        """dS, gradients of the scaled scores, from those of the logits; after `logits`."""
        if self.score_mod is None:
            return ds
        of_scores = self.score_mod.slopes(ds)
        if self.score_mod.of.is_harmless:
            return of_scores
        return [
            [Float32(cutlass.select_(weight == 0.0, Float32(0.0), x)) for weight, x in zip(*lines)]
            for lines in zip(p, of_scores)
        ]
