"""python -m bench.dropout: attention with dropout beside the same without, and beside torch's flash attention.

All take turns, forward and backward each alone, with a cold L2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import click
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4

from .timing import measure_in_turns

HEADS = 16
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ours(causal: bool, dropout_p: float, backend: str) -> Attention:
    return lambda q, k, v: fa4.flash_attn_func(q, k, v, causal=causal, dropout_p=dropout_p, backend=backend)


def _torchs(causal: bool, dropout_p: float) -> Attention:
    def attend(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in tensors)
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=causal).transpose(
                1, 2
            )

    return attend


def _times(calls: dict[str, Attention], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seconds: float) -> dict:
    forwards = {name: functools.partial(call, q, k, v) for name, call in calls.items()}
    forward = measure_in_turns(forwards, q.device, seconds=seconds)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    backwards = {
        name: functools.partial(torch.autograd.grad, call(*leaves), leaves, dout, retain_graph=True)
        for name, call in calls.items()
    }
    return {"forward": forward, "backward": measure_in_turns(backwards, q.device, seconds=seconds)}


@click.command(help=__doc__)
@click.option("--tokens", default=4096, show_default=True)
@click.option("--head-dims", default="64,128", show_default=True)
@click.option("--dropout-p", default=0.1, show_default=True)
@click.option("--backends", default="auto", show_default=True, help="Of fa4, by commas.")
@click.option("--seconds", default=0.3, show_default=True, help="For each time.")
def main(tokens: int, head_dims: str, dropout_p: float, backends: str, seconds: float) -> None:
    for head_dim in map(int, head_dims.split(",")):
        shape = max(1, 16384 // tokens), tokens, HEADS * 128 // head_dim, head_dim
        tensors = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16).unbind()
        for causal in (False, True):
            calls: dict[str, Attention] = {}
            for p in (0.0, dropout_p):
                calls |= {f"{backend}, p={p}": _ours(causal, p, backend) for backend in backends.split(",")}
                calls[f"torch flash, p={p}"] = _torchs(causal, p)
            for direction, times in _times(calls, *tensors, seconds).items():
                shown = ", ".join(f"{name}: {1000 * time.median_ms:.0f} us" for name, time in times.items())
                print(f"{shape}{', causal' if causal else ''}, {direction}: {shown}", flush=True)


if __name__ == "__main__":
    main()
