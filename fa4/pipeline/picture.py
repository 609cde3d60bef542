"""A kernel's tables as Markdown for the pages in docs/: roles, channels, memory, and a flow chart.

python -m fa4.sm100.fwd        # the Blackwell forward; likewise sm100.bwd, sm90.fwd and sm90.bwd
"""

from __future__ import annotations

import importlib

from .channels import ONCE, Channel, ChannelTable, ClusterSharing, Implied
from .kernel import Config, RoleKernel
from .roles import WARP, RoleTable
from .smem import SmemMap


def page(kernel: RoleKernel[Config], cfg: Config, output_roles: tuple[str, ...], *memories: str) -> str:
    """Return the text between the marks of a kernel's page. output_roles: roles that write results. memories: tables of
    other memories than shared memory."""
    table = kernel.channels(cfg)
    parts = roles_table(table.roles), diagram(table, output_roles), channels_table(table), *memories
    return "\n\n".join((*parts, smem_table(kernel.smem(cfg, table))))


def roles_table(roles: RoleTable) -> str:
    """Return a table of roles: warps, instances, registers, and the first sentence of the role's module docstring."""
    lines = ["| role | warps | instances | registers a thread | what it does |", "|---|---|--:|--:|---|"]
    for role in roles.roles:
        first, stop = role.warps
        warps = f"{first}" if stop == first + 1 else f"{first}-{stop - 1}"
        head = importlib.import_module(role.body.__module__).__doc__.partition("\n\n")[0].replace("\n", " ")
        does = head.partition(": ")[2].partition(". ")[0].rstrip(".")
        lines.append(f"| {role.name} | {warps} | {role.instances} | {role.regs} | {does} |")
    total = sum(roles.warpgroup_regs(group) * 4 * WARP for group in range(roles.warpgroups))
    return "\n".join((*lines, "", f"{roles.threads} threads, {total} of 65536 registers."))


def channels_table(table: ChannelTable) -> str:
    """Return a table of channels: stages, what completes the barriers, arrival counts, payload memory. For an implied
    release, `free by` names the barrier that implies it."""
    lines = [
        "| channel | stages | full by | arrivals | free by | arrivals | carries |",
        "|---|--:|---|--:|---|--:|---|",
    ]
    for channel in table.channels:
        freed = channel.freed
        arrivals: int | str = ""
        if isinstance(freed, Implied):
            by = f"`{freed.channel}.{freed.side}`"
        elif freed is ONCE:
            by = "filled once"
        else:
            by, arrivals = freed.name, table.free_arrivals(channel)
        shared = "" if channel.sharing is ClusterSharing.NOTHING else f" ({channel.sharing.name.lower()})"
        carries = " + ".join(memory.name for memory in channel.carries)
        lines.append(
            f"| `{channel.name}`{shared} | {channel.stages} | {channel.filled.name} | {table.full_arrivals(channel)} "
            f"| {by} | {arrivals} | {carries} |"
        )
    return "\n".join(lines)


def smem_table(smem: SmemMap) -> str:
    """Return a table of the first byte of each shared-memory region."""
    lines = ["| shared memory | from byte |", "|---|--:|"]
    lines += [f"| {name} | {offset} |" for name, offset in smem.offsets.items()]
    return "\n".join((*lines, f"| end | {smem.nbytes} |"))


def diagram(table: ChannelTable, output_roles: tuple[str, ...]) -> str:
    """Return a Mermaid flow chart with an arrow per pair of roles. Its label names the payloads and, after "frees", the
    payloads whose release they imply. `output_roles` write results to global memory."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for channel in table.channels:
        for producer in channel.producing_roles:
            for consumer in dict.fromkeys(channel.consuming_roles):
                arrows.setdefault((producer, consumer), []).append(_label(channel, consumer, table))
    lines = ["```mermaid", "flowchart LR", "    global[(global memory)] --> load"]
    for (producer, consumer), labels in arrows.items():
        lines.append(f'    {producer} -- "{"<br>".join(labels)}" --> {consumer}')
    return "\n".join((*lines, *(f"    {role} --> global" for role in output_roles), "```"))


def _label(channel: Channel, consumer: str, table: ChannelTable) -> str:
    label = _payload(channel) if channel.stages == 1 else f"{_payload(channel)} x{channel.stages}"
    implied = Implied(channel.name, "full")
    freed = [_payload(c) for c in table.channels if c.freed == implied and consumer in c.producing_roles]
    return label + (f" (frees {', '.join(freed)})" if freed else "")


def _payload(channel: Channel) -> str:
    return channel.name.rpartition("_")[2]
