"""flash-attn-4 4.0.0b36, forward on Blackwell: CLC with head_dim 256 and CTA pairs.

interface.py:1129 says that CLC does not map these tiles correctly, and line 1130 keeps CLC away from them. The script
removes line 1130, turns CLC on and runs the forward. --repaired changes the two places that cause it:

    warpcheck run --chip sm_100a --seeds 3 -- examples/findings/clc_d256.py --rows 384 [--repaired | --guarded]

It needs the package, and prints the error of the result. docs/finding-clc-d256.md explains what is found. Without
`warpcheck run` it runs on the GPU of the machine.
"""

import argparse
import math
import os

import torch
from edited_package import Edit, use_edited
from torch import Tensor

GUARD = Edit("interface.py", "and not (is_hdim256 and use_2cta_instrs)", "")
# Twice: the number of rows of a block that the scheduler counts, and whether it hands out blocks of a cluster.
REPAIR = Edit(
    "flash_fwd_sm100.py",
    "not self.is_persistent and self.cta_group_size > 1",
    "(not self.is_persistent or self.use_clc_scheduler) and self.cta_group_size > 1",
    count=2,
)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, aligned to the last row and the last key."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    rows, keys = scores.shape[-2:]
    hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="queries [default: 512]")
    parser.add_argument("--keys", type=int, help="[default: as many as queries]")
    parser.add_argument("--heads", type=int, default=1)
    variant = parser.add_mutually_exclusive_group()
    variant.add_argument("--repaired", action="store_true", help="with the repair")
    variant.add_argument("--guarded", action="store_true", help="with line 1130, as the package is: no CLC")
    options = parser.parse_args()
    edits = [] if options.guarded else [GUARD, REPAIR] if options.repaired else [GUARD]
    os.environ["FA_CLC"] = "1"  # read when the package is imported
    use_edited("flash_attn.cute", "4.0.0b36", edits)
    from flash_attn.cute import flash_attn_func

    torch.manual_seed(0)
    keys = options.rows if options.keys is None else options.keys
    q, k, v = (torch.randn(1, rows, options.heads, 256).bfloat16() for rows in (options.rows, keys, keys))
    out, _ = flash_attn_func(q.cuda(), k.cuda(), v.cuda(), causal=True, return_lse=True)
    right = attention(q.double(), k.double(), v.double())
    close = torch.isclose(out.cpu().double(), right, rtol=0.0, atol=0.02 * right.abs().max().item())  # NaN is not
    wrong = ~close.flatten(2).all(-1)[0]
    tiles = [tile for tile, rows in enumerate(wrong.split(128)) if rows.any()]
    print(f"{int(wrong.sum())} of {options.rows} rows are wrong" + (f", in tiles {tiles} of 128 rows" if tiles else ""))


if __name__ == "__main__":
    main()
