"""P and dS of a thread's elements of a step: neighbouring queries of one key, or neighbouring keys of one query.

P = exp2(S - lse), dS = P (dP - delta); the stages between them are in `core.scoring`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...bwd.launch import BackwardKernelArguments
from ...core.constant import Constant
from ...core.dropout import apply_dropout
from ...core.fragment_values import FragmentValues
from ...core.line import is_in_share
from ...core.mask_bits import apply_mask_unless, mask_bits
from ...core.scoring import Scoring
from ...core.vec_io import Packed
from ...fwd.device.scales import nonzero_descale
from ...runtime.spec import GradientFactor
from .. import tmem
from ..exp2 import exp2_mufu, exp2_polynomial
from .config import CHUNK, Sm100BackwardSteps

RowStatistic = Callable[[int], list[Float32]]  # index, a multiple of 4 -> values of this element and the next three


class StepShape(Protocol):
    """What the code here needs of a configuration: elements of a thread in a step, pairs of every 16 whose exp2 runs on
    the FMA units, and types of P and dS."""

    @property
    def half(self) -> int: ...

    @property
    def polynomial(self) -> int: ...

    @property
    def operand_dtype(self) -> type[cutlass.Numeric]: ...

    @property
    def ds_dtype(self) -> type[cutlass.Numeric]: ...


@dataclass(frozen=True)
class StepElements(Constant):
    """The `cfg.half` elements of a thread in a step.

    keep_bits: 32-bit words of dropout keep bits; None without dropout. band_words: 32-bit words with a bit for each
    element that the band keeps; empty if it keeps all.
    """

    cfg: StepShape
    args: Any  # with `mods.dropout`, if there is dropout
    scoring: Scoring
    keep_bits: list[Int32] | None
    band_words: list[Int32]
    minus_lse: RowStatistic
    minus_delta: RowStatistic
    factors: Factors

    def probabilities(self, s: list[Float32]) -> tuple[list[Float32], list[Int32]]:
        """Return from raw scores: P times the softcap's derivative, a factor of dS; and P after dropout, packed."""
        cfg, scale = self.cfg, self.factors.scale_log2
        logits = self.scoring.logits([s])
        (s,) = self.scoring.masked(logits, lambda _, i: self.minus_lse(i // 4 * 4)[i % 4])
        p, packed = list[Float32](), Packed(cfg.operand_dtype)
        for pair in range(cfg.half // 2):
            if pair % 2 == 0:
                lse = self.minus_lse(2 * pair)
            x = cute.arch.fma_packed_f32x2(
                tuple(s[2 * pair : 2 * pair + 2]), (scale, scale), tuple(lse[2 * (pair % 2) : 2 * (pair % 2) + 2])
            )
            if self.band_words:
                bits, bit = self.band_words[2 * pair // 32], 2 * pair % 32
                x = apply_mask_unless(bits, bit, x[0]), apply_mask_unless(bits, bit + 1, x[1])
            if is_in_share(pair, cfg.polynomial):
                p_pair = exp2_polynomial(*x)
            else:
                p_pair = exp2_mufu(x[0]), exp2_mufu(x[1])
            factors = self._dropout_factors(2 * pair)
            p_dropped = p_pair if factors is None else cute.arch.mul_packed_f32x2(tuple(p_pair), factors)
            packed.add(*p_dropped)
            p += self.scoring.times_softcap_grad([list(p_pair)], [logits[0][2 * pair : 2 * pair + 2]])[0]
        return p, packed.words

    def score_gradients(self, p: list[Float32], dp_address: Int32) -> list[Int32]:
        """Return dS, packed. p: from `probabilities`. dp_address: tensor-memory address of dP. The caller waits for
        the loads before it overwrites dP; registers themselves are interlocked."""
        cfg, score, dp_factor = self.cfg, self.scoring.score_mod, self.factors.dp
        grads, packed = list[Float32](), Packed(cfg.ds_dtype)
        for column in range(0, cfg.half, CHUNK):
            dp = tmem.load(dp_address + column, CHUNK)
            for i in range(0, CHUNK, 4):
                delta = self.minus_delta(column + i)
                for j in range(0, 4, 2):
                    first = column + i + j
                    factors = self._dropout_factors(first)
                    dp_pair, delta_pair = (dp[i + j], dp[i + j + 1]), tuple(delta[j : j + 2])
                    if dp_factor is not None:
                        ds = cute.arch.fma_packed_f32x2(dp_pair, (dp_factor, dp_factor), delta_pair)
                    elif factors is None:
                        ds = cute.arch.add_packed_f32x2(dp_pair, delta_pair)
                    else:
                        ds = cute.arch.fma_packed_f32x2(dp_pair, factors, delta_pair)
                    ds = cute.arch.mul_packed_f32x2((p[first], p[first + 1]), ds)
                    if score is None:
                        packed.add(*ds)
                    else:
                        grads += ds
        if score is not None:
            packed.add(*self.scoring.score_grads([p], [grads])[0])
        return packed.words

    def _dropout_factors(self, i: int) -> tuple[Float32, Float32] | None:
        """Factors of P and dP for elements i and i + 1: 1 / (1 - p), or 0 if dropped; None without dropout."""
        if self.keep_bits is None:
            return None
        scale = self.args.mods.dropout.scale
        return apply_dropout(self.keep_bits, i, scale), apply_dropout(self.keep_bits, i + 1, scale)


class Factors(NamedTuple):
    """Of a key/value head. scale_log2, scale_over_cap: see `bwd.plan.Scalars`, for the operands' numbers. dp: of dP;
    None for 1."""

    scale_log2: Float32
    scale_over_cap: Float32
    dp: Float32 | None

    @staticmethod
    def of(
        cfg: Sm100BackwardSteps, args: BackwardKernelArguments, batch: Int32 | None = None, head_kv: Int32 | None = None
    ) -> Factors:
        """batch, head_kv: None without `cfg.operands`."""
        log2, over_cap = args.scale_log2, args.scale_over_cap
        if cfg.operands is None:
            return Factors(log2, over_cap, None)
        of_scores = nonzero_descale(args.factors[GradientFactor.SCORES, batch, head_kv])
        dp = Float32(args.factors[GradientFactor.DP, batch, head_kv])
        return Factors(log2, over_cap * of_scores, dp) if cfg.has_softcap else Factors(log2 * of_scores, over_cap, dp)


def scoring_of(
    cfg: Sm100BackwardSteps, factors: Factors, score: FragmentValues | None, mask: FragmentValues | None
) -> Scoring:
    """Stages of a step with its values of score_mod and mask_mod."""
    return Scoring(factors.scale_over_cap if cfg.has_softcap else None, score, mask)


def band_words(cfg: StepShape, first: Int32 | None, stop: Int32) -> list[Int32]:
    """Words of the elements first <= i < stop of a step; no lower bound if `first` is None."""
    return [mask_bits(first, stop, column) for column in range(0, cfg.half, 32)]
