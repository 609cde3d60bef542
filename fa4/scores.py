"""Ready-made score_mods: functions of (score, b, h, q_idx, kv_idx). Their tensor parameters get gradients.

They are values (`fa4.mods.ir.ready`): equal ones compare equal, and they can be pickled, copied and stored in modules.
"""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from .mods.ir.ready import ReadyMade, check_tensor, check_whole


class alibi(ReadyMade):
    """Linear penalty on the distance to the key. slopes: (heads_q,); see `alibi_slopes`.

    Source: Press, Smith, Lewis, "Train short, test long", arXiv 2108.12409.
    """

    slopes: Tensor

    def __init__(self, slopes: Tensor) -> None:
        self._keep_tensors("heads_q", slopes)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.slopes[h] * (kv_idx - q_idx)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """(heads,) float32: 2^(-8 (h + 1) / heads)."""
    check_whole("heads", heads, 1)
    return torch.exp2(torch.arange(1, heads + 1, dtype=torch.float32, device=device) * (-8.0 / heads))


class relative_bias(ReadyMade):
    """Learned bias for each head and distance. table: (heads_q, 2 * n + 1), for distances kv_idx - q_idx from -n to n;
    larger distances use the outermost entries."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        check_tensor("table", table, "heads_q, 2 * n + 1")
        if table.shape[1] % 2 == 0:
            raise ValueError(f"table has shape {tuple(table.shape)}, expected an odd number of columns: 2 * n + 1")
        super().__init__(table)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        reach = self.table.shape[1] // 2
        return score + self.table[h, (kv_idx - q_idx).clamp(-reach, reach) + reach]


class bias(ReadyMade):
    """Bias for each pair. values: (batch, heads_q, seqlen_q, seqlen_k); an axis of size 1 is broadcast."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        self._keep_tensors("batch, heads_q, seqlen_q, seqlen_k", values)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        indices = (0 if extent == 1 else i for extent, i in zip(self.values.shape, (b, h, q_idx, kv_idx)))
        return score + self.values[tuple(indices)]


class softcap(ReadyMade):
    """cap * tanh(score / cap), as the argument softcap= does. cap: positive."""

    cap: float

    def __init__(self, cap: float) -> None:
        if isinstance(cap, bool) or not isinstance(cap, numbers.Real):
            raise TypeError(f"cap is {cap!r}, expected a number")
        if not 0 < cap < math.inf:
            raise ValueError(f"cap is {cap}, expected a positive finite number")
        super().__init__(float(cap))

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


class temperature(ReadyMade):
    """Factor on the scores of each query head. per_head: (heads_q,)."""

    per_head: Tensor

    def __init__(self, per_head: Tensor) -> None:
        self._keep_tensors("heads_q", per_head)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * self.per_head[h]
