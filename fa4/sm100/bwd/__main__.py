"""Print the backward's tables as docs/blackwell-backward.md shows them: bf16, d = 128, a pair of CTAs."""

from __future__ import annotations

import torch

from ...device import chip_by_number
from ...pipeline.picture import channels_table, diagram, roles_table, smem_table
from ...spec import AttentionSpec
from .kernel import ROLES, channels, smem_map, tmem_map
from .plan import configure


def tables() -> str:
    """Everything between the marks in the page."""
    spec = AttentionSpec(torch.bfloat16, 128, 128, 16, 16, 128**-0.5)
    cfg = configure(spec, chip_by_number(100), has_dlse=False)
    table = channels(cfg)
    picture = diagram(table, last=("compute", "reduce"))
    return "\n\n".join(
        (roles_table(ROLES), picture, channels_table(table), tmem_map(cfg).table(), smem_table(smem_map(cfg, table)))
    )


if __name__ == "__main__":
    print(tables())
