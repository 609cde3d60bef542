"""Forward of lists of latents by up to 64 heads: roles, channels and memory. Read this file first.

Each query has a list of rows of K, whose first columns are V. A CTA has up to 64 query heads of a list, and iterates
over blocks of 64 listed keys. S = Q K^T has heads as rows, so that a row's maximum is found within a warp. O^T += V^T
P^T has columns of V as rows, 128 in a product, and heads as columns: heads as rows would fill half of 128 rows, and a
product of 64 rows takes the time of 128. Both products read the same stages of the ring, so each listed row is loaded
once.

Most of Q is the left operand in tensor memory, so that products of S read less of shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....core.arguments import ALIGNMENT
from ....core.sequence import align_strides, as_matrices
from ....pipeline import kernel as kernels
from ....pipeline.channels import ONCE, By, Carries, Channel, ChannelTable
from ....pipeline.roles import Role, RoleTable
from ....pipeline.smem import Region, SmemMap
from ....pipeline.tma import TmaMap, TmaTile
from ....runtime import jit
from ... import tmem
from ...signals import SIGNALS
from ...stages import STAGE_BYTES
from ..maps import list_rows
from .config import HEADS, KEYS, KEYS_PANEL, P_TILE, WORD_COLUMNS, Sm100ListsForwardConfig
from .context import ListsForwardContext
from .load import load
from .mma import mma
from .softmax import FACTORS_BYTES, softmax


class ListsForwardTensors(NamedTuple):
    """q, out: (tokens, query heads of a part, parts, columns), see `bwd.lists.SparseTensors`. k: (rows, key/value heads
    of a list, columns). lse: (tokens, query heads) float32. rows, count: lists as there."""

    q: cute.Tensor
    out: cute.Tensor
    k: cute.Tensor
    lse: cute.Tensor
    rows: cute.Tensor
    count: cute.Tensor


class Maps(NamedTuple):
    q: TmaMap
    k: TmaMap


class ListsForwardArguments(NamedTuple):
    """Run-time arguments of the kernel. scale_log2: softmax_scale times log2(e)."""

    tensors: ListsForwardTensors
    scale_log2: Float32
    maps: Maps


ROLES = RoleTable(
    (
        Role("softmax", warps=(0, 4), regs=232, body=softmax),
        Role("mma", warps=(4, 5), regs=160, body=mma),
        Role("load", warps=(5, 6), regs=160, body=load),
    )
)


def tmem_map(cfg: Sm100ListsForwardConfig) -> tmem.TmemMap:
    """TMEM map: panels of Q, S, O."""
    q = cfg.q_panels_in_tmem * WORD_COLUMNS
    return tmem.TmemMap(Q=tmem.cols(0, q), S=tmem.cols(q, KEYS), O=tmem.cols(q + KEYS, cfg.o_tiles * HEADS))


def channels(cfg: Sm100ListsForwardConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>."""
    smem, tensor, both = Carries.ASYNC_SMEM, Carries.TMEM, Carries.ASYNC_SMEM | Carries.TMEM
    in_smem = (Channel("load_mma_Q", "load", "mma", By.TMA, ONCE, 1, smem),) if cfg.q_panels_in_smem else ()
    return ChannelTable(
        (
            *in_smem,
            Channel("softmax_mma_Q", "softmax", "mma", By.WARP, ONCE, 1, tensor),
            Channel("load_mma_K", "load", "mma", By.TMA, By.UMMA, cfg.ring_stages, smem),
            Channel("mma_softmax_S", "mma", "softmax", By.UMMA, By.WARP, 1, tensor),
            # Full means also: O is rescaled. Free means also: O has the product with this P.
            Channel("softmax_mma_P", "softmax", "mma", By.WARP, By.UMMA, 1, both),
        ),
        ROLES,
        SIGNALS,
    )


def smem_map(cfg: Sm100ListsForwardConfig, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("Q", cfg.q_panels_in_smem * KEYS_PANEL.nbytes, align=1024),
        Region("P", P_TILE.nbytes, align=1024),
        Region("K", cfg.ring_stages * STAGE_BYTES, align=1024),
        Region("factors", FACTORS_BYTES),
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
    )


def context(
    args: ListsForwardArguments, cfg: Sm100ListsForwardConfig, table: ChannelTable, smem: SmemMap
) -> ListsForwardContext:
    memory = tmem.TensorMemory(ROLES["mma"].warps[0])
    return ListsForwardContext(args, cfg, table, smem, memory, 1, tmem_map(cfg))


@dataclass(frozen=True, slots=True, repr=False)
class Sm100ListsForward(kernels.RoleKernel[Sm100ListsForwardConfig]):
    """The kernel and its launch."""

    @cute.jit
    def launch(self, tensors: ListsForwardTensors, scale_log2: Float32, cfg: cutlass.Constexpr, stream: Any) -> None:
        """Write tensors.out and lse."""
        tokens, parts = cute.size(tensors.q, mode=[0]), cute.size(tensors.q, mode=[2])
        tensors = tensors._replace(q=as_matrices(tensors.q), out=as_matrices(tensors.out), k=align_strides(tensors.k))
        q, k = TmaTile.load(tensors.q, cfg.q_tile).map, TmaTile.load(list_rows(tensors.k), cfg.k_tile).map
        args = ListsForwardArguments(tensors, scale_log2, Maps(q, k))
        self.start(args, cfg, Int32(tokens * parts * cfg.row_tiles), stream)

    def fake_args(self, cfg: Sm100ListsForwardConfig) -> tuple:
        q, out = (jit.fake_tensor(cfg.dtype, 4, align=ALIGNMENT) for _ in range(2))
        k = jit.fake_tensor(cfg.dtype, 3, align=ALIGNMENT)
        lse, rows, count = (
            jit.fake_tensor(Float32, 2, align=4),
            jit.fake_tensor(Int32, 3, align=4),
            jit.fake_tensor(Int32, 2, align=4),
        )
        return ListsForwardTensors(q, out, k, lse, rows, count), Float32(0)


KERNEL = Sm100ListsForward("sm100.lists_forward", channels, smem_map, context, overlap=kernels.Overlap.NOTHING)
