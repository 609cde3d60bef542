"""python -m bench.flex: masks and scores of callers, beside torch's flex_attention as Triton compiles it.

Both get the same function and block mask. They take turns, forward and backward each alone, with a cold L2; beside the
times stands how far results are apart, in shares of the largest element. The first line is what one call of ours takes
on the host, on a problem too small to keep a GPU busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import click
import torch
import torch._dynamo.config
import torch._functorch.config
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

import fa4
from fa4.flex import flex_attention

from .overhead import host_times
from .timing import measure_in_turns

HEADS, HEAD_DIM, DOCUMENTS = 16, 128, 12
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Made = tuple[Callable | None, Callable | None]  # score_mod, mask_mod


def documents(tokens: int) -> Made:
    """Causal attention within documents of random lengths."""
    generator = torch.Generator().manual_seed(tokens)
    ends = torch.randperm(tokens - 1, generator=generator)[: DOCUMENTS - 1].sort().values + 1
    document = torch.bucketize(torch.arange(tokens), ends, right=True).to(_DEVICE, torch.int32)
    return None, fa4.masks.both(fa4.masks.causal, fa4.masks.documents(document))


def window(tokens: int) -> Made:
    """The eighth of the tokens that came last."""
    return None, fa4.masks.sliding_window(tokens // 8)


def alibi(tokens: int) -> Made:
    return fa4.scores.alibi(fa4.scores.alibi_slopes(HEADS, _DEVICE)), fa4.masks.causal


def causal(tokens: int) -> Made:
    return None, fa4.masks.causal


def slopes(tokens: int) -> Made:
    """ALiBi whose slopes are learned."""
    learned = fa4.scores.alibi_slopes(HEADS, _DEVICE).requires_grad_()
    return fa4.scores.alibi(learned), fa4.masks.causal


def bias(tokens: int) -> Made:
    """A learned number for each pair of each head: as large as the scores, no problem for many tokens."""
    learned = torch.zeros(1, HEADS, tokens, tokens, device=_DEVICE, requires_grad=True)
    return fa4.scores.bias(learned), fa4.masks.causal


PROBLEMS = {f.__name__: f for f in (documents, window, alibi, causal, slopes, bias)}
_USUAL = "documents,window,alibi,causal"


def _difference(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).abs().max() / b.abs().max())


def _rows(name: str, tokens: int, seconds: float, backend: str, compiled: Callable) -> Iterator:
    score_mod, mask_mod = PROBLEMS[name](tokens)
    block_mask = torchs.create_block_mask(mask_mod, None, None, tokens, tokens, device=_DEVICE)
    generator = torch.Generator(_DEVICE).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator, device=_DEVICE, dtype=torch.bfloat16)
        for _ in range(4)
    )

    def ours() -> Tensor:
        return flex_attention(q, k, v, score_mod, block_mask, backend=backend)

    def theirs() -> Tensor:
        return compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)

    apart = _difference(ours(), theirs())
    yield "forward", measure_in_turns({"fa4": ours, "torch": theirs}, q.device, seconds=seconds), apart
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = {"fa4": ours(), "torch": theirs()}  # gradients of what is captured are computed as well
    backwards = {
        who: lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True) for who, out in outs.items()
    }
    apart = max(_difference(a, b) for a, b in zip(*(run() for run in backwards.values())))
    yield "backward", measure_in_turns(backwards, q.device, seconds=seconds), apart


@click.command(help=__doc__)
@click.option("--tokens", default="4096,16384,32768", show_default=True)
@click.option("--problems", default=_USUAL, show_default=True, help=f"Of {', '.join(PROBLEMS)}.")
@click.option("--seconds", default=0.3, show_default=True, help="For each time.")
@click.option("--backend", default="auto", show_default=True)
def main(tokens: str, problems: str, seconds: float, backend: str) -> None:
    torch._functorch.config.donated_buffer = False  # one graph is differentiated many times here
    torch._dynamo.config.cache_size_limit = 64
    print(_host(backend), flush=True)
    table = Table("function", "tokens", "direction", "fa4, ms", "torch, ms", "torch / fa4", "apart")
    ratios = []
    for count in map(int, tokens.split(",")):
        for name in problems.split(","):
            compiled = torch.compile(torchs.flex_attention, dynamic=False)
            for direction, times, apart in _rows(name, count, seconds, backend, compiled):
                ours, theirs = times["fa4"].median_ms, times["torch"].median_ms
                ratios.append(theirs / ours)
                cells = name, str(count), direction, f"{ours:.3f}", f"{theirs:.3f}", f"{ratios[-1]:.2f}", f"{apart:.1e}"
                table.add_row(*cells)
                print(*cells, flush=True)
    Console(width=110).print(table)
    print(f"geometric mean of torch / fa4: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")


def _host(backend: str) -> str:
    """Microseconds of one call."""
    q = torch.randn(1, HEADS, 128, HEAD_DIM, device=_DEVICE, dtype=torch.bfloat16)
    score_mod, mask_mod = alibi(128)
    block_mask = torchs.create_block_mask(mask_mod, None, None, 128, 128, device=_DEVICE)
    leaf = q.clone().requires_grad_()

    def forward() -> None:
        flex_attention(q, q, q, score_mod, block_mask, backend=backend)

    def both() -> None:
        flex_attention(leaf, leaf, leaf, score_mod, block_mask, backend=backend).backward(q)

    times = host_times({"forward": forward, "both directions": both}, calls=50, rounds=8)
    return "host, us: " + ", ".join(f"{name} {1000 * time.median_ms:.0f}" for name, time in times.items())


if __name__ == "__main__":
    main()
