"""Print the backward tables of docs/hopper-backward.md, bf16 and causal: d = 128, then d = 256 (the wide kernel)."""

from __future__ import annotations

import torch

from ...pipeline.picture import page
from ...runtime.device import chip_by_number
from ...runtime.spec import AttentionSpec, ProblemSize
from .plan import Sm90Backward

BETWEEN = "\n\n### The wide kernel\n\nFor bf16, d = 256, causal: CTA pairs and a deterministic order.\n\n"


def tables() -> str:
    """Return the text between the marks in the page."""
    pages = []
    for head_dim, output_roles in ((128, ("compute", "reduce")), (256, ("dV", "dK"))):
        spec = AttentionSpec(torch.bfloat16, head_dim, head_dim, 16, 16, head_dim**-0.5, window_right=0)
        plan = Sm90Backward(spec, ProblemSize(1, 4096, 4096), chip_by_number(90))
        pages.append(page(plan.kernel, plan.config(has_dlse=False), output_roles))
    return BETWEEN.join(pages)


if __name__ == "__main__":
    print(tables())
