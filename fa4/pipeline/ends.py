"""A role's ends of channels: waits and arrivals, each with the fences that the payload needs.

A role sees only its own ends. An operation that does not fit the end or the channel's mechanism raises an error while
the kernel is traced.

Fences follow from what a channel carries:
  ASYNC_SMEM   fence.proxy.async before an arrival of threads: threads write, TMA or MMA reads (or the reverse); after a
               wait for copies by cp.async, whose threads arrive before these are done
  SMEM         none: mbarrier arrivals release and waits acquire
  TMEM         the chip's fences (`Signals`). They order tensor memory even with relaxed arrivals and waits across CTAs
               (PTX ISA 9.7.16.6.4). A release.cluster would wait for the memory of the whole GPU (MEMBAR.ALL.GPU), and
               an acquire.cluster would invalidate the L1 cache
A payload in two memories (dS: tensor memory for one product, shared memory for another) gets the fences of both.
"""

from __future__ import annotations

from typing import TypeAlias

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm

from ..core.constant import Constant
from .channels import By, Carries, Channel, ChannelTable, ClusterSharing, Implied, Signals

LEADER = 0  # cluster rank of the leading CTA of a pair
RESPONSE_BYTES = 16  # of cluster launch control
Stage: TypeAlias = int | Int32


class Ends(Constant):
    """A role's view of the channels: one `End` per channel, as an attribute with the channel's name.

    barriers: Int64 pointer to the mbarriers in shared memory.
    """

    def __init__(self, table: ChannelTable, role: str, barriers: cute.Pointer):
        table.roles[role]
        for channel in table.channels:
            if role in channel.roles:
                full = barriers + table.offset(channel)
                setattr(self, channel.name, End(channel, role, full, table.signals))

    def __getattr__(self, name: str) -> End:
        raise AttributeError(f"the role has no end of a channel {name}")


class End(Constant):
    """One role's end of one channel. `stage` is a compile-time int or an Int32; phases are Int32 parities.

    A consumer's first wait on `full` has parity 0. A producer's first wait on `free` has parity 1 and succeeds at once:
    a new barrier counts the phase before its first as completed.
    """

    def __init__(self, channel: Channel, role: str, full: cute.Pointer, signals: Signals):
        self.channel, self.role, self._full, self._signals = channel, role, full, signals
        self.produces, self.consumes = role in channel.producing_roles, role in channel.consuming_roles
        self.releases = role in channel.releasing_roles

    def full(self, stage: Stage) -> cute.Pointer:
        return self._full + stage

    def free(self, stage: Stage) -> cute.Pointer:
        self._require(self.channel.has_free_barriers, "free barriers")
        return self._full + self.channel.stages + stage

    def wait_full(self, stage: Stage, phase: Int32) -> None:
        """Consumer: block until the stage is full."""
        self._require(self.consumes, "a consumer")
        self._wait(self.full(stage), phase, self.channel.filled)
        if self.channel.filled is By.COPIES and Carries.ASYNC_SMEM in self.channel.carries:
            cute.arch.fence_proxy("async.shared", space="cta")

    def wait_free(self, stage: Stage, phase: Int32) -> None:
        """Producer: block until the stage is free."""
        self._require(self.produces, "a producer")
        self._wait(self.free(stage), phase, self.channel.freed)

    def expect(self, stage: Stage, nbytes: int) -> None:
        """Producer by TMA, whole warp (in a pair, of the leader): arrive and expect_tx on `full(stage)`.

        nbytes: bytes of the copies of each CTA; with multicast, of all shares together.
        """
        self._require(self.produces and self.channel.filled is By.TMA, "a producer by TMA")
        with cute.arch.elect_one():
            copies = self.channel.ctas if self.channel.is_pair else 1
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(stage), nbytes * copies)

    def store_full(self, stage: Stage, address: cute.Pointer, words: list[Int32]) -> None:
        """Producer by STORE, one thread of the leader: store four words to the shared memory of each CTA, and signal
        full there when they have arrived."""
        self._require(self.produces and self.channel.filled is By.STORE, "a producer by stores")
        for rank in range(self.channel.ctas):
            expect_of(self.full(stage), rank, 4 * len(words))
            store_async(address, words, self.full(stage), rank)

    def query_full(self, stage: Stage, response: cute.Pointer) -> None:
        """Producer by STORE, one thread of the leader: ask cluster launch control for a cluster that has not started.
        The response fills the stage in the shared memory of each CTA, RESPONSE_BYTES at the same address."""
        self._require(self.produces and self.channel.filled is By.STORE, "a producer by stores")
        if self.channel.ctas == 1:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(stage), RESPONSE_BYTES)
        else:
            for rank in range(self.channel.ctas):
                expect_of(self.full(stage), rank, RESPONSE_BYTES)
        cute.arch.issue_clc_query(self.full(stage), response, multicast=self.channel.ctas > 1)

    def commit_full(self, stage: Stage) -> None:
        """Producer by UMMA, one thread: signal full when the matrix operations issued so far are done."""
        self._require(self.produces and self.channel.filled is By.UMMA, "a producer by UMMA")
        self._signals.commit(self.full(stage), self.channel.ctas)

    def commit_free(self, stage: Stage) -> None:
        """Consumer by UMMA, one thread: signal free when the matrix operations issued so far are done."""
        self._require(self.releases and self.channel.freed is By.UMMA, "a consumer by UMMA")
        self._signals.commit(self.free(stage), self.channel.ctas)

    def arrive_full(self, stage: Stage) -> None:
        """Producer by WARP, whole warp: signal that this warp's part of the stage is written; by COPIES: that it will
        be, when its copies are done."""
        if self.channel.filled is By.COPIES:
            self._require(self.produces and self.channel.ctas == 1, "a producer by copies of one CTA")
            cute.arch.cp_async_mbarrier_arrive_noinc(self.full(stage))
            return
        self._require(self.produces and self.channel.filled is By.WARP, "a producer by warps")
        self._arrive(self.full(stage), is_release=False)

    def arrive_free(self, stage: Stage) -> None:
        """Consumer by WARP, whole warp: release the stage."""
        self._require(self.releases and self.channel.freed is By.WARP, "a consumer by warps")
        self._arrive(self.free(stage), is_release=True)

    def arrive_read(self, stage: Stage) -> None:
        """Consumer by READ or WGMMA, whole warp: release the stage.

        The warp has waited for the reads of the elected lane's bulk copies, or of the warpgroup's products. No thread
        has accessed the stage itself, so no fence and no warp sync is needed.
        """
        is_by_reading = self.channel.freed in (By.READ, By.WGMMA)
        self._require(self.releases and is_by_reading, "a consumer that reads by copies or products")
        self._signal(self.free(stage), is_release=True)

    def arrive_free_after(self, other: End, stage: Stage) -> None:
        """Consumer by WARP, whole warp: release the stage directly after a release of `other`, without a fence: that of
        the other release covers this stage, since the warp has accessed neither in between."""
        self._require(self.releases and self.channel.freed is By.WARP, "a consumer by warps")
        same = other.channel.carries == self.channel.carries and other.channel.freed is self.channel.freed
        if not (same and other.releases) or self.channel.ctas > 1:
            raise ValueError(f"channel {self.channel.name}: a release of {other.channel.name} has another fence")
        self._signal(self.free(stage), is_release=True)

    def _arrive(self, barrier: cute.Pointer, is_release: bool) -> None:
        channel = self.channel
        self._signals.before_arrival(channel.carries)
        if Carries.ASYNC_SMEM in channel.carries:
            # The fence of a cluster's shared memory would wait for the memory of the whole GPU.
            is_own_memory = channel.ctas == 1 or channel.has_smem_fence
            cute.arch.fence_proxy("async.shared", space="cta" if is_own_memory else "cluster")
        if channel.carries != Carries.TMEM:
            cute.arch.sync_warp()  # the elected lane's arrival releases the writes of every lane
        self._signal(barrier, is_release)

    def _signal(self, barrier: cute.Pointer, is_release: bool) -> None:
        """One elected lane arrives: on the leader's barrier of a pair; in a multicast on every CTA's free barrier, but
        on its own CTA's full barrier. A role may both fill and release a channel, so the role does not tell which."""
        channel = self.channel
        is_shared = channel.sharing is ClusterSharing.MULTICAST and is_release
        targets = range(channel.ctas) if is_shared else [LEADER] if channel.is_pair else []
        with cute.arch.elect_one():
            if channel.has_smem_fence:
                cute.arch.inline_ptx("fence.release.sync_restrict::shared::cta.cluster;")
            for rank in targets:
                if channel.is_relaxed:
                    arrive_relaxed(barrier, rank)
                else:
                    cute.arch.mbarrier_arrive(barrier, rank, scope=nvvm.MemScopeKind.CLUSTER)
            if not targets:
                cute.arch.mbarrier_arrive(barrier)

    def _wait(self, barrier: cute.Pointer, phase: Int32, by: By | Implied | None) -> None:
        if self.channel.ctas > 1 and by not in (By.TMA, By.UMMA, By.STORE):
            wait_for_cluster(barrier, phase, "relaxed" if self.channel.is_relaxed else "acquire")
            if self.channel.has_smem_fence:
                cute.arch.inline_ptx("fence.acquire.sync_restrict::shared::cluster.cluster;")
        else:
            cute.arch.mbarrier_wait(barrier, phase)
        self._signals.after_wait(self.channel.carries)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"channel {self.channel.name}: {self.role} is used as {what}, which it is not")


def arrive_relaxed(barrier: cute.Pointer, rank: int) -> None:
    """Arrive on the same barrier of the CTA `rank` in the cluster, without memory ordering (fences order it)."""
    cute.arch.inline_ptx(
        """{
        .reg .b32 theirs;
        mapa.shared::cluster.u32 theirs, {$r0}, {$r1};
        mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [theirs];
        }""",
        read_only_args=[barrier.toint(), Int32(rank)],
    )


def expect_of(barrier: cute.Pointer, rank: int, nbytes: int) -> None:
    """Arrive and expect bytes on the same barrier of the CTA `rank` in the cluster."""
    cute.arch.inline_ptx(
        f"""{{
        .reg .b32 theirs;
        mapa.shared::cluster.u32 theirs, {{$r0}}, {{$r1}};
        mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [theirs], {nbytes};
        }}""",
        read_only_args=[barrier.toint(), Int32(rank)],
    )


def store_async(address: cute.Pointer, words: list[Int32], barrier: cute.Pointer, rank: int) -> None:
    """Store four words to the same address of the CTA `rank` in the cluster. Their bytes count on the same barrier
    there."""
    cute.arch.inline_ptx(
        """{
        .reg .b32 theirs, full;
        mapa.shared::cluster.u32 theirs, {$r0}, {$r2};
        mapa.shared::cluster.u32 full, {$r1}, {$r2};
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [theirs], {{$r3}, {$r4}, {$r5}, {$r6}}, [full];
        }""",
        read_only_args=[address.toint(), barrier.toint(), Int32(rank), *words],
    )


def wait_for_cluster(barrier: cute.Pointer, phase: Int32, semantics: str = "acquire") -> None:
    """Like `mbarrier_wait`, across the cluster: an acquire makes writes of other CTAs before their arrival visible."""
    cute.arch.inline_ptx(
        f"""{{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.{semantics}.cluster.shared::cta.b64 done, [{{$r0}}], {{$r1}};
        @!done bra again;
        }}""",
        read_only_args=[barrier.toint(), Int32(phase)],
    )
