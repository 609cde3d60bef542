"""Attention over one long sequence that is cut among processes, forward and backward.

    torchrun --nproc-per-node 2 examples/long_context.py

With GPUs each process takes one, and messages go by NCCL; without, by gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist

import fa4
from fa4 import distributed as cp


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--method", choices=cp.METHODS, default="ring")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, options.seqlen, h, 64, generator=generator).bfloat16().to(device) for h in (4, 2, 2))

    parts = [cp.shard(x).requires_grad_() for x in (q, k, v)]
    out = cp.context_parallel_attention(*parts, causal=True, method=options.method)
    out.float().square().sum().backward()

    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = fa4.flash_attn_func(*whole, causal=True)
    expected.float().square().sum().backward()
    pairs = [(cp.unshard(out), expected), *((cp.unshard(a.grad), b.grad) for a, b in zip(parts, whole))]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {parts[0].shape[1]} tokens each, {options.method}")
        for name, (a, b) in zip(("out", "dq", "dk", "dv"), pairs):
            print(f"{name:3}  differs by {float((a - b).abs().max()):.2g} of {float(b.abs().max()):.2g} at most")
            assert (a - b).abs().max() < 0.02 * b.abs().max()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
