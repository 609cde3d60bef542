"""Producer/consumer channels between roles, as data. Arrival counts are derived from the role table.

A channel is a ring of stages. Each stage has two mbarriers: `full` (the producer has filled the stage) and `free` (the
consumers have released it). The operations of roles on them are in `ends`.

CTAs of a cluster share a channel in one of two ways:
  PAIR         One of two CTAs, the leader, issues the matrix operations of both (sm_100), or has words stored in the
               shared memory of both. The leader's barriers count the bytes and the warps of both CTAs. A commit of the
               leader, or a store, signals both CTAs.
  MULTICAST    Each CTA loads a share of a stage into the shared memory of all CTAs. A stage is free when the consumers
               of all CTAs have released it: each consumer arrives on the free barrier of every CTA. A CTA's full
               barrier counts the bytes that arrive in its own shared memory, from any sender.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ..core.constant import Constant
from .roles import WARP, RoleTable


class By(enum.Enum):
    """The event that completes a barrier's phase."""

    TMA = "the byte count of bulk copies"
    UMMA = "a tcgen05.commit"
    STORE = "the byte count of what the leader has stored in each CTA"
    WARP = "one elected lane of each warp"
    COPIES = "each thread, when its cp.async copies so far are done"
    READ = "one elected lane, after its bulk copies have read the stage"
    WGMMA = "one elected lane of each warp, after the products that read the stage"


class Carries(enum.Flag):
    """Memory that holds the payload; it decides the fences."""

    SMEM = enum.auto()
    ASYNC_SMEM = enum.auto()
    TMEM = enum.auto()


class ClusterSharing(enum.Enum):
    """How the CTAs of a cluster share a channel; see the module docstring."""

    NOTHING = "each CTA has its own channel"
    PAIR = "the leader's barriers count for both"
    MULTICAST = "a stage is filled and released in all CTAs together"


@dataclass(frozen=True, slots=True)
class Every:
    """All instances of a role take part in each stage. A plain role name stands for one instance."""

    role: str


@dataclass(frozen=True, slots=True)
class Implied:
    """A release without its own barrier: a wait on another channel tells the producer that the stage is free.

    channel: name of the other channel. side: its barrier that the producer waits for, `full` (the producer is its
    consumer) or `free` (the producer is its producer).
    """

    channel: str
    side: str = "full"


Side = str | Every
ONCE = None  # `Channel.freed` if each stage is filled only once


@dataclass(frozen=True, slots=True)
class Channel:
    """A ring of `stages` stages from `producer` to `consumer`: a role, `Every` instance of a role, or a tuple of these.

    filled: what completes a stage's full barrier. freed: what completes its free barrier, or the other channel that
    implies the release, or `ONCE` for no release. freer: the role that releases a stage; None for the consumer. ctas:
    CTAs of a cluster that share the channel. across: how they share it.
    """

    name: str
    producer: Side | tuple[Side, ...]
    consumer: Side | tuple[Side, ...]
    filled: By
    freed: By | Implied | None
    stages: int
    carries: Carries
    ctas: int = 1
    sharing: ClusterSharing = ClusterSharing.NOTHING
    releaser: Side | None = None

    @property
    def producers(self) -> tuple[Side, ...]:
        return self.producer if isinstance(self.producer, tuple) else (self.producer,)

    @property
    def consumers(self) -> tuple[Side, ...]:
        return self.consumer if isinstance(self.consumer, tuple) else (self.consumer,)

    @property
    def producing_roles(self) -> tuple[str, ...]:
        return tuple(role_of(side) for side in self.producers)

    @property
    def consuming_roles(self) -> tuple[str, ...]:
        return tuple(role_of(side) for side in self.consumers)

    @property
    def releasers(self) -> tuple[Side, ...]:
        return self.consumers if self.releaser is None else (self.releaser,)

    @property
    def releasing_roles(self) -> tuple[str, ...]:
        return tuple(role_of(side) for side in self.releasers)

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles of the channel, each once."""
        return tuple(dict.fromkeys(self.producing_roles + self.consuming_roles + self.releasing_roles))

    @property
    def has_free_barriers(self) -> bool:
        return isinstance(self.freed, By)

    @property
    def barriers(self) -> int:
        return self.stages * (2 if self.has_free_barriers else 1)

    @property
    def is_pair(self) -> bool:
        return self.sharing is ClusterSharing.PAIR

    @property
    def is_relaxed(self) -> bool:
        """Whether fences order the payload, so that arrivals and waits across CTAs may be relaxed."""
        return self.has_smem_fence or (self.is_pair and self.carries is Carries.TMEM)

    @property
    def has_smem_fence(self) -> bool:
        """Whether a fence of shared memory orders the payload across CTAs: only copies and products access it
        (multicast), or threads access it in the shared memory of their own CTA (pair). Unlike a release of the cluster,
        this fence does not wait for the memory of the whole GPU, nor for loads in flight."""
        if self.is_pair:
            return self.carries is Carries.ASYNC_SMEM or self.filled is By.STORE
        return self.sharing is ClusterSharing.MULTICAST and self.filled is By.TMA and self.freed is By.WGMMA


def role_of(side: Side) -> str:
    return side.role if isinstance(side, Every) else side


class Signals(Constant):
    """A chip's operations around mbarrier arrivals and waits. This base class adds none, as on sm_90."""

    def before_arrival(self, carries: Carries) -> None:
        """Run by each thread of a warp, before its elected lane arrives."""
        self._refuse(Carries.TMEM in carries, "tensor memory")

    def after_wait(self, carries: Carries) -> None:
        """Run by each thread after its wait."""
        self._refuse(Carries.TMEM in carries, "tensor memory")

    def commit(self, barrier: cute.Pointer, ctas: int) -> None:
        """One thread: arrive on `barrier` (in each of `ctas` CTAs) when its matrix operations are done."""
        self._refuse(True, "matrix operations that signal barriers")

    def _refuse(self, is_used: bool, what: str) -> None:
        if is_used:
            raise ValueError(f"{type(self).__name__} knows no {what}")


PLAIN = Signals()


@dataclass(frozen=True, slots=True)
class ChannelTable(Constant):
    """All channels of a kernel. Their mbarriers, 8 bytes each, are one block of shared memory.

    Raises:
        ValueError: two channels share a name; a channel has an unknown role, no stage, or several CTAs without
            `sharing`; an implied release names an unknown channel, or a barrier that the producer does not wait for.
    """

    channels: tuple[Channel, ...]
    roles: RoleTable
    signals: Signals = PLAIN

    def __post_init__(self) -> None:
        names = [channel.name for channel in self.channels]
        if len(set(names)) != len(names):
            raise ValueError(f"two channels share a name: {', '.join(names)}")
        for channel in self.channels:
            if channel.stages < 1:
                raise ValueError(f"channel {channel.name} has {channel.stages} stages, expected at least 1")
            if channel.ctas > 1 and channel.sharing is ClusterSharing.NOTHING:
                raise ValueError(f"channel {channel.name} has {channel.ctas} CTAs and does not say what they share")
            for role in channel.roles:
                self.roles[role]
            if isinstance(channel.freed, Implied):
                self._check_implied(channel, channel.freed)

    def _check_implied(self, channel: Channel, freed: Implied) -> None:
        other = self[freed.channel]
        waiting = {"full": other.consuming_roles, "free": other.producing_roles if other.has_free_barriers else ()}
        if freed.side not in waiting:
            raise ValueError(f"channel {channel.name}: {freed} names a side, expected one of {', '.join(waiting)}")
        for role in channel.producing_roles:
            if role not in waiting[freed.side]:
                raise ValueError(
                    f"channel {channel.name}: its release is implied by {other.name}.{freed.side}, "
                    f"for which its producer {role} does not wait"
                )

    def __getitem__(self, name: str) -> Channel:
        for channel in self.channels:
            if channel.name == name:
                return channel
        raise ValueError(f"no channel is named {name!r}, expected one of {', '.join(c.name for c in self.channels)}")

    @property
    def nbytes(self) -> int:
        return 8 * sum(channel.barriers for channel in self.channels)

    def offset(self, channel: Channel) -> int:
        """Index of the channel's first mbarrier. `stages` full barriers come first, then the free barriers, if any."""
        index = self.channels.index(channel)
        return sum(before.barriers for before in self.channels[:index])

    def full_arrivals(self, channel: Channel) -> int:
        """Arrivals that complete one phase of a full barrier. Copies count as one arrival: that of expect_tx."""
        ctas = channel.ctas if channel.is_pair else 1
        return self._arrivals(channel.filled, channel.producers, ctas)

    def free_arrivals(self, channel: Channel) -> int:
        """Arrivals that complete one phase of a free barrier."""
        return self._arrivals(channel.freed, channel.releasers, channel.ctas)

    def _arrivals(self, by: By | Implied | None, sides: tuple[Side, ...], ctas: int) -> int:
        if by in (By.TMA, By.UMMA, By.STORE):
            return 1
        if by is By.READ:
            return ctas
        roles = [(self.roles[role_of(side)], isinstance(side, Every)) for side in sides]
        lanes = WARP if by is By.COPIES else 1
        return ctas * lanes * sum(role.instance_warps * (role.instances if every else 1) for role, every in roles)

    def barrier_names(self) -> tuple[str, ...]:
        """Names of all mbarriers in order, for reports: `load_mma_KV.full[0]`."""
        names = []
        for channel in self.channels:
            names += [f"{channel.name}.full[{stage}]" for stage in range(channel.stages)]
            if channel.has_free_barriers:
                names += [f"{channel.name}.free[{stage}]" for stage in range(channel.stages)]
        return tuple(names)


@cute.jit
def init_barriers(table: cutlass.Constexpr[ChannelTable], barriers: cute.Pointer):
    """One thread: initialise every mbarrier. The caller syncs the CTA (or cluster) before the first use."""
    for channel in const_expr(table.channels):
        full = barriers + table.offset(channel)
        for stage in cutlass.range_constexpr(channel.stages):
            cute.arch.mbarrier_init(full + stage, table.full_arrivals(channel))
            if const_expr(channel.has_free_barriers):
                cute.arch.mbarrier_init(full + channel.stages + stage, table.free_arrivals(channel))
    cute.arch.mbarrier_init_fence()
