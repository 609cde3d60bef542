"""Print the tables of the backward for docs/blackwell-backward.md: bf16, d = 128, a CTA pair."""

from __future__ import annotations

import torch

from ...pipeline.picture import page
from ...runtime.device import chip_by_number
from ...runtime.spec import AttentionSpec
from .config import Sm100BackwardConfig
from .kernel import KERNEL, tmem_map
from .plan import configure


def tables() -> str:
    """Text between the marks in the page."""
    spec = AttentionSpec(torch.bfloat16, 128, 128, 16, 16, 128**-0.5)
    cfg = configure(spec, chip_by_number(100), has_dlse=False)
    assert isinstance(cfg, Sm100BackwardConfig)
    return page(KERNEL, cfg, ("compute", "reduce"), tmem_map(cfg).table())


if __name__ == "__main__":
    print(tables())
