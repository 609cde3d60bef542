"""python -m bench.flex: masks and scores of callers, beside torch's flex_attention as Triton compiles it.

All get the same function and block mask: ours, torch's Triton kernels, and its FLASH backend, which are flash-attn-4's
kernels, where that runs. They take turns, forward and backward each alone, with a cold L2; beside the times stands how
far results are apart, in shares of the largest element. The first line is what one call of ours takes on the host, on a
problem too small to keep a GPU busy; with --graphs, calls are replayed as CUDA graphs, without a host.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch._dynamo.config
import torch._functorch.config
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

import fa4
from fa4.api.flex import flex_attention

from .overhead import host_times
from .timing import captured, measure_in_turns

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


def dense(tokens: int) -> Made:
    """Every block, seen whole: what `sparse` is to be compared with."""
    return None, lambda b, h, q_idx, kv_idx: q_idx >= 0


def sparse(tokens: int) -> Made:
    """Each block of queries sees a tenth of the blocks of keys, whole ones, drawn."""
    count = tokens // 128
    draws = torch.rand(count, count, generator=torch.Generator().manual_seed(tokens))
    seen = (draws <= draws.kthvalue(max(count // 10, 1), dim=1, keepdim=True).values).to(_DEVICE)
    return None, lambda b, h, q_idx, kv_idx: seen[q_idx // 128, kv_idx // 128]


PROBLEMS = {f.__name__: f for f in (documents, window, alibi, causal, slopes, bias, dense, sparse)}
_USUAL = "documents,window,alibi,causal"


def _difference(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).abs().max() / b.abs().max())


def table(rows: list[dict]) -> str:
    """Rows of --out as markdown; times in milliseconds, and torch's over ours."""
    cells = {(row["function"], row["tokens"], row["direction"], row["graphs"]): row["ms"] for row in rows}
    lines = [
        "| function | tokens | forward | torch | ratio | backward | torch | ratio |",
        "|---|--:" + "|--:" * 6 + "|",
    ]
    for name, tokens, graphs in dict.fromkeys((name, tokens, graphs) for name, tokens, _, graphs in cells):
        line = [f"{name}{', as a graph' if graphs else ''}", f"{tokens // 1024}k"]
        for direction in ("forward", "backward"):
            ms = cells[name, tokens, direction, graphs]
            line += [f"{ms['fa4']:.3f}", f"{ms['torch']:.3f}", f"{ms['torch'] / ms['fa4']:.2f}"]
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines)


class Row(NamedTuple):
    """Medians in milliseconds, by provider; `apart` is ours from torch's, in shares of the largest element."""

    function: str
    tokens: int
    direction: str
    ms: dict[str, float]
    apart: float

    @property
    def ratio(self) -> float:
        """Of the faster of torch's to ours."""
        return min(ms for who, ms in self.ms.items() if who != "fa4") / self.ms["fa4"]


def _rows(name: str, tokens: int, seconds: float, backend: str, graphs: bool, peers: dict[str, Callable]) -> Iterator:
    score_mod, mask_mod = PROBLEMS[name](tokens)
    block_mask = torchs.create_block_mask(mask_mod, None, None, tokens, tokens, device=_DEVICE)
    generator = torch.Generator(_DEVICE).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator, device=_DEVICE, dtype=torch.bfloat16)
        for _ in range(4)
    )

    def ours() -> Tensor:
        return flex_attention(q, k, v, score_mod, block_mask, backend=backend)

    def of(peer: Callable) -> Callable[[], Tensor]:
        return lambda: peer(q, k, v, score_mod=score_mod, block_mask=block_mask)

    def timed(direction: str, functions: dict[str, Callable]) -> Row:
        results = {}
        for who, function in list(functions.items()):
            try:
                results[who] = function()
            except Exception as error:  # of compilers, which have many
                print(f"{name}, {direction}: no {who}: {_telling_line(error)}", flush=True)
                del functions[who]
        given = [x if isinstance(x, tuple) else (x,) for x in (results["fa4"], results["torch"])]
        apart = max(_difference(a, b) for a, b in zip(*given))
        if graphs:
            functions = {who: _replay(function) for who, function in functions.items()}
        times = measure_in_turns(functions, q.device, seconds=seconds)
        return Row(name, tokens, direction, {who: time.median_ms for who, time in times.items()}, apart)

    attends = {"fa4": ours} | {who: of(peer) for who, peer in peers.items()}
    yield timed("forward", attends)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = {}
    for who, attend in attends.items():  # gradients of what is captured are computed as well
        try:
            outs[who] = attend()
        except Exception as error:
            print(f"{name}, backward: no {who}: {_telling_line(error)}", flush=True)
    yield timed(
        "backward",
        {who: lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True) for who, out in outs.items()},
    )


def _telling_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Error" in line or "FLASH" in line), lines[0] if lines else repr(error))[
        :200
    ]


def _replay(function: Callable) -> Callable:
    replay, kept = captured(function, torch.cuda.current_stream())
    return lambda: (replay(), kept)


@click.command(help=__doc__)
@click.option("--tokens", default="4096,8192,16384,32768", show_default=True)
@click.option("--problems", default=_USUAL, show_default=True, help=f"Of {', '.join(PROBLEMS)}.")
@click.option("--seconds", default=0.3, show_default=True, help="For each time.")
@click.option("--backend", default="auto", show_default=True)
@click.option("--flash/--no-flash", default=True, show_default=True, help="With torch's FLASH backend.")
@click.option("--graphs", is_flag=True, help="Time replays of CUDA graphs.")
@click.option("--out", type=click.Path(dir_okay=False), help="Add rows to a file, lines of JSON.")
def main(tokens: str, problems: str, seconds: float, backend: str, flash: bool, graphs: bool, out: str | None) -> None:
    torch._functorch.config.donated_buffer = False  # one graph is differentiated many times here
    torch._dynamo.config.cache_size_limit = 64
    print(_host(backend), flush=True)
    columns = ["fa4", "torch", *(["flash"] if flash else [])]
    table = Table("function", "tokens", "direction", *(f"{who}, ms" for who in columns), "torch's best / fa4", "apart")
    rows = []
    with torch.cuda.stream(torch.cuda.Stream()):  # one that may be captured
        for count in map(int, tokens.split(",")):
            for name in problems.split(","):
                for row in _rows(name, count, seconds, backend, graphs, _peers(flash)):
                    rows.append(row)
                    times = [f"{row.ms[who]:.3f}" if who in row.ms else "-" for who in columns]
                    cells = name, str(count), row.direction, *times, f"{row.ratio:.2f}", f"{row.apart:.1e}"
                    table.add_row(*cells)
                    print(*cells, flush=True)
                    if out is not None:
                        about = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, graphs=graphs)
                        with Path(out).open("a") as file:
                            file.write(json.dumps(row._asdict() | about) + "\n")
    Console(width=120).print(table)
    for direction in ("forward", "backward"):
        print(f"{direction}: {_mean([row for row in rows if row.direction == direction])}")
    print(f"both: {_mean(rows)}")


def _mean(rows: list[Row]) -> str:
    mean = math.exp(sum(math.log(row.ratio) for row in rows) / len(rows))
    return f"torch's best / fa4, geometric mean {mean:.3f} of {len(rows)}"


def _peers(flash: bool) -> dict[str, Callable]:
    """torch's, compiled anew for each problem."""
    peers = {"torch": torch.compile(torchs.flex_attention, dynamic=False)}
    if flash:
        by_flash = functools.partial(torchs.flex_attention, kernel_options={"BACKEND": "FLASH"})
        peers["flash"] = torch.compile(by_flash, dynamic=False)
    return peers


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
