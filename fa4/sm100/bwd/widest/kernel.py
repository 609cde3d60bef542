"""The Blackwell backward of head dims above 256: roles, channels and memory of its three kernels. Read `config` first.

The steps are those of `wide`. All right operands come through one ring, in the order of the products.
"""

from __future__ import annotations

from ....bwd.launch import BackwardKernelArguments
from ....pipeline import kernel as kernels
from ....pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, ClusterSharing, Implied
from ....pipeline.smem import Region, SmemMap
from ... import tmem
from ...signals import SIGNALS
from ...stages import PAIR, STAGE_BYTES
from ..config import ROW_STAGES
from ..wide.kernel import WideBackward, role_table
from .config import Sm100WidestConfig
from .context import Sm100WidestContext
from .load import load
from .mma import mma

ROLES = role_table(mma, load)


def tmem_map(cfg: Sm100WidestConfig) -> tmem.TmemMap:
    """TMEM map: S (two of dV), dP of dK and dQ, and the gradient D, of 64 rows in 128 lanes."""
    ranges = dict(S=tmem.cols(0, cfg.stages * cfg.lane_columns))
    if cfg.gradient.needs_dp:
        ranges.update(dP=tmem.cols(cfg.lane_columns, cfg.lane_columns))
    return tmem.TmemMap(**ranges, D=tmem.cols(2 * cfg.lane_columns, cfg.grad_columns))


def channels(cfg: Sm100WidestConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. A pair shares all but the row statistics."""

    def shared(name, producer, consumer, filled, freed, stages, carries) -> Channel:
        return Channel(name, producer, consumer, filled, freed, stages, carries, PAIR, ClusterSharing.PAIR)

    smem, both = Carries.ASYNC_SMEM, Carries.ASYNC_SMEM | Carries.TMEM
    # Implied: P has been read when S is full again, dS when dP is, because the matrix unit works in order.
    weights_read = Implied("mma_compute_dP" if cfg.gradient.needs_dp else "mma_compute_S")
    scores_free = By.WARP if cfg.gradient.needs_dp else Implied("compute_mma_weights")
    dp: tuple[Channel, ...] = ()
    if cfg.gradient.needs_dp:
        dp = (
            shared("load_mma_leftdP", "load", "mma", By.TMA, ONCE, 1, smem),
            shared("mma_compute_dP", "mma", "compute", By.UMMA, Implied("compute_mma_weights"), 1, Carries.TMEM),
        )
    rows: tuple[Channel, ...] = ()
    if cfg.gradient.owns_keys:
        rows = (Channel("load_compute_rows", "load", "compute", By.TMA, By.WARP, ROW_STAGES, Carries.SMEM),)
    return ChannelTable(
        (
            shared("load_mma_leftS", "load", "mma", By.TMA, ONCE, 1, smem),
            shared("load_mma_right", "load", "mma", By.TMA, By.UMMA, cfg.ring_stages, smem),
            *dp,
            *rows,
            shared("mma_compute_S", "mma", "compute", By.UMMA, scores_free, cfg.stages, Carries.TMEM),
            shared("compute_mma_weights", "compute", "mma", By.WARP, weights_read, cfg.stages, both),
            shared("mma_compute_D", "mma", "compute", By.UMMA, ONCE, 1, Carries.TMEM),
        ),
        ROLES,
        SIGNALS,
    )


def smem_map(cfg: Sm100WidestConfig, table: ChannelTable) -> SmemMap:
    dp = (Region("leftdP", cfg.left_dp_bytes, align=1024),) if cfg.gradient.needs_dp else ()
    rows = (Region("rows", ROW_STAGES * cfg.rows_bytes, align=128),) if cfg.gradient.owns_keys else ()
    return SmemMap(
        Region("leftS", cfg.left_bytes, align=1024),
        *dp,
        Region("right", cfg.ring_stages * STAGE_BYTES, align=1024),
        Region("weights", cfg.stages * cfg.weights_tile.nbytes, align=1024),
        *rows,
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
    )


def context(
    args: BackwardKernelArguments, cfg: Sm100WidestConfig, table: ChannelTable, smem: SmemMap
) -> Sm100WidestContext:
    memory = tmem.TensorMemory(ROLES["mma"].warps[0], PAIR)
    return Sm100WidestContext(args, cfg, table, smem, memory, PAIR, tmem_map(cfg))


KERNEL = WideBackward("sm100.bwd.widest", channels, smem_map, context, clusters=True, overlap=kernels.Overlap.NOTHING)
