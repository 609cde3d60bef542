"""Table of a kernel's warp roles, checked when the kernel is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.constant import Constant

WARP = 32
WARPS_PER_WARPGROUP = 4
ROWS_PER_WARP = 16  # of an accumulator of wgmma or mma.sync, see `fragment`
REGISTERS_PER_SM = 65536


@dataclass(frozen=True, slots=True)
class Role:
    """Warps `warps[0]` to `warps[1] - 1` run `body` with `regs` registers a thread.

    instances: equal groups of the warps that work independently, for example two softmax warpgroups with one Q tile
    each. One instance serves a channel stage.
    """

    name: str
    warps: tuple[int, int]
    regs: int
    body: Callable | None = None
    instances: int = 1

    @property
    def instance_warps(self) -> int:
        """Warps in one instance: the arrivals a barrier expects from this role."""
        return (self.warps[1] - self.warps[0]) // self.instances


@dataclass(frozen=True, slots=True)
class RoleTable(Constant):
    """The roles of a kernel, in warp order. Warps after the last role, up to a full warpgroup, are unused.

    per_sm: CTAs per SM.

    Raises:
        ValueError: roles overlap, leave a gap, differ in `regs` within a warpgroup (all warps of a warpgroup must
            execute the same setmaxnreg), need a register count that setmaxnreg cannot set, or more registers than the
            SM has or, with several CTAs per SM, than a CTA gets at launch.
    """

    roles: tuple[Role, ...]
    per_sm: int = 1

    def __post_init__(self) -> None:
        next_warp = 0
        for role in self.roles:
            if role.warps[0] != next_warp or role.warps[1] <= role.warps[0]:
                raise ValueError(f"role {role.name} has warps {role.warps}, expected them to start at {next_warp}")
            if (role.warps[1] - role.warps[0]) % role.instances:
                raise ValueError(f"role {role.name} splits warps {role.warps} into {role.instances} unequal instances")
            if role.regs % 8 or not 24 <= role.regs <= 256:
                raise ValueError(f"role {role.name} has regs={role.regs}, expected a multiple of 8 from 24 to 256")
            next_warp = role.warps[1]
        total = sum(self.warpgroup_regs(group) * WARPS_PER_WARPGROUP * WARP for group in range(self.warpgroups))
        if total > REGISTERS_PER_SM:
            raise ValueError(f"the roles ask for {total} registers, the SM has {REGISTERS_PER_SM}")
        limit = self.launch_regs() * self.threads  # setmaxnreg cannot use registers of the SM beyond these
        if total > limit:
            raise ValueError(f"the roles ask for {total} registers, each of {self.per_sm} CTAs of an SM has {limit}")

    def __getitem__(self, name: str) -> Role:
        for role in self.roles:
            if role.name == name:
                return role
        raise ValueError(f"no role is named {name!r}, expected one of {', '.join(role.name for role in self.roles)}")

    @property
    def warpgroups(self) -> int:
        return -(-self.roles[-1].warps[1] // WARPS_PER_WARPGROUP)

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPS_PER_WARPGROUP * WARP

    def warpgroup_regs(self, group: int) -> int:
        """Registers per thread of one warpgroup; all its roles must request the same number."""
        first, end = group * WARPS_PER_WARPGROUP, (group + 1) * WARPS_PER_WARPGROUP
        inside = [role for role in self.roles if role.warps[0] < end and role.warps[1] > first]
        if len({role.regs for role in inside}) != 1:
            requested = ", ".join(f"{role.name}={role.regs}" for role in inside)
            raise ValueError(f"the roles of warpgroup {group} must agree on regs, they ask for {requested}")
        return inside[0].regs

    @property
    def groups(self) -> tuple[tuple[Role, ...], ...]:
        """Roles in order, grouped by the warpgroups that they share."""
        groups: list[list[Role]] = []
        for role in self.roles:
            if role.warps[0] % WARPS_PER_WARPGROUP == 0:
                groups.append([])
            groups[-1].append(role)
        return tuple(tuple(group) for group in groups)

    def launch_regs(self) -> int:
        """Registers per thread at launch, before setmaxnreg."""
        return REGISTERS_PER_SM // (self.per_sm * self.threads) // 8 * 8
