"""Print the backward tables of docs/hopper-backward.md: bf16, d = 128, causal."""

from __future__ import annotations

import torch

from ...pipeline.picture import page
from ...runtime.device import chip_by_number
from ...runtime.spec import AttentionSpec, ProblemSize
from .kernel import KERNEL
from .plan import configure
from .tiles import tiles_for


def tables() -> str:
    """Return the text between the marks in the page."""
    spec = AttentionSpec(torch.bfloat16, 128, 128, 16, 16, 128**-0.5, window_right=0)
    chip = chip_by_number(90)
    cfg = configure(spec, chip, has_dlse=False, tiles=tiles_for(spec, chip, ProblemSize(1, 4096, 4096)).row)
    return page(KERNEL, cfg, ("compute", "reduce"))


if __name__ == "__main__":
    print(tables())
