"""flash-attn-4: merged fixes, taken out again."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from examples.findings.edited_package import Edit, Removal
from fa4.oracle.cases import Judgement
from tests.emulator.public.flash_attn_4 import ROWS
from tests.emulator.public.rows import attention, by_formula, draw
from tests.emulator.recall.faults import Fault, Package, Problem

PACKAGE = Package("flash-attn-4", "4.0.0b36", "flash_attn.cute")
BLOCK = 128


def _of_blocks(q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor) -> Tensor:
    """(batch, rows, heads, dim). seen: blocks of keys for each block of rows."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    mask = seen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: q.shape[1], : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def _lists(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Number of the seen blocks of each row, and their indices, first."""
    return seen.sum(1).int(), torch.argsort((~seen).int(), dim=1, stable=True).int().contiguous()


def _block_sparse_backward(seed: int) -> list[Judgement]:
    """2 blocks of rows, 2 of keys, one of the four unseen."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    seen = torch.tensor([[True, False], [True, True]])
    shape = (1, 2 * BLOCK, 1, 128)
    q, k, v, upstream = draw(seed, shape, shape, shape, shape)

    def sparse(seen: Tensor) -> BlockSparseTensorsTorch:
        count, index = (x[None, None].cuda() for x in _lists(seen))
        none = torch.zeros_like(count), torch.zeros_like(index)
        return BlockSparseTensorsTorch(*none, count, index, block_size=(BLOCK, BLOCK))

    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = flash_attn_func(
        *leaves, block_sparse_tensors=sparse(seen), block_sparse_tensors_bwd=sparse(seen.T), return_lse=True
    )
    grads = torch.autograd.grad(out, leaves, upstream)

    def formula(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_of_blocks(*given, seen=seen), given, upstream)

    return by_formula(["dq", "dk", "dv"], grads, formula, *(x.detach() for x in (q, k, v)), upstream)


def _split_lengths(seed: int) -> list[Judgement]:
    """One sequence of 256 rows and 512 keys in 2 parts, every block seen."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import flash_attn_varlen_func

    rows, keys, tile = 256, 512, 256
    q, k, v = draw(seed, (rows, 1, 128), (keys, 1, 128), (keys, 1, 128))
    blocks, columns = rows // tile, keys // BLOCK
    count, index = (x.flatten()[None] for x in _lists(torch.ones(blocks, columns, dtype=torch.bool)))
    cumulated = [torch.tensor([0, n], dtype=torch.int32).cuda() for n in (rows, keys, blocks, blocks * columns)]
    sparse = BlockSparseTensorsTorch(
        torch.zeros_like(count).cuda(), torch.zeros_like(index).cuda(), count.cuda(), index.cuda(),
        cu_total_m_blocks=cumulated[2], cu_block_idx_offsets=cumulated[3], block_size=(tile, BLOCK),
    )  # fmt: skip
    out, _ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cumulated[0], cu_seqlens_k=cumulated[1], max_seqlen_q=rows, max_seqlen_k=keys,
        num_splits=2, block_sparse_tensors=sparse, return_lse=True,
    )  # fmt: skip
    whole = functools.partial(_of_blocks, seen=torch.ones(2, 4, dtype=torch.bool))
    return by_formula(["out"], [out[None]], whole, q[None], k[None], v[None])


def _sparse_latent(seed: int) -> list[Judgement]:
    """4 queries of 128 heads list 256 places, of which query i uses the first 128 + i; the others hold -1."""
    from flash_attn.cute.interface import flash_attn_func

    queries, keys, places = 4, 256, 256
    shapes = (1, queries, 128, 64), (1, keys, 1, 64), (1, keys, 1, 512), (1, queries, 128, 512)
    q, k, v, qv = draw(seed, *shapes)
    (upstream,) = draw(seed + 1, shapes[3])
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(keys, generator=rng)[:places] for _ in range(queries)])
    used = torch.arange(places) < 128 + torch.arange(queries)[:, None]
    leaves = [x.requires_grad_() for x in (q, k, v, qv)]
    listed = chosen.masked_fill(~used, -1)[None].int().cuda()
    out, _ = flash_attn_func(*leaves, gather_kv_indices=listed, pack_gqa=True, return_lse=True)
    grads = torch.autograd.grad(out, leaves, upstream)

    def attend(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> Tensor:
        keys, values = k[0, :, 0][chosen], v[0, :, 0][chosen]
        scores = torch.einsum("qhd,qnd->qhn", q[0], keys) + torch.einsum("qhd,qnd->qhn", qv[0], values)
        p = (scores * 576**-0.5).masked_fill(~used[:, None], -torch.inf).softmax(-1)
        return torch.einsum("qhn,qnd->qhd", p, values)[None]

    def formula(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = [x.clone().requires_grad_() for x in inputs[:4]]
        return torch.autograd.grad(attend(*given), given, inputs[4])

    return by_formula(["dq", "dk", "dv", "dqv"], grads, formula, *(x.detach() for x in (q, k, v, qv)), upstream)


def _one_tile(seed: int) -> list[Judgement]:
    """100 rows, for which the kernel keeps statistics of one tile, and lse."""
    from flash_attn.cute import flash_attn_func

    q, k, v = draw(seed, (1, 100, 1, 96), (1, 300, 1, 96), (1, 300, 1, 96))
    out, _ = flash_attn_func(q, k, v, return_lse=True)
    return by_formula(["out"], [out], functools.partial(attention, causal=False), q, k, v)


def _public(name: str) -> Callable[[int], list[Judgement]]:
    """A call of `tests.emulator.public`, on sm_100a."""
    (row,) = (row for row in ROWS if row.name == name and row.chip == "sm_100a")
    return lambda seed: list(row.run(seed))


SPARSE_90 = Problem(PACKAGE, "block-sparse backward", "sm_90a", _block_sparse_backward)
SPLIT = Problem(PACKAGE, "block-sparse forward of lengths in parts", "sm_100a", _split_lengths)
LATENT = Problem(PACKAGE, "sparse latent backward", "sm_100a", _sparse_latent)
ONE_TILE = Problem(PACKAGE, "forward of one tile of rows", "sm_100a", _one_tile)
FORWARD = Problem(PACKAGE, "forward", "sm_100a", _public("forward, causal d128"), leftovers=True)
BACKWARD = Problem(PACKAGE, "backward", "sm_100a", _public("backward, causal d128"))
BACKWARD_FREED = Problem(PACKAGE, "backward, leftovers", "sm_100a", BACKWARD.run, leftovers=True)
_FORWARD, _BACKWARD = "flash_fwd_sm100.py", "flash_bwd_sm100.py"

FAULTS: tuple[Fault, ...] = (
    Fault("packed number of parts", SPLIT, "#2761", "warps of loads and products do not unpack the index of the part",
          (Removal(_FORWARD, "split_idx", (1711, 1712, 1872, 1873)),)),
    Fault("wait for the grid before", SPARSE_90, "#2756", "no wait until the grid before has ended",
          (Removal("block_sparse_utils.py", "griddepcontrol_wait", (1649,)),)),
    Fault("dV at -1", LATENT, "#2755", "dV of a place that holds -1 is added before the tensor",
          (Edit("flash_bwd_mla_sm100.py", "(gmem_n_idx >= 0) &", "(gmem_n_idx >= -1) &", 2),)),
    Fault("dK at -1", LATENT, "#2755", "dK of a place that holds -1 is added before the tensor",
          (Edit("flash_bwd_mla_dk_sm100.py", "if seqlen_k_idx_in_batch >= 0:", "if seqlen_k_idx_in_batch >= -1:"),)),
    Fault("maxima past the buffer", ONE_TILE, "#2229", "row maxima are kept as if there were two tiles of rows",
          (Edit(_FORWARD, "+ self.s_p_o_stage * self.m_block_size", "+ 2 * self.m_block_size", 2),)),
    Fault("forward, tensor memory freed", FORWARD, "dd8a2729", "tensor memory is freed in use",
          (Removal(_FORWARD, "arrive_and_wait", (1371,)),)),
    Fault("backward, tensor memory freed", BACKWARD_FREED, "dd8a2729", "tensor memory is freed in use",
          (Removal(_BACKWARD, "arrive_and_wait", (1819,)),)),
    Fault("LSE proxy fence", BACKWARD, "d91ea94f", "LSE is given back for a bulk load without a proxy fence",
          (Removal(_BACKWARD, "fence_view_async_shared", (3687,)),)),
    Fault("dP read by all warps", BACKWARD, "#2033", "dS is stored over dP that other warps have not read",
          (Removal(_BACKWARD, "arrive_and_wait", (3723,), "cute.arch.sync_warp()"),)),
)  # fmt: skip
