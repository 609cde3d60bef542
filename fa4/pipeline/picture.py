"""A kernel's tables as Markdown for the pages in docs/: roles, channels, memory, and a flow chart.

python -m fa4.pipeline.picture sm100.fwd        # the Blackwell forward; others: see `PAGES`
"""

from __future__ import annotations

import importlib
import sys

import torch

from ..runtime.device import chip_by_number
from ..runtime.spec import AttentionSpec, Operands, ProblemSize
from .channels import ONCE, Channel, ChannelTable, ClusterSharing, Implied
from .kernel import Config, RoleKernel
from .roles import WARP, RoleTable
from .smem import SmemMap

PAGES = {  # kernel: (head_dim, is causal, roles that write results) of each configuration on its page
    "sm100.fwd": ((128, True, ("epilogue",)),),
    "sm100.bwd": ((128, False, ("compute", "reduce")),),
    "sm100.bwd.wide": ((256, False, ("compute",)),),
    "sm100.fwd.widest": ((512, True, ("softmax",)),),
    "sm100.bwd.widest": ((512, False, ("compute",)),),
    "sm120.fwd": ((128, True, ("compute",)),),
    "sm90.fwd": ((128, True, ("compute",)),),
    "sm90.bwd": ((128, True, ("compute", "reduce")), (256, True, ("dV", "dK"))),
    "sm90.fwd.widest": ((512, True, ("compute",)),),
    "sm90.latent": ((576, True, ("even", "odd")),),
}
OWN_PLANS = "sm90.fwd.widest", "sm90.latent"  # kernels whose plan is not the backend's
OPERANDS = {"sm120": Operands.MXFP8}  # of backends that do not multiply 16-bit numbers
LATENT_COLUMNS = 512  # of V
BETWEEN = "\n\n### The wide kernel\n\nFor bf16, d = 256, causal: CTA pairs and a deterministic order.\n\n"


def tables(name: str) -> str:
    """Return the text between the marks in the page of a kernel: bf16, 16 heads, 4k tokens."""
    backend, direction = name.split(".")[:2]
    module, is_latent = importlib.import_module(f"fa4.{name}.kernel"), direction == "latent"
    plans, pages = importlib.import_module(f"fa4.{name if name in OWN_PLANS else backend}.plan"), []
    directions = plans.Plan.directions
    for head_dim, is_causal, output_roles in PAGES[name]:
        dims, heads = (head_dim, LATENT_COLUMNS if is_latent else head_dim), (16, 1 if is_latent else 16)
        window_right = 0 if is_causal else None
        spec = AttentionSpec(
            torch.bfloat16, *dims, *heads, head_dim**-0.5, window_right=window_right, operands=OPERANDS.get(backend)
        )
        made = directions[direction == "bwd"](spec, ProblemSize(4, 4096, 4096), chip_by_number(int(backend[2:])))
        cfg = made.config(has_dlse=False) if direction == "bwd" else made.cfg
        memories = [module.tmem_map(cfg).table()] if hasattr(module, "tmem_map") else []
        pages.append(page(made.kernel.load(), cfg, output_roles, *memories))
    return BETWEEN.join(pages)


def page(kernel: RoleKernel[Config], cfg: Config, output_roles: tuple[str, ...], *memories: str) -> str:
    """Return the tables of a configuration. output_roles: roles that write results. memories: tables of
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


if __name__ == "__main__":
    print(tables(sys.argv[1]))
