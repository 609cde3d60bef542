"""python -m bench.serve: tokens a second of the server of examples/serve.py, with fa4, torch's SDPA or flash-attn-4.

Random weights; prompts have a common front. The server, its batches and its projections are the same;
what differs is how a layer writes keys and values and attends. A run counts new tokens only, from the first step to the
last, after a run that compiles. Rows, one for each attention and way to launch, are appended to --out.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fa4.cli.demo import ModelConfig, Transformer

from . import machine


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Each request has front + rest tokens of prompt, front of them the same, and `new` to come. They arrive together,
    one step after the first."""

    requests: int = 64
    front: int = 1024
    rest: int = 512
    new: int = 128

    @property
    def longest(self) -> int:
        return self.front + self.rest + self.new


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve", Path(__file__).parents[1] / "examples" / "serve.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Separate:
    """Attention that rotates, and writes keys and values to pages, by torch's operators."""

    def __init__(self, config: ModelConfig, pages: int, size: int, positions: int, device: torch.device) -> None:
        shape = 2, config.layers, pages, size, config.heads_kv, config.head_dim
        self.k, self.v = torch.zeros(shape, dtype=config.dtype, device=device)
        half = config.head_dim // 2
        angle = torch.arange(positions, device=device)[:, None] * 10_000 ** (-torch.arange(half, device=device) / half)
        self.cos, self.sin = angle.cos()[:, None], angle.sin()[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
        sequence = torch.searchsorted(batch.starts[1:], torch.arange(len(q), device=q.device), right=True)
        position = torch.arange(len(q), device=q.device) - batch.starts[sequence] + batch.used[sequence]
        k_pool, v_pool = self.k[layer], self.v[layer]
        page = batch.table[sequence, position // k_pool.shape[1]]
        k_pool[page, position % k_pool.shape[1]] = self._rotated(k, position)
        v_pool[page, position % k_pool.shape[1]] = v
        return self.attend(self._rotated(q, position), k_pool, v_pool, batch, sequence)

    def _rotated(self, x: Tensor, position: Tensor) -> Tensor:
        cos, sin = self.cos[position], self.sin[position]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, sequence: Tensor) -> Tensor:
        raise NotImplementedError


class Sdpa(_Separate):
    """torch's scaled_dot_product_attention, which has no pages: keys are gathered, shorter sequences are padded."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, sequence: Tensor) -> Tensor:
        in_sequence = torch.arange(len(q), device=q.device) - batch.starts[sequence]
        pages = batch.table[:, : -(-batch.keys // k.shape[1])]
        keys, values = (x[pages].flatten(1, 2).transpose(1, 2) for x in (k, v))
        padded = q.new_zeros(len(batch.used), batch.longest, *q.shape[1:])
        padded[sequence, in_sequence] = q
        last = batch.used[:, None] + torch.arange(batch.longest, device=q.device)
        mask = torch.arange(keys.shape[2], device=q.device) <= last[:, None, :, None]
        out = F.scaled_dot_product_attention(padded.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)[sequence, in_sequence]


class FlashAttn4(_Separate):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, sequence: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=batch.starts, max_seqlen_q=batch.longest, page_table=batch.table, causal=True,
            seqused_k=batch.used + (batch.starts[1:] - batch.starts[:-1]),
        )[0]  # fmt: skip


def measured(serve: ModuleType, name: str, graphs: bool, load: Load, config: ModelConfig, settings: dict) -> dict:
    """Tokens a second, and the first token of each request, to be compared."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Transformer(config).to(device, config.dtype)
    attention = {"fa4": serve.Fa4Attention, "sdpa": Sdpa, "flash-attn-4": FlashAttn4}[name]
    server = serve.Server(model, config, attention=attention, longest=load.longest, **settings)
    server.replays = graphs
    front = torch.randint(256, (load.front,)).tolist()
    seconds = 0.0
    for run in range(2):  # the first compiles; its pages with the front stay, so the second begins with another one
        start = bytes((token + run) % 256 for token in front)
        prompts = [start + bytes(torch.randint(256, (load.rest,)).tolist()) for _ in range(load.requests)]
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        requests = [server.submit(prompts[0], load.new)]
        server.step()  # the others find its prompt in the cache, as far as this step computes it
        requests += [server.submit(prompt, load.new) for prompt in prompts[1:]]
        steps = 1
        while server.running or server.waiting:
            server.step()
            steps += 1
        seconds = time.perf_counter() - began
    return dict(
        attention=name, graphs=graphs, seconds=seconds, steps=steps, tokens_per_s=load.requests * load.new / seconds,
        shared=sum(r.shared for r in requests), first_tokens=[r.tokens[r.prompt] for r in requests],
    )  # fmt: skip


def table(rows: list[dict]) -> str:
    """Markdown: new tokens a second of each attention, by calls and by graphs of the steps that only decode."""
    names = list(dict.fromkeys(row["attention"] for row in rows))
    rates = {(row["attention"], row["graphs"]): row for row in rows}

    def cell(name: str, graphs: bool) -> str:
        row = rates.get((name, graphs), {})
        return f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else row.get("error", "not run")

    lines = ["| attention | calls | CUDA graphs |", "|---|--:|--:|"]
    return "\n".join(lines + [f"| {name} | {cell(name, False)} | {cell(name, True)} |" for name in names])


@click.command(help=__doc__)
@click.option("--show", type=click.Path(exists=True, path_type=Path), help="Print the table of a file; run nothing.")
@click.option("--attention", "names", multiple=True, default=("fa4", "sdpa", "flash-attn-4"), show_default=True)
@click.option("--graphs/--no-graphs", "only", default=None, help="Only with, or without, CUDA graphs.")
@click.option("--layers", default=16, show_default=True)
@click.option("--heads", default="16,4", show_default=True, help="Of queries, and of keys and values.")
@click.option("--head-dim", default=128, show_default=True)
@click.option("--requests", default=Load().requests, show_default=True)
@click.option("--front", default=Load().front, show_default=True, help="Tokens that all prompts begin with.")
@click.option("--rest", default=Load().rest, show_default=True, help="Further tokens of a prompt.")
@click.option("--new", default=Load().new, show_default=True, help="Tokens to generate for each.")
@click.option("--page", default=64, show_default=True)
@click.option("--rows", default=4096, show_default=True, help="Most new rows of a batch.")
@click.option("--out", type=click.Path(path_type=Path), help="File to append rows to.")
def main(show, names, only, layers, heads, head_dim, requests, front, rest, new, page, rows, out) -> None:
    if show is not None:
        print(table([json.loads(line) for line in show.read_text().splitlines()]))
        return
    on_gpu, load = torch.cuda.is_available(), Load(requests, front, rest, new)
    heads_q, heads_kv = map(int, heads.split(","))
    config = ModelConfig(layers, heads_q, heads_kv, head_dim, torch.bfloat16 if on_gpu else torch.float32)
    pages = requests * -(-load.longest // page) + front // page + 2
    settings = dict(pages=pages, size=page, requests=requests, rows=rows)
    shown = Table("attention", "graphs", "new tokens/s", "steps")
    serve, expected = example(), None
    for graphs in (False, True) if only is None else (only,):
        for name in names:
            row: dict[str, Any] = {"attention": name, "graphs": graphs}
            try:
                row |= measured(serve, name, graphs, load, config, settings)
                got = torch.tensor(row.pop("first_tokens"))
                expected = got if expected is None else expected
                row["same_first_tokens"] = float((got == expected).float().mean())
            except Exception as error:  # a package's failure must not end the run; the row has it
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            rate = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else row["error"]
            shown.add_row(name, str(graphs), rate, str(row.get("steps", "")))
            if out is not None:
                shape = dict(layers=layers, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, page=page, rows=rows)
                stamp = machine.facts(torch.device("cuda" if on_gpu else "cpu"))
                date = datetime.date.today().isoformat()
                with out.open("a") as file:
                    file.write(json.dumps({**row, **dataclasses.asdict(load), **shape, "date": date, **stamp}) + "\n")
    Console().print(shown)


if __name__ == "__main__":
    main()
