"""Print the backward tables of docs/hopper-backward.md: bf16, d = 128, causal."""

from __future__ import annotations

import torch

from ...pipeline.picture import page
from ...runtime.device import chip_by_number
from ...runtime.spec import AttentionSpec
from .kernel import KERNEL
from .plan import configure
from .tiles import D128_CUT


def tables() -> str:
    """Return the text between the marks in the page."""
    spec = AttentionSpec(torch.bfloat16, 128, 128, 16, 16, 128**-0.5, window_right=0)
    cfg = configure(spec, chip_by_number(90), has_dlse=False, tiles=D128_CUT)
    return page(KERNEL, cfg, ("compute", "reduce"))


if __name__ == "__main__":
    print(tables())
