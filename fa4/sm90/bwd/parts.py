"""How many CTAs share a key block in the backward: with few key blocks, as many as keep the chip busy."""

from __future__ import annotations

from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, ProblemSize

_KEYS, _QUERIES = 128, 64  # of a block and of a step
# In steps: what a CTA takes to start and end; beside this, to write its sums of dV and dK and have them added.
_PER_CTA, _SUMS = 4, 4
_MANY = 8  # whole key blocks per multiprocessor, with which all are busy
_CHOICES = 1, 2, 3, 4, 5, 6, 8, 12, 16
_LEAST_STEPS = 12  # of a part of the longest key block
_GAIN = 0.8  # of the estimated time of whole key blocks, at most


def parts_for(spec: AttentionSpec, extent: ProblemSize, chip: Chip) -> int:
    """Return the number of parts of each key block with the least estimated time, of all CTAs on the chip; 1 for
    problems of which several CTAs cannot share key blocks, and where sums must not depend on the batch. In a
    deterministic causal problem, a query block would be in different parts of different key blocks, and parts have no
    order."""
    is_dense = not spec.lengths_vary and spec.mods is None and spec.window_left is None
    has_order = spec.deterministic and spec.window_right is not None
    if not is_dense or has_order or spec.batch_invariant or 0 in (extent.max_seqlen_q, extent.max_seqlen_k):
        return 1
    pairs = spec.heads_kv * extent.batch
    if pairs * -(-extent.max_seqlen_k // _KEYS) >= _MANY * chip.sms:
        return 1
    steps = _steps(spec, extent)
    longest = max(steps)

    def estimate(parts: int) -> float:
        per_cta = _PER_CTA + (_SUMS if parts > 1 else 0)
        ctas, of_longest = len(steps) * pairs * parts, longest / parts + per_cta
        if spec.window_right is None:
            return -(-ctas // chip.sms) * of_longest
        return max(of_longest, (sum(steps) * pairs + ctas * per_cta) / chip.sms)  # the longest start first

    best = min((parts for parts in _CHOICES if parts == 1 or longest >= parts * _LEAST_STEPS), key=estimate)
    return best if estimate(best) <= _GAIN * estimate(1) else 1


def _steps(spec: AttentionSpec, extent: ProblemSize) -> list[int]:
    """Return the steps of each key block of a head: of all query heads of the group."""
    queries, keys, right = extent.max_seqlen_q, extent.max_seqlen_k, spec.window_right
    firsts = (0 if right is None else max(first - (keys - queries) - right, 0) for first in range(0, keys, _KEYS))
    return [spec.group * max(-(-(queries - first) // _QUERIES), 0) for first in firsts]
