"""flash-attn-4 4.0.0b36, backward on Blackwell: why a `producer_tail` of the pipeline S_P hangs.

flash_bwd_sm100.py:3083 says that the kernel hangs with this tail. The script puts the tail there and runs the backward:

    warpcheck run --chip sm_100a --seeds 3 -- examples/findings/s_p_tail.py [--tail STATE] [--head-dim 64] [--tiles 2]

It needs the package, and prints the errors of the gradients. docs/finding-s-p-tail.md explains what is found. Without
`warpcheck run` it runs on the GPU of the machine.
"""

import argparse
import math

import torch
from edited_package import Edit, use_edited
from torch import Tensor

PHASES = {
    "own": "producer_phase_acc",
    "earlier": "producer_phase_acc ^ 1",
    "fresh": "Int32(1)",
    "split": "producer_phase_S",
}
HELP = """state of the tail. own: the phase after the last tile, as the kernel counts it; earlier: one phase before own;
fresh: a new producer state, which nothing has advanced; split: the kernel's phase of S where P has a buffer of its own
(head_dim 64); none: no tail, as the package is [default: own]"""


def tail(pipeline: str, state: str) -> Edit:
    """Put a call where the commented call is."""
    old = f"# pipeline_{pipeline}.producer_tail(producer_state_{pipeline})"
    made = f"cutlass.pipeline.PipelineState(1, Int32(0), Int32(0), {PHASES[state]})"
    return Edit("flash_bwd_sm100.py", old, f"pipeline_{pipeline}.producer_tail({made})")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tail", choices=[*PHASES, "none"], default="own", help=HELP)
    parser.add_argument("--pipeline", choices=["S_P", "dP"], default="S_P", help="whose tail [default: S_P]")
    parser.add_argument("--head-dim", type=int, choices=[64, 128], default=128)
    parser.add_argument("--tiles", type=int, default=1, help="tiles of 128 queries [default: 1]")
    options = parser.parse_args()
    edits = [] if options.tail == "none" else [tail(options.pipeline, options.tail)]
    use_edited("flash_attn.cute", "4.0.0b36", edits)
    from flash_attn.cute import flash_attn_func

    torch.manual_seed(0)
    queries = 128 * options.tiles
    q, k, v, dout = (torch.randn(1, rows, 1, options.head_dim).bfloat16() for rows in (queries, 128, 128, queries))
    on_gpu = [x.cuda().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*on_gpu)
    grads = torch.autograd.grad(out[0] if isinstance(out, tuple) else out, on_gpu, dout.cuda())
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*exact), exact, dout.double())
    for name, grad, right in zip(("dQ", "dK", "dV"), grads, expected, strict=True):
        error = (grad.cpu().double() - right).abs().max() / right.abs().max()
        print(f"{name}: error {error.item():.1e} of the largest element")


if __name__ == "__main__":
    main()
