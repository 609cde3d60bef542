"""From a specification to a launch: configuration, compiled kernels, outputs, workspaces, arguments."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ... import fallback, jit
from ...device import Chip
from ...fwd.arguments import fake_lengths, lengths, windows
from ...spec import AttentionInputs, AttentionSpec, Gradients
from ..arguments import LOG2_E, addressable, compile_key, fake_matrices, fake_rows, fake_sink
from .config import Config
from .tiles import BackwardTiles, tiles_for

DSINK_TERMS = 256  # of one block of rows: the threads of the statistics kernel


def describe(spec: AttentionSpec, chip: Chip) -> str:
    """The tile row and what follows from it, in one line."""
    tiles, cfg = tiles_for(spec, chip), configure(spec, chip, has_dlse=False)
    return (
        f"sm100 backward {tiles.name}: {cfg.tile_m} x {cfg.span}, {cfg.q_stages} Q and {cfg.do_stages} dO stages, "
        f"group {cfg.group}, exp2 polynomial {cfg.polynomial}/16 ({tiles.evidence})"
    )


def backward(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    chip: Chip,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    tiles: BackwardTiles | None = None,
) -> Gradients:
    """Gradients of q, k, v and the sink; `out`, `lse` are the forward's, `dout`, `dlse` the upstream gradients.

    `tiles` replaces the row of the table, for tuning.
    """
    q, k, v, out, dout = (addressable(x) for x in (inputs.q, inputs.k, inputs.v, out, dout))
    if q.numel() == 0 or k.numel() == 0:  # no row sees a key; a TMA map cannot be empty
        return fallback.backward(inputs, spec, chip, out, lse, dout, dlse)
    # Rows beyond seqused_k are no CTA's work.
    new = torch.zeros if spec.has_seqused_k else torch.empty
    dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cfg = configure(spec, chip, dlse is not None, tiles)
    blocks = _row_blocks(inputs, cfg.tile_m)
    rows, dq_rows = (
        torch.empty(spec.heads_q, blocks, *shape, dtype=torch.float32, device=q.device)
        for shape in ((2, cfg.tile_m), (cfg.tile_m * cfg.columns,))
    )
    turns = None
    if spec.deterministic:
        turns = torch.empty(spec.heads_q, blocks * cfg.ctas, dtype=torch.int32, device=q.device)
    dsink_rows = None
    if spec.has_sink:
        dsink_rows = torch.zeros(spec.heads_q, blocks, DSINK_TERMS, dtype=torch.float32, device=q.device)
    _launcher(spec, chip, dlse is not None, tiles)(
        q,
        k,
        v,
        out,
        dout,
        dq,
        dk,
        dv,
        lse,
        dlse,
        None if inputs.sink is None else inputs.sink.float(),
        *lengths(inputs),
        rows,
        dq_rows,
        turns,
        dsink_rows,
        spec.softmax_scale,
        (spec.softcap or spec.softmax_scale) * LOG2_E,
        spec.softmax_scale / spec.softcap if spec.softcap else 0.0,
        *windows(spec),
        inputs.max_seqlen_q,
        inputs.max_seqlen_k,
        inputs.batch,
    )
    dsink = None if dsink_rows is None else dsink_rows.sum(dim=(1, 2)).to(inputs.sink.dtype)
    return Gradients(dq, dk, dv, dsink)


def configure(spec: AttentionSpec, chip: Chip, has_dlse: bool, tiles: BackwardTiles | None = None) -> Config:
    """The compile-time side of a problem."""
    tiles = tiles or tiles_for(spec, chip)
    return Config(
        dtype=jit.dsl_dtype(spec.dtype),
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        group=spec.group,
        has_left=spec.window_left is not None,
        has_right=spec.window_right is not None,
        has_softcap=spec.softcap > 0,
        has_sink=spec.has_sink,
        has_dlse=has_dlse,
        varlen=spec.varlen,
        has_seqused_q=spec.has_seqused_q,
        has_seqused_k=spec.has_seqused_k,
        deterministic=spec.deterministic,
        ctas=tiles.ctas,
        polynomial=tiles.polynomial,
        smem_bytes=chip.smem_per_block,
    )


@functools.lru_cache(maxsize=1024)
def _launcher(spec: AttentionSpec, chip: Chip, has_dlse: bool, tiles: BackwardTiles | None) -> jit.Launcher:
    cfg = configure(spec, chip, has_dlse, tiles)
    return jit.compiled(compile_key("sm100.backward", cfg), functools.partial(build, cfg, chip), chip)


def build(cfg: Config, chip: Chip):
    """Compile the kernels of a configuration, without any tensor."""
    from cutlass import Float32, Int32

    from .kernel import backward

    tensors = (*fake_matrices(cfg, 8), fake_rows(cfg), fake_rows(cfg, cfg.has_dlse), fake_sink(cfg), *fake_lengths(cfg))
    rows = jit.fake_tensor(Float32, 4, contiguous=True)
    dq_rows = jit.fake_tensor(Float32, 3, contiguous=True)
    turns = jit.fake_tensor(Int32, 2, contiguous=True) if cfg.deterministic else None
    dsink_rows = jit.fake_tensor(Float32, 3, contiguous=True) if cfg.has_sink else None
    scalars = [Float32(0.0)] * 3 + [Int32(0)] * 5
    workspaces = (rows, dq_rows, turns, dsink_rows)
    return jit.compile_kernel(backward, *tensors, *workspaces, *scalars, cfg, jit.current_stream(), chip=chip)


def _row_blocks(inputs: AttentionInputs, tile_m: int) -> int:
    """Blocks of tile_m query rows, every sequence starting a new one; see `work.first_row_block`."""
    if inputs.varlen:
        return inputs.q.shape[0] // tile_m + inputs.batch
    return inputs.batch * -(-inputs.max_seqlen_q // tile_m)
