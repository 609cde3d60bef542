"""The portable backend: tiled attention in plain torch, on any device, with O(N) extra memory.

Forward is online softmax over key tiles; backward recomputes each tile from the saved lse. One tile of scores
exists at a time, and no reduction depends on timing, so it is always deterministic. Arithmetic is float32 (float64
for float64 inputs), whatever the inputs' dtype.

Inside, query heads that share a key/value head become rows of the same matrix, so GQA repeats no keys; "heads" of a
tile are key/value heads over the sequences of a pass:

    q (heads, group * rows, head_dim),  k (heads, rows, head_dim),  v (heads, rows, head_dim_v)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import plan
from .sequences import sequences
from .spec import AttentionInputs, AttentionSpec, Gradients, Saved

# The fastest on a CPU core among tiles of 64 to 512 by 256 to 512 (1 x 8 x 2048 x 64, forward and backward).
TILE_M = 256
TILE_N = 512
TILE_SCORES = 1 << 19


def _compute_dtype(spec: AttentionSpec) -> torch.dtype:
    return torch.float64 if spec.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Band:
    """The mask of one sequence: query i sees keys i + low ... i + high (None: open), aligned bottom-right."""

    low: int | None
    high: int | None

    @staticmethod
    def of(spec: AttentionSpec, seqlen_q: int, seqlen_k: int) -> Band:
        shift = seqlen_k - seqlen_q
        return Band(
            None if spec.window_left is None else shift - spec.window_left,
            None if spec.window_right is None else shift + spec.window_right,
        )

    def keys(self, q_rows: range, seqlen_k: int) -> range:
        """The keys that any of these queries sees."""
        first = 0 if self.low is None else max(0, q_rows[0] + self.low)
        stop = seqlen_k if self.high is None else min(seqlen_k, q_rows[-1] + self.high + 1)
        return range(first, max(first, stop))

    def queries(self, k_rows: range, seqlen_q: int) -> range:
        """The queries that see any of these keys."""
        first = 0 if self.high is None else max(0, k_rows[0] - self.high)
        stop = seqlen_q if self.low is None else min(seqlen_q, k_rows[-1] - self.low + 1)
        return range(first, max(first, stop))

    def hidden(self, q_rows: range, k_rows: range, device: torch.device) -> Tensor | None:
        """Which pairs of the tile are masked, bool (queries, keys); None when none is."""
        bounds = []  # of key - query, those that cut this tile
        if self.low is not None and k_rows[0] - q_rows[-1] < self.low:
            bounds.append((torch.lt, self.low))
        if self.high is not None and k_rows[-1] - q_rows[0] > self.high:
            bounds.append((torch.gt, self.high))
        if not bounds:
            return None
        distance = torch.arange(k_rows.start, k_rows.stop, device=device)[None, :]
        distance = distance - torch.arange(q_rows.start, q_rows.stop, device=device)[:, None]
        return functools.reduce(torch.logical_or, (outside(distance, bound) for outside, bound in bounds))


def _tiles(rows: range, size: int) -> Iterator[range]:
    for first in range(rows.start, rows.stop, size):
        yield range(first, min(first + size, rows.stop))


@dataclass(frozen=True, slots=True)
class _Pass:
    """The sequences (all of one length) and key/value heads that one pass of the tile loops works on."""

    spec: AttentionSpec
    packed: bool
    batch: slice
    heads: slice
    q_rows: slice
    k_rows: slice

    @property
    def seqlen_q(self) -> int:
        return self.q_rows.stop - self.q_rows.start

    @property
    def seqlen_k(self) -> int:
        return self.k_rows.stop - self.k_rows.start

    def q_view(self, x: Tensor) -> Tensor:
        """The pass's part of a q-like tensor: (batch, rows, heads_kv, group, dim)."""
        part = x[None, self.q_rows] if self.packed else x[self.batch, self.q_rows]
        return part.unflatten(2, (self.spec.heads_kv, self.spec.group))[:, :, self.heads]

    def k_view(self, x: Tensor) -> Tensor:
        """The pass's part of a k-like tensor: (batch, rows, heads_kv, dim)."""
        return (x[None, self.k_rows] if self.packed else x[self.batch, self.k_rows])[:, :, self.heads]

    def row_view(self, x: Tensor) -> Tensor:
        """The pass's part of an lse-like tensor: (batch, heads_kv, group, rows)."""
        part = x[None, :, self.q_rows] if self.packed else x[self.batch, :, self.q_rows]
        return part.unflatten(1, (self.spec.heads_kv, self.spec.group))[:, self.heads]

    def sink_view(self, sink: Tensor) -> Tensor:
        """The pass's sinks, to add to a row view: (1, heads_kv, group, 1), in the arithmetic's dtype."""
        by_head = sink.to(_compute_dtype(self.spec)).view(1, self.spec.heads_kv, self.spec.group, 1)
        return by_head[:, self.heads]

    def split(self) -> Iterator[_Pass]:
        """Cut into passes whose score tiles hold about TILE_SCORES entries (never less than one head)."""
        per_head = max(1, self.spec.group * min(TILE_M, self.seqlen_q) * min(TILE_N, self.seqlen_k))
        budget = max(1, TILE_SCORES // per_head)  # heads of one pass, over the batch
        heads_step = min(budget, self.spec.heads_kv)
        batch_step = max(1, budget // self.spec.heads_kv)
        for b in range(self.batch.start, self.batch.stop, batch_step):
            batch = slice(b, min(b + batch_step, self.batch.stop))
            for h in range(0, self.spec.heads_kv, heads_step):
                yield replace(self, batch=batch, heads=slice(h, h + heads_step))


def _passes(inputs: AttentionInputs, spec: AttentionSpec) -> Iterator[_Pass]:
    every_head = slice(0, spec.heads_kv)
    if inputs.varlen or inputs.seqused_q is not None or inputs.seqused_k is not None:
        for seq in sequences(inputs):
            one = slice(0, 1) if inputs.varlen else slice(seq.index, seq.index + 1)
            yield from _Pass(spec, inputs.varlen, one, every_head, seq.q_rows, seq.k_rows).split()
    else:
        q_rows, k_rows = slice(0, inputs.q.shape[1]), slice(0, inputs.k.shape[1])
        yield from _Pass(spec, False, slice(0, inputs.batch), every_head, q_rows, k_rows).split()


def _load_q(view: Tensor, rows: range, dtype: torch.dtype) -> Tensor:
    """A tile of a q view as (heads, group * rows, dim)."""
    tile = view[:, rows.start : rows.stop].permute(0, 2, 3, 1, 4).to(dtype)
    return tile.reshape(tile.shape[0] * tile.shape[1], tile.shape[2] * tile.shape[3], tile.shape[4])


def _load_k(view: Tensor, rows: range, dtype: torch.dtype) -> Tensor:
    """A tile of a k view as (heads, rows, dim)."""
    tile = view[:, rows.start : rows.stop].transpose(1, 2).to(dtype)
    return tile.reshape(tile.shape[0] * tile.shape[1], tile.shape[2], tile.shape[3])


def _load_rows(view: Tensor, rows: range) -> Tensor:
    """A tile of a row view as (heads, group * rows, 1)."""
    tile = view[..., rows.start : rows.stop]
    return tile.reshape(tile.shape[0] * tile.shape[1], tile.shape[2] * tile.shape[3], 1)


def _store_q(view: Tensor, rows: range, tile: Tensor) -> None:
    target = view[:, rows.start : rows.stop].permute(0, 2, 3, 1, 4)
    target.copy_(tile.view(target.shape))


def _store_k(view: Tensor, rows: range, tile: Tensor) -> None:
    target = view[:, rows.start : rows.stop].transpose(1, 2)
    target.copy_(tile.view(target.shape))


def _store_rows(view: Tensor, rows: range, tile: Tensor) -> None:
    target = view[..., rows.start : rows.stop]
    target.copy_(tile.view(target.shape))


def _finite_or_zero(x: Tensor) -> Tensor:
    return x.masked_fill(torch.isneginf(x), 0.0)


def _scores(q: Tensor, k: Tensor, spec: AttentionSpec, hidden: Tensor | None) -> Tensor:
    """S of one tile, softcapped and masked: (heads, group * queries, keys)."""
    # Scaled in a step of its own: a BLAS may fold alpha into an operand, which rounds every term once more.
    s = torch.bmm(q, k.transpose(1, 2)).mul_(spec.softmax_scale)
    if spec.softcap > 0:
        s.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if hidden is not None:
        s.view(s.shape[0], spec.group, *hidden.shape).masked_fill_(hidden, -torch.inf)
    return s


@contextlib.contextmanager
def _as_written(device: torch.device) -> Iterator[None]:
    """Products in their operands' precision: autocast reaches into operators and would round them, as would TF32 and
    its likes, if the caller allows those for products of float32."""
    precision = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, precision)
        yield


class Plan(plan.Plan):
    """Any problem on any device."""

    layout = plan.Layout.ANY

    def describe(self) -> str:
        return f"{TILE_M} queries x {TILE_N} keys, {str(_compute_dtype(self.spec)).removeprefix('torch.')} arithmetic"

    def forward(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        with _as_written(out.device):
            for part in _passes(inputs, self.spec):
                _forward_pass(part, inputs, out, lse)

    def backward(self, inputs: AttentionInputs, saved: Saved, grads: Gradients) -> Tensor | None:
        """By recomputation from lse; dq is accumulated in the arithmetic's dtype, dk and dv tile by tile."""
        spec = self.spec
        dq = torch.zeros(grads.dq.shape, dtype=_compute_dtype(spec), device=grads.dq.device)
        dsink = dq.new_zeros(spec.heads_kv, spec.group)
        with _as_written(dq.device):
            for part in _passes(inputs, spec):
                _backward_pass(part, inputs, saved, (dq, grads.dk, grads.dv, dsink))
        grads.dq.copy_(dq)
        return dsink.view(spec.heads_q, 1) if spec.has_sink else None


def _forward_pass(part: _Pass, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
    spec, dtype = part.spec, lse.dtype
    q_view, k_view, v_view = part.q_view(inputs.q), part.k_view(inputs.k), part.k_view(inputs.v)
    out_view, lse_view = part.q_view(out), part.row_view(lse)
    band = Band.of(spec, part.seqlen_q, part.seqlen_k)
    for q_rows in _tiles(range(part.seqlen_q), TILE_M):
        q = _load_q(q_view, q_rows, dtype)
        peak = q.new_full((q.shape[0], q.shape[1], 1), -torch.inf)
        total, acc = torch.zeros_like(peak), q.new_zeros(q.shape[0], q.shape[1], spec.head_dim_v)
        for k_rows in _tiles(band.keys(q_rows, part.seqlen_k), TILE_N):
            k, v = _load_k(k_view, k_rows, dtype), _load_k(v_view, k_rows, dtype)
            s = _scores(q, k, spec, band.hidden(q_rows, k_rows, q.device))
            old_peak, peak = peak, torch.maximum(peak, s.amax(dim=2, keepdim=True))
            # A row that has seen no key yet keeps peak -inf; exponentiate relative to 0 so that it stays 0, not NaN.
            origin = _finite_or_zero(peak)
            p = s.sub_(origin).exp_()
            shrink = torch.exp(old_peak - origin)
            total.mul_(shrink).add_(p.sum(dim=2, keepdim=True))
            acc.mul_(shrink).baddbmm_(p, v)
        row_lse = peak + total.log()
        if inputs.sink is not None:
            sink = part.sink_view(inputs.sink).expand(*lse_view.shape[:3], len(q_rows)).reshape(row_lse.shape)
            # The denominator stays relative to the row's own peak: exact however large the logits are.
            total = total + torch.exp(sink - _finite_or_zero(peak))
            row_lse = torch.logaddexp(row_lse, sink)
        _store_q(out_view, q_rows, acc.div_(total.masked_fill_(total == 0, 1.0)))
        _store_rows(lse_view, q_rows, row_lse)


def _row_term(part: _Pass, out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D = rowsum(dout * out) - dlse, as a row view: (batch, heads_kv, group, rows)."""
    d = (part.q_view(dout).to(dtype) * part.q_view(out).to(dtype)).sum(dim=-1).permute(0, 2, 3, 1)
    return d if dlse is None else d - part.row_view(dlse).to(dtype)


def _backward_pass(part: _Pass, inputs: AttentionInputs, saved: Saved, grads: tuple[Tensor, ...]) -> None:
    spec, (out, lse, dout, dlse), (dq, dk, dv, dsink) = part.spec, saved, grads
    dtype = dq.dtype
    q_view, k_view, v_view = part.q_view(inputs.q), part.k_view(inputs.k), part.k_view(inputs.v)
    dout_view, dq_view, dk_view, dv_view = (
        part.q_view(dout),
        part.q_view(dq),
        part.k_view(dk),
        part.k_view(dv),
    )
    row_term = _row_term(part, out, dout, dlse, dtype)
    row_lse = part.row_view(lse)
    # exp(S - inf) = 0 for every key of a row that saw none, and for a sink of -inf.
    row_lse = row_lse.masked_fill(torch.isneginf(row_lse), torch.inf)
    if inputs.sink is not None:
        dsink[part.heads] -= (torch.exp(part.sink_view(inputs.sink) - row_lse) * row_term).sum(dim=(0, 3))
    band = Band.of(spec, part.seqlen_q, part.seqlen_k)
    for k_rows in _tiles(range(part.seqlen_k), TILE_N):
        k, v = _load_k(k_view, k_rows, dtype), _load_k(v_view, k_rows, dtype)
        dk_tile, dv_tile = torch.zeros_like(k), torch.zeros_like(v)
        for q_rows in _tiles(band.queries(k_rows, part.seqlen_q), TILE_M):
            q = _load_q(q_view, q_rows, dtype)
            do = _load_q(dout_view, q_rows, dtype)
            s = _scores(q, k, spec, band.hidden(q_rows, k_rows, q.device))
            slope = None  # of the softcap
            if spec.softcap > 0:
                slope = 1 - (_finite_or_zero(s) / spec.softcap).square_()
            p = s.sub_(_load_rows(row_lse, q_rows)).exp_()
            dv_tile.baddbmm_(p.transpose(1, 2), do)
            ds = torch.bmm(do, v.transpose(1, 2)).sub_(_load_rows(row_term, q_rows)).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            dk_tile.baddbmm_(ds.transpose(1, 2), q)
            partial = dq_view[:, q_rows.start : q_rows.stop].permute(0, 2, 3, 1, 4)
            partial.add_(torch.bmm(ds, k).view(partial.shape), alpha=spec.softmax_scale)
        _store_k(dk_view, k_rows, dk_tile.mul_(spec.softmax_scale))
        _store_k(dv_view, k_rows, dv_tile)
