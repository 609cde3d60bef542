"""Warp-specialised kernels: set-up and end around the roles, the context of a role's body, and the launch."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..core.constant import Constant
from ..core.program import Program
from ..core.variant import Variant
from ..runtime import jit
from ..runtime.device import Chip
from .channels import ChannelTable, init_barriers
from .ends import Ends
from .run_roles import run_roles
from .smem import SmemMap
from .tma import TmaMap, TmaTile


class Resources(Constant):
    """Resources of a chip's kernels beside registers and shared memory, e.g. tensor memory. This base class: none."""

    __slots__ = ()

    def acquire(self, smem: SmemMap) -> None:
        """Called by all threads, before the first barrier of the CTA."""

    def release(self, smem: SmemMap) -> None:
        """Called by all threads, after the last barrier of the CTA."""


NOTHING = Resources()


@dataclass(frozen=True, slots=True)
class Context(Constant):
    """Arguments of a role's body: run-time arguments, configuration, channels, shared memory and chip resources. A
    kernel extends it by the types of its arguments and its configuration.

    args: the run-time arguments, among them `maps`, a `TmaMap` by name. cluster: CTAs that start and end together,
    because they access each other's shared memory.
    """

    args: Any
    cfg: Variant
    channels: ChannelTable
    smem: SmemMap
    resources: Resources = NOTHING
    cluster: int = 1

    def ends(self, role: str) -> Ends:
        """The channels as `role` sees them."""
        return Ends(self.channels, role, self.smem.pointer("barriers", Int64))

    def tma(self, name: str) -> TmaTile:
        """The TMA tile of matrix `args.maps.<name>`: tiles of `cfg.<name>_tile`, loaded by `cfg.sharers(name)` CTAs."""
        of_matrix: TmaMap = getattr(self.args.maps, name)
        return TmaTile(*of_matrix, getattr(self.cfg, f"{name}_tile"), self.cfg.sharers(name))


Config = TypeVar("Config", bound=Variant)


class Overlap(enum.Enum):
    """Overlap of a kernel with its neighbours in the stream, by programmatic dependent launch."""

    NOTHING = "starts when the previous kernel has ended"
    SET_UP = "its set-up overlaps the end of the previous kernel; then the set-up of the next kernel may start"
    ROLES = "the next kernel may start at once; roles wait where they need results of the previous kernel"


@dataclass(frozen=True, slots=True, repr=False)
class RoleKernel(Program[Config]):
    """A kernel of warp roles: its tables, as functions of its configuration. `name` is also a prefix of its PTX entry.

    context: builds the roles' `Context` from (arguments, configuration, channels, shared memory). clusters: launch in
    clusters of `cfg.ctas` even if that is 1. is_cutlass: keep the DSL's "cutlass" in the entry name. ptxas (CUDA 12.9
    to 13.5) schedules differently with it: the forward's exponentials in a warp are 10 cycles apart instead of the
    special-function unit's 8, but its mma loop has 149 instructions per key block instead of 216.
    """

    channels: Callable[[Config], ChannelTable]
    smem: Callable[[Config, ChannelTable], SmemMap]
    context: Callable[[Any, Config, ChannelTable, SmemMap], Context] = Context
    clusters: bool = False
    overlap: Overlap = Overlap.SET_UP
    is_cutlass: bool = True

    def entry_name(self, cfg: Config) -> str:
        """Return the PTX entry name, for profiles and reports, and register it for `describe`. It ends with a digest of
        the configuration."""
        table, digest = self.channels(cfg), hashlib.sha256(repr(cfg).encode()).hexdigest()[:8]
        entry = f"fa4_{self.name.replace('.', '_')}_{digest}"
        _described[entry] = Description.of(table, self.smem(cfg, table))
        return entry

    def launcher(self, cfg: Config, chip: Chip) -> jit.Launcher:
        if chip.emulated:
            self.entry_name(cfg)  # registers roles and barriers for reports, also if the kernel comes from disk
        return Program.launcher(self, cfg, chip)

    def start(self, args: Any, cfg: Config, ctas: Int32, stream: Any) -> None:
        """Inside a `cute.jit` host function: launch `ctas` CTAs."""
        table = self.channels(cfg)
        kernel.set_name_prefix(self.entry_name(cfg), keep_mangled_name=False, remove_cutlass_symbol=not self.is_cutlass)
        kernel(args, cfg, self).launch(
            grid=(ctas, 1, 1),
            block=(table.roles.threads, 1, 1),
            cluster=(cfg.ctas, 1, 1) if self.clusters or cfg.ctas > 1 else None,
            smem=self.smem(cfg, table).nbytes,
            min_blocks_per_mp=table.roles.per_sm,
            preferred_smem_carveout=100 if table.roles.per_sm > 1 else None,  # else the DSL queries a driver
            use_pdl=self.overlap is not Overlap.NOTHING,
            stream=stream,
        )


@cute.kernel
def kernel(args, cfg: cutlass.Constexpr, design: cutlass.Constexpr[RoleKernel]):
    table = design.channels(cfg)
    run(design.context(args, cfg, table, design.smem(cfg, table)), design.overlap)


@cute.jit
def run(context: cutlass.Constexpr[Context], overlap: cutlass.Constexpr[Overlap] = Overlap.NOTHING):
    """Body of a kernel: set up barriers, run each warp's role, wait for all warps."""
    if const_expr(overlap is Overlap.ROLES):
        cute.arch.griddepcontrol_launch_dependents()
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            init_barriers(context.channels, context.smem.pointer("barriers", Int64))
    context.resources.acquire(context.smem)
    if const_expr(overlap is Overlap.SET_UP):
        # No result of an earlier kernel is accessed above this line. The next kernel may run its set-up from here on.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    sync_all(context.cluster)
    run_roles(context.channels.roles, context)
    # Wait until all readers of the resources are done and, in a cluster, no CTA accesses another CTA.
    if const_expr(context.cluster > 1 or context.resources is not NOTHING):
        sync_all(context.cluster)
    context.resources.release(context.smem)


def sync_all(cluster: int) -> None:
    """Sync all threads of the CTA, or of all CTAs of the cluster."""
    if cluster > 1:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


@dataclass(frozen=True, slots=True)
class Description:
    """Roles, barriers and regions of a compiled kernel, for reports about its runs.

    roles: warp of a CTA -> role name. barriers: byte offset in dynamic shared memory -> mbarrier name. regions: name ->
    (first byte, end) in dynamic shared memory.
    """

    roles: dict[int, str]
    barriers: dict[int, str]
    regions: dict[str, tuple[int, int]]

    @staticmethod
    def of(table: ChannelTable, smem: SmemMap) -> Description:
        roles = {warp: role.name for role in table.roles.roles for warp in range(*role.warps)}
        first = smem.offsets["barriers"]
        barriers = {first + 8 * i: name for i, name in enumerate(table.barrier_names())}
        return Description(roles, barriers, smem.regions)


_described: dict[str, Description] = {}


def describe(entry: str) -> Description | None:
    """Return the description of PTX entry `entry`, or None if `RoleKernel.entry_name` was not called for it."""
    return _described.get(re.sub(r"(_cutlass)?_\d+$", "", entry))
