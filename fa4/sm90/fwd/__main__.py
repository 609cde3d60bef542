"""Print the forward tables of docs/hopper-forward.md: bf16, d = 128, causal."""

from __future__ import annotations

import torch

from ...pipeline.picture import page
from ...runtime.device import chip_by_number
from ...runtime.spec import AttentionSpec, ProblemSize
from .kernel import KERNEL
from .plan import configure


def tables() -> str:
    """Return the text between the marks in the page."""
    spec = AttentionSpec(torch.bfloat16, 128, 128, 16, 16, 128**-0.5, window_right=0)
    cfg = configure(spec, ProblemSize(4, 4096, 4096), chip_by_number(90))
    return page(KERNEL, cfg, ("compute",))


if __name__ == "__main__":
    print(tables())
