"""Who hands what to whom: producer/consumer channels as data, arrival counts derived from the role table.

A channel is a ring of stages, each with two mbarriers: `full` (the producer has filled the stage) and `free` (the
consumers have let go of it). A role sees only its own ends (`ChannelTable.ends`), and an operation that does not
belong to that end, or to the channel's mechanism, is refused while the kernel is traced.

Fences follow from what a channel carries:
  TMEM         tcgen05.fence before an arrival and after a wait
  ASYNC_SMEM   fence.proxy.async before an arrival: written by threads, read by TMA or MMA (or the other way round)
  SMEM         none: mbarrier arrivals release and waits acquire
A payload in two memories (dS: tensor memory for one product, shared memory for another) takes the fences of both.

In a pair of CTAs (`Channel.ctas` = 2) one of them, the leader, issues the matrix operations of both. What it waits for
is counted on its barriers: the bytes and the warps of both CTAs. What it signals by tcgen05.commit it signals to both.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32
from cutlass._mlir.dialects import nvvm

from .constant import Constant
from .mma import cta_group
from .roles import RoleTable

LEADER = 0  # of a pair of CTAs: its rank in the cluster


class By(enum.Enum):
    """What completes a barrier's phase."""

    TMA = "the byte count of bulk copies"
    UMMA = "a tcgen05.commit"
    WARP = "one elected lane of each warp"
    READ = "one elected lane, whose bulk copies have read the stage"


class Carries(enum.Enum):
    """The memory through which the payload goes; decides the fences."""

    TMEM = enum.auto()
    ASYNC_SMEM = enum.auto()
    SMEM = enum.auto()
    TMEM_AND_ASYNC_SMEM = enum.auto()

    @property
    def tmem(self) -> bool:
        return self in (Carries.TMEM, Carries.TMEM_AND_ASYNC_SMEM)

    @property
    def async_smem(self) -> bool:
        return self in (Carries.ASYNC_SMEM, Carries.TMEM_AND_ASYNC_SMEM)


@dataclass(frozen=True, slots=True)
class Channel:
    """`producer` fills `stages` stages, `consumer` (one role or several) empties them.

    `freed` says what completes a stage's free barrier; None means there is no such barrier, because another channel
    already implies the release (say which in a comment beside the row). `ctas` = 2: the channel of a pair of CTAs.
    """

    name: str
    producer: str | tuple[str, ...]
    consumer: str | tuple[str, ...]
    filled: By
    freed: By | None
    stages: int
    carries: Carries
    ctas: int = 1

    @property
    def producers(self) -> tuple[str, ...]:
        return (self.producer,) if isinstance(self.producer, str) else self.producer

    @property
    def consumers(self) -> tuple[str, ...]:
        return (self.consumer,) if isinstance(self.consumer, str) else self.consumer

    @property
    def barriers(self) -> int:
        return self.stages * (1 if self.freed is None else 2)


@dataclass(frozen=True, slots=True)
class ChannelTable(Constant):
    """All channels of a kernel, their mbarriers laid out in one block of shared memory, 8 bytes each.

    Raises:
        ValueError: two channels share a name, a channel names an unknown role or has no stage.
    """

    channels: tuple[Channel, ...]
    roles: RoleTable

    def __post_init__(self) -> None:
        names = [channel.name for channel in self.channels]
        if len(set(names)) != len(names):
            raise ValueError(f"two channels share a name: {', '.join(names)}")
        for channel in self.channels:
            if channel.stages < 1:
                raise ValueError(f"channel {channel.name} has {channel.stages} stages, expected at least 1")
            for role in channel.producers + channel.consumers:
                self.roles[role]

    @property
    def nbytes(self) -> int:
        return 8 * sum(channel.barriers for channel in self.channels)

    def offset(self, channel: Channel) -> int:
        """Index of the channel's first mbarrier: `stages` full ones, then as many free ones if it has any."""
        index = self.channels.index(channel)
        return sum(before.barriers for before in self.channels[:index])

    def arrivals(self, by: By, roles: tuple[str, ...], ctas: int = 1) -> int:
        """Arrivals that complete one phase of a barrier."""
        return ctas * sum(self.roles[role].team_warps for role in roles) if by is By.WARP else 1

    def barrier_names(self) -> tuple[str, ...]:
        """A name for every mbarrier in order, for reports: `load_mma_KV.full[0]`."""
        names = []
        for channel in self.channels:
            names += [f"{channel.name}.full[{stage}]" for stage in range(channel.stages)]
            if channel.freed is not None:
                names += [f"{channel.name}.free[{stage}]" for stage in range(channel.stages)]
        return tuple(names)

    def ends(self, role: str, barriers: cute.Pointer) -> Ends:
        """The channels as `role` sees them, over mbarriers at `barriers` (a shared-memory Int64 pointer)."""
        self.roles[role]
        return Ends(self, role, barriers)


@cute.jit
def init_barriers(table: cutlass.Constexpr[ChannelTable], barriers: cute.Pointer):
    """Initialise every mbarrier; one thread. The caller then syncs the CTA (or cluster) before the first use."""
    for channel in cutlass.const_expr(table.channels):
        full = barriers + table.offset(channel)
        for stage in cutlass.range_constexpr(channel.stages):
            cute.arch.mbarrier_init(full + stage, table.arrivals(channel.filled, channel.producers, channel.ctas))
            if cutlass.const_expr(channel.freed is not None):
                free = full + channel.stages + stage
                cute.arch.mbarrier_init(free, table.arrivals(channel.freed, channel.consumers, channel.ctas))
    cute.arch.mbarrier_init_fence()


class Ends(Constant):
    """A role's ends of the channels; `ends.mma_softmax_S` is an `End`."""

    def __init__(self, table: ChannelTable, role: str, barriers: cute.Pointer):
        for channel in table.channels:
            if role in channel.producers + channel.consumers:
                full = barriers + table.offset(channel)
                setattr(self, channel.name, End(channel, role, full))


class End(Constant):
    """One role's end of one channel. `stage` may be a compile-time int or an Int32; phases are Int32 parities.

    The first wait of a consumer on `full` has parity 0; the first wait of a producer on `free` has parity 1, which
    succeeds at once because a new barrier counts as having completed the phase before its first.
    """

    def __init__(self, channel: Channel, role: str, full: cute.Pointer):
        self.channel, self.role, self._full = channel, role, full

    def full(self, stage) -> cute.Pointer:
        return self._full + stage

    def free(self, stage) -> cute.Pointer:
        self._require(self.channel.freed is not None, "free barriers")
        return self._full + self.channel.stages + stage

    def wait_full(self, stage, phase) -> None:
        """Consumer: block until the stage is full."""
        self._require(self.role in self.channel.consumers, "a consumer")
        self._wait(self.full(stage), phase, self.channel.filled)

    def wait_free(self, stage, phase) -> None:
        """Producer: block until the stage is free."""
        self._require(self.role in self.channel.producers, "a producer")
        self._wait(self.free(stage), phase, self.channel.freed)

    def expect(self, stage, nbytes) -> None:
        """Producer by TMA, whole warp (in a pair, the leader's): announce `nbytes` of copies, by each CTA, that will
        signal `full(stage)`."""
        self._require(self.role in self.channel.producers and self.channel.filled is By.TMA, "a producer by TMA")
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(stage), nbytes * self.channel.ctas)

    def hand_over(self, stage) -> None:
        """Producer by TMA, whole warp: signal full by hand, the copies having been awaited (and edited) elsewhere."""
        self._require(self.role in self.channel.producers and self.channel.filled is By.TMA, "a producer by TMA")
        self._arrive(self.full(stage))

    def commit_full(self, stage) -> None:
        """Producer by UMMA, one thread: signal full when the matrix operations issued so far are done."""
        self._require(self.role in self.channel.producers and self.channel.filled is By.UMMA, "a producer by UMMA")
        commit(self.full(stage), self.channel.ctas)

    def commit_free(self, stage) -> None:
        """Consumer by UMMA, one thread: signal free when the matrix operations issued so far are done."""
        self._require(self.role in self.channel.consumers and self.channel.freed is By.UMMA, "a consumer by UMMA")
        commit(self.free(stage), self.channel.ctas)

    def arrive_full(self, stage) -> None:
        """Producer by WARP, whole warp: this warp's part of the stage is written."""
        self._require(self.role in self.channel.producers and self.channel.filled is By.WARP, "a producer by warps")
        self._arrive(self.full(stage))

    def arrive_free(self, stage) -> None:
        """Consumer by WARP, whole warp: this warp no longer needs the stage."""
        self._require(self.role in self.channel.consumers and self.channel.freed is By.WARP, "a consumer by warps")
        self._arrive(self.free(stage))

    def arrive_read(self, stage) -> None:
        """Consumer by READ, whole warp: the bulk copies that the elected lane issued have been awaited by it. Nothing
        else of the warp has touched the stage, so there is nothing to fence or to gather from other lanes."""
        self._require(self.role in self.channel.consumers and self.channel.freed is By.READ, "a consumer by copies")
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.free(stage))

    def _arrive(self, barrier: cute.Pointer) -> None:
        if self.channel.carries.tmem:
            nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)
        is_pair = self.channel.ctas == 2
        if self.channel.carries.async_smem:
            cute.arch.fence_proxy("async.shared", space="cluster" if is_pair else "cta")
        if self.channel.carries is not Carries.TMEM:
            cute.arch.sync_warp()  # the elected lane's arrival releases what every lane wrote
        with cute.arch.elect_one():
            if is_pair:
                cute.arch.mbarrier_arrive(barrier, LEADER, scope=nvvm.MemScopeKind.CLUSTER)
            else:
                cute.arch.mbarrier_arrive(barrier)

    def _wait(self, barrier: cute.Pointer, phase, by: By | None) -> None:
        if self.channel.ctas == 2 and by is By.WARP:
            wait_for_cluster(barrier, phase)
        else:
            cute.arch.mbarrier_wait(barrier, phase)
        if self.channel.carries.tmem:
            nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"channel {self.channel.name}: {self.role} is used as {what}, which it is not")


def commit(barrier: cute.Pointer, ctas: int = 1) -> None:
    """One arrival on `barrier` (of each CTA of a pair) when every tcgen05.mma this thread has issued is complete."""
    both = Int16(0b11).ir_value() if ctas == 2 else None
    nvvm.tcgen05_commit(barrier.llvm_ptr, multicast_mask=both, group=cta_group(ctas))


def wait_for_cluster(barrier: cute.Pointer, phase) -> None:
    """Like `mbarrier_wait`, and what other CTAs wrote before they arrived is visible afterwards."""
    cute.arch.inline_ptx(
        """{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};
        @!done bra again;
        }""",
        read_only_args=[barrier.toint(), Int32(phase)],
    )


@cute.jit
def announce(end: cutlass.Constexpr[End], stage, nbytes: cutlass.Constexpr[int], rank: Int32):
    """Producer by TMA, whole warp of each CTA: expect `nbytes` from each; of a pair, the leader does."""
    if cutlass.const_expr(end.channel.ctas == 1):
        end.expect(stage, nbytes)
    else:
        if rank == LEADER:
            end.expect(stage, nbytes)


class Ring:
    """Where a role stands in a channel: stage index and phase parity. Immutable; `ring = ring.next()`."""

    def __init__(self, stages: int, index: Int32, phase: Int32):
        self.stages, self.index, self.phase = stages, index, phase

    @staticmethod
    def consumer(channel: Channel) -> Ring:
        """Before the first full stage."""
        return Ring(channel.stages, Int32(0), Int32(0))

    @staticmethod
    def producer(channel: Channel) -> Ring:
        """Before the first free stage."""
        return Ring(channel.stages, Int32(0), Int32(1))

    def next(self) -> Ring:
        index = self.index + 1
        wraps = Boolean(index == self.stages)
        return Ring(self.stages, cutlass.select_(wraps, Int32(0), index), self.phase ^ Int32(wraps))

    def __get_mlir_types__(self):
        return [self.index.type, self.phase.type]

    def __extract_mlir_values__(self):
        return [self.index.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Ring(self.stages, Int32(values[0]), Int32(values[1]))
