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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import plan
from .mods import dropout
from .mods.blocks import FULL, NONE, table_of
from .mods.graph import Evaluation, parse
from .mods.record import Mods
from .mods.tensors import add_gradients, evaluation
from .sequences import cached_rows, sequences
from .spec import AttentionInputs, AttentionSpec, Cache, Gradients, Saved

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
    seqlen_q: int
    seqlen_k: int

    @staticmethod
    def of(spec: AttentionSpec, seqlen_q: int, seqlen_k: int) -> Band:
        shift = seqlen_k - seqlen_q
        return Band(
            None if spec.window_left is None else shift - spec.window_left,
            None if spec.window_right is None else shift + spec.window_right,
            seqlen_q,
            seqlen_k,
        )

    def query_tiles(self) -> Iterator[range]:
        return _tiles(range(self.seqlen_q), TILE_M)

    def key_tiles(self) -> Iterator[range]:
        return _tiles(range(self.seqlen_k), TILE_N)

    def keys(self, q_rows: range) -> Iterator[range]:
        """Tiles of the keys that any of these queries sees."""
        first = 0 if self.low is None else max(0, q_rows[0] + self.low)
        stop = self.seqlen_k if self.high is None else min(self.seqlen_k, q_rows[-1] + self.high + 1)
        return _tiles(range(first, max(first, stop)), TILE_N)

    def queries(self, k_rows: range) -> Iterator[range]:
        """Tiles of the queries that see any of these keys."""
        first = 0 if self.high is None else max(0, k_rows[0] - self.high)
        stop = self.seqlen_q if self.low is None else min(self.seqlen_q, k_rows[-1] - self.low + 1)
        return _tiles(range(first, max(first, stop)), TILE_M)

    def hide(self, s: Tensor, q_rows: range, k_rows: range) -> None:
        """Set scores (..., queries, keys) of pairs that are masked to -inf."""
        hidden = self.hidden(q_rows, k_rows, s.device)
        if hidden is not None:
            s.masked_fill_(hidden, -torch.inf)

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
    first_sequence: int  # of the batch: that of `batch`, or of packed sequences the one that this is
    cache: Cache | None = None  # that k and v are; then this is one sequence

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
        if self.cache is not None:
            return cached_rows(x, self.cache, self.first_sequence, self.k_rows, self.heads)[None]
        return (x[None, self.k_rows] if self.packed else x[self.batch, self.k_rows])[:, :, self.heads]

    def row_view(self, x: Tensor) -> Tensor:
        """The pass's part of an lse-like tensor: (batch, heads_kv, group, rows)."""
        part = x[None, :, self.q_rows] if self.packed else x[self.batch, :, self.q_rows]
        return part.unflatten(1, (self.spec.heads_kv, self.spec.group))[:, self.heads]

    def sink_view(self, sink: Tensor) -> Tensor:
        """The pass's sinks, to add to a row view: (1, heads_kv, group, 1), in the arithmetic's dtype."""
        by_head = sink.to(_compute_dtype(self.spec)).view(1, self.spec.heads_kv, self.spec.group, 1)
        return by_head[:, self.heads]

    def indices(self, q_rows: range, k_rows: range, device: torch.device) -> dict[str, Tensor]:
        """Of sequence, query head, query and key, as the traced functions take them, over the axes of `by_head`."""
        group, sequences = self.spec.group, self.batch.stop - self.batch.start
        h = torch.arange(self.heads.start * group, self.heads.stop * group, device=device)
        return {
            "b": torch.arange(sequences, device=device).add(self.first_sequence).view(-1, 1, 1, 1, 1),
            "h": h.view(1, -1, group, 1, 1),
            "q_idx": torch.arange(q_rows.start, q_rows.stop, device=device).view(-1, 1),
            "kv_idx": torch.arange(k_rows.start, k_rows.stop, device=device),
        }

    def by_head(self, tile: Tensor) -> Tensor:
        """Scores of a tile as (batch, heads_kv, group, queries, keys)."""
        return tile.view(
            -1, self.heads.stop - self.heads.start, self.spec.group, tile.shape[1] // self.spec.group, tile.shape[2]
        )

    def split(self, one_by_one: bool = False) -> Iterator[_Pass]:
        """Cut into passes whose score tiles hold about TILE_SCORES entries (never less than one head)."""
        per_head = max(1, self.spec.group * min(TILE_M, self.seqlen_q) * min(TILE_N, self.seqlen_k))
        budget = 1 if one_by_one else max(1, TILE_SCORES // per_head)  # heads of one pass, over the batch
        heads_step = min(budget, self.spec.heads_kv)
        batch_step = max(1, budget // self.spec.heads_kv)
        for b in range(self.batch.start, self.batch.stop, batch_step):
            batch = slice(b, min(b + batch_step, self.batch.stop))
            for h in range(0, self.spec.heads_kv, heads_step):
                first = self.first_sequence + b - self.batch.start
                heads = slice(h, min(h + heads_step, self.spec.heads_kv))
                yield replace(self, batch=batch, heads=heads, first_sequence=first)


def _passes(
    inputs: AttentionInputs, spec: AttentionSpec, one_by_one: bool = False, cache: Cache | None = None
) -> Iterator[_Pass]:
    every_head = slice(0, spec.heads_kv)
    lengths_differ = inputs.varlen or inputs.seqused_q is not None or inputs.seqused_k is not None
    if lengths_differ or cache is not None or spec.batch_invariant:
        for seq in sequences(inputs, cache):
            one = slice(0, 1) if inputs.varlen else slice(seq.index, seq.index + 1)
            part = _Pass(spec, inputs.varlen, one, every_head, seq.q_rows, seq.k_rows, seq.index, cache)
            yield from part.split(one_by_one)
    else:
        q_rows, k_rows = slice(0, inputs.q.shape[1]), slice(0, inputs.k.shape[1])
        yield from _Pass(spec, False, slice(0, inputs.batch), every_head, q_rows, k_rows, 0).split(one_by_one)


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


@dataclass(frozen=True, slots=True)
class _Modified:
    """What of a call's mods does not change from pass to pass. table: the states of blocks, on the host."""

    mods: Mods
    spec: AttentionSpec
    table: Tensor | None

    @staticmethod
    def of(mods: Mods | None, spec: AttentionSpec, seqlen_k: int) -> _Modified | None:
        if mods is None:
            return None
        table = table_of(mods.blocks[:4], -(-seqlen_k // mods.block_k)).cpu() if mods.blocks else None
        return _Modified(mods, spec, table)

    @property
    def one_by_one(self) -> bool:
        """Whether heads or sequences have blocks of their own."""
        return self.table is not None and self.table.shape[:2] != (1, 1)

    def mask(self, part: _Pass, band: Band) -> Band | _Masked:
        graph = self.mods.mask
        if not graph and self.table is None:
            return band
        states = self.table
        if states is not None:
            batch, heads = states.shape[:2]
            states = states[part.first_sequence : part.first_sequence + 1] if batch > 1 else states
            of_group = slice(part.heads.start * self.spec.group, part.heads.stop * self.spec.group)
            states = states[0, of_group] if heads > 1 else states[0]
        return _Masked(self, part, band, states)

    def score(self, part: _Pass, s: Tensor, q_rows: range, k_rows: range) -> Evaluation:
        """The score's graph on a tile of S."""
        graph, (tensors, numbers) = parse(self.mods.score), self.mods.of_score()
        inputs = part.indices(q_rows, k_rows, s.device) | {"score": part.by_head(s)}
        return evaluation(graph, tensors, numbers, inputs, s.dtype)

    def kept(self, part: _Pass, s: Tensor, q_rows: range, k_rows: range) -> Tensor | None:
        """What the probabilities of a tile of S are multiplied by, if some are dropped: 0 or 1 / (1 - p)."""
        if self.mods.dropout_seed is None:
            return None
        at, p = part.indices(q_rows, k_rows, s.device), self.mods.dropout_p
        pair, query = (at["b"] * self.spec.heads_q + at["h"])[..., 0], at["q_idx"][..., 0]
        kept = dropout.keep(p, self.mods.dropout_seed, pair, query, k_rows)
        return kept.reshape(s.shape).to(s.dtype).mul_(dropout.Rate.of(p).scale)


@dataclass(frozen=True, slots=True)
class _Masked:
    """A `Band` of which a block mask and a mask_mod hide more.

    states: of the blocks, (heads of the group or 1, blocks of queries, blocks of keys); None if there are no blocks.
    """

    of: _Modified
    part: _Pass
    band: Band
    states: Tensor | None

    def query_tiles(self) -> Iterator[range]:
        if self.states is None:
            return self.band.query_tiles()
        return self._in_blocks(range(self.states.shape[1]), self.of.mods.block_q, self.part.seqlen_q, TILE_M)

    def key_tiles(self) -> Iterator[range]:
        if self.states is None:
            return self.band.key_tiles()
        return self._in_blocks(range(self.states.shape[2]), self.of.mods.block_k, self.part.seqlen_k, TILE_N)

    def keys(self, q_rows: range) -> Iterator[range]:
        if self.states is None:
            return self.band.keys(q_rows)
        row = self.states[:, q_rows.start // self.of.mods.block_q]
        met = (row != NONE).any(0).nonzero().flatten().tolist()
        return self._in_blocks(met, self.of.mods.block_k, self.part.seqlen_k, TILE_N)

    def queries(self, k_rows: range) -> Iterator[range]:
        if self.states is None:
            return self.band.queries(k_rows)
        column = self.states[:, :, k_rows.start // self.of.mods.block_k]
        met = (column != NONE).any(0).nonzero().flatten().tolist()
        return self._in_blocks(met, self.of.mods.block_q, self.part.seqlen_q, TILE_M)

    @staticmethod
    def _in_blocks(blocks: Iterable[int], size: int, rows: int, tile: int) -> Iterator[range]:
        for block in blocks:
            yield from _tiles(range(block * size, min((block + 1) * size, rows)), tile)

    def hide(self, s: Tensor, q_rows: range, k_rows: range) -> None:
        self.band.hide(s, q_rows, k_rows)
        mods, seen, full = self.of.mods, None, None
        if self.states is not None:
            state = self.states[:, q_rows.start // mods.block_q, k_rows.start // mods.block_k]
            if (state == FULL).all():
                return
            full = (state == FULL).to(s.device).view(-1, 1, 1)
            seen = (state != NONE).to(s.device).view(-1, 1, 1)
        if mods.mask:
            tensors, numbers = mods.of_mask()
            inputs = self.part.indices(q_rows, k_rows, s.device)
            done = evaluation(parse(mods.mask), tensors, numbers, inputs, s.dtype)
            by_element = done.value(done.graph.result)
            seen = by_element if seen is None or full is None else full | (seen & by_element)
        if seen is not None:
            s.masked_fill_(~seen, -torch.inf)


def _scores(
    q: Tensor,
    k: Tensor,
    part: _Pass,
    modified: _Modified | None,
    mask: Band | _Masked,
    q_rows: range,
    k_rows: range,
) -> tuple[Tensor, Evaluation | None]:
    """S of one tile, after softcap or score_mod, masked: (heads, group * queries, keys); and the score's evaluation."""
    # Scaled in a step of its own: a BLAS may fold alpha into an operand, which rounds every term once more.
    s, done = torch.bmm(q, k.transpose(1, 2)).mul_(part.spec.softmax_scale), None
    if part.spec.softcap > 0:
        s.div_(part.spec.softcap).tanh_().mul_(part.spec.softcap)
    if modified is not None and modified.mods.score:
        done = modified.score(part, s, q_rows, k_rows)
        # A copy: the derivative needs what the graph knows.
        s = torch.broadcast_to(done.value(done.graph.result), part.by_head(s).shape).clone().view(s.shape)
    mask.hide(part.by_head(s), q_rows, k_rows)
    return s, done


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
    compiled = False

    def describe(self) -> str:
        return f"{TILE_M} queries x {TILE_N} keys, {str(_compute_dtype(self.spec)).removeprefix('torch.')} arithmetic"

    def forward(
        self,
        inputs: AttentionInputs,
        out: Tensor,
        lse: Tensor,
        mods: Mods | None = None,
        cache: Cache | None = None,
    ) -> None:
        modified = _Modified.of(mods, self.spec, self.extent.max_seqlen_k)
        with _as_written(out.device):
            for part in _passes(inputs, self.spec, modified is not None and modified.one_by_one, cache):
                _forward_pass(part, inputs, out, lse, modified)

    def backward(
        self,
        inputs: AttentionInputs,
        saved: Saved,
        grads: Gradients,
        mods: Mods | None = None,
        captured: Sequence[Tensor | None] = (),
    ) -> Tensor | None:
        """By recomputation from lse; dq is accumulated in the arithmetic's dtype, dk and dv tile by tile."""
        modified = _Modified.of(mods, self.spec, self.extent.max_seqlen_k)
        spec = self.spec
        dq = torch.zeros(grads.dq.shape, dtype=_compute_dtype(spec), device=grads.dq.device)
        dsink = dq.new_zeros(spec.heads_kv, spec.group)
        with _as_written(dq.device):
            for part in _passes(inputs, spec, modified is not None and modified.one_by_one):
                _backward_pass(part, inputs, saved, (dq, grads.dk, grads.dv, dsink), modified, captured)
        grads.dq.copy_(dq)
        return dsink.view(spec.heads_q, 1) if spec.has_sink else None


def _forward_pass(part: _Pass, inputs: AttentionInputs, out: Tensor, lse: Tensor, modified: _Modified | None) -> None:
    spec, dtype = part.spec, lse.dtype
    q_view, k_view, v_view = part.q_view(inputs.q), part.k_view(inputs.k), part.k_view(inputs.v)
    if part.cache is not None and part.cache.k_descale is not None and part.cache.v_descale is not None:
        descales = part.cache.k_descale, part.cache.v_descale
        k_view, v_view = (
            x.to(dtype) * descale[part.first_sequence, part.heads, None].to(dtype)
            for x, descale in zip((k_view, v_view), descales)
        )
    out_view, lse_view = part.q_view(out), part.row_view(lse)
    mask = _mask(part, modified)
    for q_rows in mask.query_tiles():
        q = _load_q(q_view, q_rows, dtype)
        peak = q.new_full((q.shape[0], q.shape[1], 1), -torch.inf)
        total, acc = torch.zeros_like(peak), q.new_zeros(q.shape[0], q.shape[1], spec.head_dim_v)
        for k_rows in mask.keys(q_rows):
            k, v = _load_k(k_view, k_rows, dtype), _load_k(v_view, k_rows, dtype)
            s, _ = _scores(q, k, part, modified, mask, q_rows, k_rows)
            old_peak, peak = peak, torch.maximum(peak, s.amax(dim=2, keepdim=True))
            # A row that has seen no key yet keeps peak -inf; exponentiate relative to 0 so that it stays 0, not NaN.
            origin = _finite_or_zero(peak)
            p = s.sub_(origin).exp_()
            shrink = torch.exp(old_peak - origin)
            total.mul_(shrink).add_(p.sum(dim=2, keepdim=True))
            kept = None if modified is None else modified.kept(part, p, q_rows, k_rows)
            acc.mul_(shrink).baddbmm_(p if kept is None else p.mul_(kept), v)
        row_lse = peak + total.log()
        if inputs.sink is not None:
            sink = part.sink_view(inputs.sink).expand(*lse_view.shape[:3], len(q_rows)).reshape(row_lse.shape)
            # The denominator stays relative to the row's own peak: exact however large the logits are.
            total = total + torch.exp(sink - _finite_or_zero(peak))
            row_lse = torch.logaddexp(row_lse, sink)
        _store_q(out_view, q_rows, acc.div_(total.masked_fill_(total == 0, 1.0)))
        _store_rows(lse_view, q_rows, row_lse)


def _mask(part: _Pass, modified: _Modified | None) -> Band | _Masked:
    band = Band.of(part.spec, part.seqlen_q, part.seqlen_k)
    return band if modified is None else modified.mask(part, band)


def _row_term(part: _Pass, out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D = rowsum(dout * out) - dlse, as a row view: (batch, heads_kv, group, rows)."""
    d = (part.q_view(dout).to(dtype) * part.q_view(out).to(dtype)).sum(dim=-1).permute(0, 2, 3, 1)
    return d if dlse is None else d - part.row_view(dlse).to(dtype)


def _backward_pass(
    part: _Pass,
    inputs: AttentionInputs,
    saved: Saved,
    grads: tuple[Tensor, ...],
    modified: _Modified | None,
    captured: Sequence[Tensor | None],
) -> None:
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
    mask = _mask(part, modified)
    for k_rows in mask.key_tiles():
        k, v = _load_k(k_view, k_rows, dtype), _load_k(v_view, k_rows, dtype)
        dk_tile, dv_tile = torch.zeros_like(k), torch.zeros_like(v)
        for q_rows in mask.queries(k_rows):
            q = _load_q(q_view, q_rows, dtype)
            do = _load_q(dout_view, q_rows, dtype)
            s, done = _scores(q, k, part, modified, mask, q_rows, k_rows)
            slope = None  # of the softcap
            if spec.softcap > 0:
                slope = 1 - (_finite_or_zero(s) / spec.softcap).square_()
            p = s.sub_(_load_rows(row_lse, q_rows)).exp_()
            kept = None if modified is None else modified.kept(part, p, q_rows, k_rows)
            dv_tile.baddbmm_((p if kept is None else p * kept).transpose(1, 2), do)
            dp = torch.bmm(do, v.transpose(1, 2))
            ds = (dp if kept is None else dp.mul_(kept)).sub_(_load_rows(row_term, q_rows)).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            if done is not None and done.graph.dscore is not None:
                done.inputs["grad"] = part.by_head(ds)
                by_head = torch.broadcast_to(done.value(done.graph.dscore), done.inputs["grad"].shape)
                add_gradients(done, by_head.shape, captured)
                ds = by_head.reshape(ds.shape)
            dk_tile.baddbmm_(ds.transpose(1, 2), q)
            partial = dq_view[:, q_rows.start : q_rows.stop].permute(0, 2, 3, 1, 4)
            partial.add_(torch.bmm(ds, k).view(partial.shape), alpha=spec.softmax_scale)
        _store_k(dk_view, k_rows, dk_tile.mul_(spec.softmax_scale))
        _store_k(dv_view, k_rows, dv_tile)
