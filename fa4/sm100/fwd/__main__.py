"""Print the forward's tables as docs/blackwell-forward.md shows them: bf16, d = 128, causal."""

from __future__ import annotations

import torch

from ...device import chip_by_number
from ...pipeline.picture import channels_table, diagram, roles_table, smem_table
from ...spec import AttentionSpec
from .kernel import channels, smem_map, tmem_map
from .plan import configure


def tables() -> str:
    """Everything between the marks in the page."""
    cfg = configure(AttentionSpec(torch.bfloat16, 128, 128, 16, 16, 128**-0.5, window_right=0), chip_by_number(100))
    table = channels(cfg)
    parts = (
        roles_table(table.roles),
        diagram(table),
        channels_table(table),
        tmem_map(cfg).table(),
        smem_table(smem_map(cfg, table)),
    )
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(tables())
