"""A kernel's tables as Markdown, for the pages in docs/: roles, channels, memory, and how they hang together.

python -m fa4.sm100.fwd        # the forward's
python -m fa4.sm100.bwd        # the backward's
"""

from __future__ import annotations

import importlib

from .channels import Channel, ChannelTable
from .roles import WARP, RoleTable
from .smem import SmemMap
from .tmem import TmemMap


def roles_table(roles: RoleTable) -> str:
    """A line per role: its warps, registers, and the first sentence of its module."""
    lines = ["| role | warps | teams | registers a thread | what it does |", "|---|---|--:|--:|---|"]
    for role in roles.roles:
        first, stop = role.warps
        warps = f"{first}" if stop == first + 1 else f"{first}-{stop - 1}"
        head = importlib.import_module(role.body.__module__).__doc__.partition("\n\n")[0].replace("\n", " ")
        does = head.partition(": ")[2].partition(". ")[0].rstrip(".")
        lines.append(f"| {role.name} | {warps} | {role.teams} | {role.regs} | {does} |")
    total = sum(roles.warpgroup_regs(group) * 4 * WARP for group in range(roles.warpgroups))
    return "\n".join((*lines, "", f"{roles.threads} threads, {total} of 65536 registers."))


def channels_table(table: ChannelTable) -> str:
    """A line per channel: stages, what completes its barriers and with how many arrivals, what it carries."""
    lines = [
        "| channel | stages | full by | arrivals | free by | arrivals | carries |",
        "|---|--:|---|--:|---|--:|---|",
    ]
    for channel in table.channels:
        full = table.arrivals(channel.filled, channel.producers, channel.ctas)
        free = "" if channel.freed is None else table.arrivals(channel.freed, channel.consumers, channel.ctas)
        by = "" if channel.freed is None else channel.freed.name
        name = f"`{channel.name}`" + (" (pair)" if channel.ctas == 2 else "")
        lines.append(
            f"| {name} | {channel.stages} | {channel.filled.name} | {full} | {by} | {free} | {channel.carries.name} |"
        )
    return "\n".join(lines)


def memory_table(tmem: TmemMap, smem: SmemMap) -> str:
    """Tensor-memory columns and shared-memory offsets."""
    lines = ["| tensor memory | columns | over |", "|---|---|---|"]
    for name, span in tmem.spans.items():
        lines.append(f"| {name} | {span.first}-{span.first + span.columns - 1} | {span.over or ''} |")
    lines += ["", "| shared memory | from byte |", "|---|--:|"]
    lines += [f"| {name} | {offset} |" for name, offset in smem.offsets.items()]
    return "\n".join((*lines, f"| end | {smem.nbytes} |"))


def diagram(table: ChannelTable, last: tuple[str, ...] = ("epilogue",)) -> str:
    """A Mermaid flow chart: an arrow per pair of roles, labelled with what passes along it; `last` write results."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for channel in table.channels:
        for producer in channel.producers:
            for consumer in dict.fromkeys(channel.consumers):
                arrows.setdefault((producer, consumer), []).append(_label(channel))
    lines = ["```mermaid", "flowchart LR", "    global[(global memory)] --> load"]
    for (producer, consumer), labels in arrows.items():
        lines.append(f'    {producer} -- "{"<br>".join(labels)}" --> {consumer}')
    return "\n".join((*lines, *(f"    {role} --> global" for role in last), "```"))


def _label(channel: Channel) -> str:
    payload = channel.name.rpartition("_")[2]
    return payload if channel.stages == 1 else f"{payload} x{channel.stages}"
