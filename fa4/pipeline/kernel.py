"""What every warp-specialised kernel does around its roles, what a role's body gets, and how it is launched."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..core.constant import Constant
from ..core.program import Program
from ..device import Chip
from .channels import ChannelTable, init_barriers
from .ends import Ends
from .roles import run_roles
from .smem import SmemMap
from .tma import TmaTile


class Resources(Constant):
    """What a chip's kernels own beside registers and shared memory, tensor memory for one. This one: nothing."""

    __slots__ = ()

    def acquire(self, smem: SmemMap) -> None:
        """All threads, before the first barrier of the CTA."""

    def release(self, smem: SmemMap) -> None:
        """All threads, after the last."""


NOTHING = Resources()


@dataclass(frozen=True, slots=True)
class Context(Constant):
    """What a role's body gets: the run-time arguments, the configuration and the maps.

    `cluster`: CTAs that start and end together, because they reach into each other's shared memory.
    """

    args: Any
    cfg: Any
    channels: ChannelTable
    smem: SmemMap
    resources: Resources = NOTHING
    cluster: int = 1

    def ends(self, role: str) -> Ends:
        """The channels as `role` sees them."""
        return Ends(self.channels, role, self.smem.pointer("barriers", Int64))

    def tma(self, name: str) -> TmaTile:
        """How the matrix `args.maps.<name>` is copied: in tiles of `cfg.<name>_tile`, by `cfg.sharers(name)` CTAs."""
        tile = getattr(self.cfg, f"{name}_tile")
        return TmaTile(*getattr(self.args.maps, name), tile, self.cfg.sharers(name))


class Overlap(enum.Enum):
    """What a kernel does beside its neighbours in the stream, by programmatic dependent launch."""

    NOTHING = "it begins when the one before has ended"
    SET_UP = "its set-up runs beside the end of the kernel before, and the set-up of the one after may begin then"
    ROLES = "the kernel after may begin at once, and roles wait themselves where they need the one before"


@dataclass(frozen=True, slots=True, repr=False)
class RoleKernel(Program):
    """A kernel of warp roles: its tables, as functions of its configuration. `name` also begins its PTX entry.

    context: makes what roles get of (arguments, configuration, channels, shared memory). clusters: CTAs are launched in
    clusters of `cfg.ctas` also where that is 1. is_cutlass: the entry's name keeps the DSL's "cutlass", by which ptxas
    chooses how to schedule (seen with those of CUDA 12.9 to 13.5): with it the forward's exponentials are 10 cycles
    apart in a warp instead of the special-function unit's 8, but its mma loop of a key block has 149 instructions
    instead of 216.
    """

    channels: Callable[[Any], ChannelTable]
    smem: Callable[[Any, ChannelTable], SmemMap]
    context: Callable[[Any, Any, ChannelTable, SmemMap], Context] = Context
    clusters: bool = False
    overlap: Overlap = Overlap.SET_UP
    is_cutlass: bool = True

    def entry_name(self, cfg: Any) -> str:
        """What the kernel is called in profiles and reports; afterwards `describe` knows it."""
        table = self.channels(cfg)
        return entry_name(f"fa4_{self.name.replace('.', '_')}", cfg, table, self.smem(cfg, table))

    def launcher(self, cfg: Any, chip: Chip):
        if chip.emulated:
            self.entry_name(cfg)  # reports name its roles and barriers, also when the kernel comes from the disk
        return Program.launcher(self, cfg, chip)

    def start(self, args: Any, cfg: Any, ctas: Int32, stream: Any) -> None:
        """Inside a `cute.jit` host function: launch `ctas` CTAs."""
        table = self.channels(cfg)
        set_entry_name(kernel, self.entry_name(cfg), self.is_cutlass)
        kernel(args, cfg, self).launch(
            grid=(ctas, 1, 1),
            block=(table.roles.threads, 1, 1),
            cluster=(cfg.ctas, 1, 1) if self.clusters or cfg.ctas > 1 else None,
            smem=self.smem(cfg, table).nbytes,
            min_blocks_per_mp=table.roles.per_sm,
            preferred_smem_carveout=100 if table.roles.per_sm > 1 else None,  # else the DSL asks a driver what fits
            use_pdl=self.overlap is not Overlap.NOTHING,
            stream=stream,
        )


@cute.kernel
def kernel(args, cfg: cutlass.Constexpr, design: cutlass.Constexpr[RoleKernel]):
    table = design.channels(cfg)
    run(design.context(args, cfg, table, design.smem(cfg, table)), design.overlap)


@cute.jit
def run(context: cutlass.Constexpr[Context], overlap: cutlass.Constexpr[Overlap] = Overlap.NOTHING):
    """The body of a kernel: set barriers up, run every warp's role, wait for all."""
    if cutlass.const_expr(overlap is Overlap.ROLES):
        cute.arch.griddepcontrol_launch_dependents()
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            init_barriers(context.channels, context.smem.pointer("barriers", Int64))
    context.resources.acquire(context.smem)
    if cutlass.const_expr(overlap is Overlap.SET_UP):
        # Up to here nothing of an earlier kernel's was touched; from here on the next one may do as much.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    sync_all(context.cluster)
    run_roles(context.channels.roles, context)
    # Every reader of what `release` gives back is done, and in a cluster nobody reaches into another CTA any more.
    if cutlass.const_expr(context.cluster > 1 or context.resources is not NOTHING):
        sync_all(context.cluster)
    context.resources.release(context.smem)


def sync_all(cluster: int) -> None:
    """All threads of the CTA, or of all CTAs of the cluster."""
    if cluster > 1:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


@dataclass(frozen=True, slots=True)
class Description:
    """What the tables say about a compiled kernel, for reports about its runs.

    roles: warp of a CTA -> its role. barriers: byte in dynamic shared memory -> name of the mbarrier there. regions:
    name -> (first byte, end) in dynamic shared memory.
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
    """What is known about the kernel with the PTX entry `entry`, if `entry_name` was asked for its name."""
    return _described.get(re.sub(r"(_cutlass)?_\d+$", "", entry))


def entry_name(name: str, cfg: Any, table: ChannelTable, smem: SmemMap) -> str:
    """What the entry of a kernel is called, for profilers and for `describe`: `name` and a digest of its
    configuration."""
    entry = f"{name}_{hashlib.sha256(repr(cfg).encode()).hexdigest()[:8]}"
    _described[entry] = Description.of(table, smem)
    return entry


def set_entry_name(kernel: Any, entry: str, is_cutlass: bool = True) -> None:
    """Before a launch is traced: let the kernel's entry begin with `entry`; is_cutlass: and have "cutlass" in it."""
    kernel.set_name_prefix(entry, keep_mangled_name=False, remove_cutlass_symbol=not is_cutlass)
