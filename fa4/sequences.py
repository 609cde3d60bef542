"""Where each sequence of a batch lies, read on the host: for the oracle and the torch backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from .spec import AttentionInputs


@dataclass(frozen=True, slots=True)
class Sequence:
    """Sequence `index` of the batch and the rows of q and of k, v that it uses."""

    index: int
    q_rows: slice
    k_rows: slice

    def select(self, x: Tensor, rows: slice, varlen: bool) -> Tensor:
        """This sequence's view of a padded (batch, rows, ...) or packed (rows, ...) tensor: (rows, ...)."""
        return x[rows] if varlen else x[self.index, rows]

    def select_lse(self, lse: Tensor, varlen: bool) -> Tensor:
        """This sequence's view of (batch, heads, rows) or (heads, rows): (heads, rows)."""
        return lse[:, self.q_rows] if varlen else lse[self.index, :, self.q_rows]


def _rows(x: Tensor, batch: int, cu_seqlens: Tensor | None, seqused: Tensor | None) -> list[slice]:
    if cu_seqlens is None:
        starts, stops = [0] * batch, [x.shape[1]] * batch
    else:
        bounds = cu_seqlens.tolist()
        starts, stops = bounds[:-1], bounds[1:]
    if seqused is not None:
        stops = [start + used for start, used in zip(starts, seqused.tolist())]
    return [slice(start, stop) for start, stop in zip(starts, stops)]


def sequences(inputs: AttentionInputs) -> Iterator[Sequence]:
    """The sequences of a batch, dense or varlen, cut to what seqused says is in use. Synchronises the device."""
    q_rows = _rows(inputs.q, inputs.batch, inputs.cu_seqlens_q, inputs.seqused_q)
    k_rows = _rows(inputs.k, inputs.batch, inputs.cu_seqlens_k, inputs.seqused_k)
    for index, (of_q, of_k) in enumerate(zip(q_rows, k_rows)):
        yield Sequence(index, of_q, of_k)
