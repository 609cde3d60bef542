"""python -m bench.sparse: attention to listed keys, beside dense attention and torch's flex_attention.

Each query lists keys drawn at random of all that come before it (with a cache of keys before the first query, so that
all lists are full), or each block of 128 queries lists blocks of 128 keys. `dense` is fa4 over all keys, causal.
`flex` is torch's flex_attention with the same blocks, compiled by Triton. Results of some queries are compared with a
float32 formula on the listed keys; `error` is the largest difference, in shares of the largest element. TFLOP/s count
the listed pairs alone; a backward counts 2.5 times its forward. `share` is the speed-up over dense, divided by dense's
pairs over the listed ones.

Cases of latents (MLA: v is the first 512 columns of k) are forwards alone. `rested` is a few calls after a rest, before
the power limit lowers the clock.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch import Tensor

import fa4

from .machine import commit, facts
from .timing import Timing, captured, measure_in_turns, measure_rested

_SAMPLE = 16  # queries whose results are compared
_RESTS = dict(rest=0.3, runs=8, rounds=5)
_PRODUCT = 8192  # rows and columns
_PUBLISHED = 640  # TFLOP/s of latents "on H800 SXM5": FlashMLA's README


class SparseCase(NamedTuple):
    """chosen: keys of a list, in blocks of `granularity`; per: see `fa4.sparse_attention`. latent: v is that many first
    columns of k."""

    name: str
    queries: int
    keys: int
    heads: int
    heads_kv: int
    head_dim: int
    chosen: int
    granularity: int = 1
    per: str = "token"
    latent: int | None = None

    @property
    def flops(self) -> int:
        columns = self.head_dim + (self.latent or self.head_dim)
        return 2 * self.queries * self.heads * self.chosen * columns

    @property
    def dense_pairs(self) -> int:
        """Of a head, causal."""
        return self.queries * self.keys - self.queries * (self.queries - 1) // 2

    def lists(self, device: torch.device) -> Tensor:
        """Random lists of blocks that all queries of the list see whole."""
        n = self.chosen // self.granularity
        first = (self.keys - self.queries) // self.granularity
        step = self.granularity if self.per == "block" else 1
        count, lists = -(-self.queries // step), 1 if self.per == "block" else self.heads_kv
        drawn = [torch.rand(lists, first, device=device).argsort(-1)[:, :n] for _ in range(count)]
        return torch.stack(drawn)[None].int().contiguous()


CASES = {
    case.name: case
    for case in (
        SparseCase("128 heads a list", 4096, 32768, 128, 1, 128, 2048),
        SparseCase("128 heads a list, 128k", 4096, 131072, 128, 1, 128, 2048),
        SparseCase("64 heads a list", 4096, 32768, 64, 1, 128, 2048),
        SparseCase("16 heads a list", 4096, 32768, 64, 4, 128, 2048),
        SparseCase("12 heads, blocks of 4, d256", 4096, 32768, 24, 2, 256, 2048, 4),
        SparseCase("16 heads, blocks of 64", 4096, 32768, 64, 4, 128, 2048, 64),
        SparseCase("latents, 8k", 4096, 8192, 128, 1, 576, 2048, latent=512),
        SparseCase("latents, 32k", 4096, 32768, 128, 1, 576, 2048, latent=512),
        SparseCase("latents, 128k", 4096, 131072, 128, 1, 576, 2048, latent=512),
        SparseCase("blocks of 128 queries and keys", 16384, 32768, 16, 16, 128, 2048, 128, "block"),
    )
}


class Row(NamedTuple):
    """times: of (provider, direction), milliseconds."""

    case: SparseCase
    times: dict[str, Timing]
    error: float


def expected(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, case: SparseCase, queries: Tensor) -> Tensor:
    """The formula for some queries, (queries, heads, head_dim) float32."""
    step = case.granularity if case.per == "block" else 1
    rows = indices[0, queries // step].long()[..., None] * case.granularity
    rows = (rows + torch.arange(case.granularity, device=q.device)).flatten(2)
    rows = rows.expand(-1, case.heads_kv, -1)
    head = torch.arange(case.heads_kv, device=q.device)[:, None]
    keys, values = (x[0].float()[rows, head] for x in (k, v))
    of_heads = q[0, queries].float().unflatten(1, (case.heads_kv, -1))
    p = torch.softmax(of_heads @ keys.transpose(-1, -2) * case.head_dim**-0.5, -1)
    return (p @ values).flatten(1, 2)


def measure_latents(case: SparseCase, seconds: float, graphs: bool, device: torch.device, size: int = _PRODUCT) -> Row:
    """Time the forward of a case of latents, beside the product of two matrices of so many rows and columns."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    q, k = (normal(1, rows, heads, case.head_dim) for rows, heads in ((case.queries, case.heads), (case.keys, 1)))
    v, indices = k[..., : case.latent], case.lists(device)
    a, b = (normal(size, size) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {
        "fa4 forward": lambda: fa4.sparse_attention(q, k, v, indices, causal=True),
        "product forward": lambda: a @ b,
    }
    with torch.no_grad():
        sample = torch.randperm(case.queries, generator=generator, device=device)[:_SAMPLE]
        out, exact = fa4.sparse_attention(q, k, v, indices, causal=True), expected(q, k, v, indices, case, sample)
        error = float((out[0, sample].float() - exact).abs().max() / exact.abs().max())
        if graphs:
            calls = {name: _replay(call) for name, call in calls.items()}
        times = {
            name.replace("forward", "rested"): measure_rested(call, device, **_RESTS) for name, call in calls.items()
        }
        return Row(case, measure_in_turns(calls, device, seconds=seconds) | times, error)


def measure(case: SparseCase, seconds: float, with_flex: bool, graphs: bool, device: torch.device) -> Row:
    """Time the providers of a case, in turns. graphs: time replays of CUDA graphs, without a host."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(1, rows, heads, case.head_dim, generator=generator, device=device, dtype=torch.bfloat16)

    q, dout = (normal(case.queries, case.heads) for _ in range(2))
    k, v = (normal(case.keys, case.heads_kv) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    indices = case.lists(device)
    named = dict(granularity=case.granularity, per=case.per, causal=True)

    calls: dict[str, Callable[[], Tensor]] = {
        "fa4": lambda: fa4.sparse_attention(q, k, v, indices, **named),
        "deterministic": lambda: fa4.sparse_attention(q, k, v, indices, deterministic=True, **named),
        "dense": lambda: fa4.flash_attn_func(q, k, v, causal=True),
    }
    if with_flex and case.per == "block":
        calls["flex"] = _flex(q, k, v, indices, case)
    outs = {who: call() for who, call in calls.items()}
    sample = torch.randperm(case.queries, generator=generator, device=device)[:_SAMPLE]
    exact = expected(q, k, v, indices, case, sample).detach()
    of_lists = [who for who in outs if who != "dense"]
    error = max(
        float((outs[who].detach()[0, sample].float() - exact).abs().max() / exact.abs().max()) for who in of_lists
    )

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    found = {who: gradients(out) for who, out in outs.items()}
    for who in of_lists:
        for got, other in zip(found[who], found["fa4"]):
            error = max(error, float((got.float() - other.float()).abs().max() / other.float().abs().max()))
    forwards = {f"{who} forward": _without_gradients(call) for who, call in calls.items() if who != "deterministic"}
    backwards = {f"{who} backward": lambda out=out: gradients(out) for who, out in outs.items()}
    times: dict[str, Timing] = {}
    for functions in (forwards, backwards):
        if graphs:
            functions = {name: _replay(function) for name, function in functions.items()}
        times |= measure_in_turns(functions, device, seconds=seconds)
    return Row(case, times, error)


def _replay(function: Callable[[], object]) -> Callable[[], object]:
    function()
    replay, kept = captured(function, torch.cuda.current_stream())
    return lambda: (replay(), kept)


def _without_gradients(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return torch.no_grad()(call)


def _flex(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, case: SparseCase) -> Callable[[], Tensor]:
    """torch's flex_attention on the same blocks."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def block_mask() -> BlockMask:
        blocks, columns = indices.shape[1], case.keys // case.granularity
        table = torch.zeros(1, 1, blocks, columns, dtype=torch.uint8, device=q.device)
        table.scatter_(3, indices.transpose(1, 2).long(), 1)
        order = torch.argsort(table, dim=-1, descending=True, stable=True).int()
        none = torch.zeros(1, 1, blocks, dtype=torch.int32, device=q.device)
        return BlockMask.from_kv_blocks(
            none, torch.zeros_like(order), table.sum(-1, dtype=torch.int32), order, BLOCK_SIZE=case.granularity,
            seq_lengths=(case.queries, case.keys),
        )  # fmt: skip

    def call() -> Tensor:
        mask = block_mask()  # of other lists in each step of a model
        out = compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def fields(row: Row) -> dict:
    """A row as JSON has it: medians and quartiles in milliseconds, and TFLOP/s of the listed pairs."""
    case, rates, shares = row.case, {}, {}
    for name, time in row.times.items():
        who, direction = name.split()
        flops = case.flops * (2.5 if direction == "backward" else 1)
        if who == "product":
            flops = 2 * _PRODUCT**3
        rates[name] = flops / time.median_ms / 1e9
        if case.latent is None and who in ("fa4", "deterministic"):
            dense = row.times[f"dense {direction}"].median_ms
            shares[name] = dense / time.median_ms / (case.dense_pairs / (case.queries * case.chosen))
    times = {name: [time.median_ms, time.q25_ms, time.q75_ms] for name, time in row.times.items()}
    return dict(case=case._asdict(), ms=times, tflops=rates, share=shares, error=row.error)


_COLUMNS = {"forward": ("fa4", "dense", "flex"), "backward": ("fa4", "deterministic", "dense", "flex")}


_PACKAGES = "fa4", "flash-attn-4", "cudnn-frontend"
PREDICTED = (
    *(("fwd", name, 128) for name in _PACKAGES[:2]),  # cuDNN has no forward for 128 heads
    *(("fwd", name, 64) for name in _PACKAGES),
    *(("bwd", name, heads) for heads in (128, 64) for name in _PACKAGES),
)  # direction, provider, heads


def predicted() -> Iterator[dict]:
    """Predict attention to latents on a B200: 4096 queries, lists of 2048 of 32768 keys. Rows as JSON has them."""
    from fa4.emulator.latent_gradients import predict_latent_gradients
    from fa4.emulator.latents import Latents, predict_latents

    for direction, provider, heads in PREDICTED:
        problem = Latents(1, 4096, 2048, causal=False, heads=heads, cached=32768)
        about = dict(machine=dict(device="B200, predicted"), direction=direction, provider=provider)
        about |= dict(problem=asdict(problem))
        try:
            found = (predict_latents if direction == "fwd" else predict_latent_gradients)(problem, provider)
        except ImportError as error:
            yield about | dict(skipped=str(error))
            continue
        rates = dict(tflops=found.tflops, cycles=found.cycles, bound=found.bound, issue_model=found.times[0].source)
        yield about | rates


def predicted_table(rows: list[dict]) -> str:
    """Such rows as markdown."""
    lines = ["| direction | heads of a list | package | predicted TFLOP/s | bound |", "|---|--:|---|--:|---|"]
    for row in rows:
        rate = f"{row['tflops']:.0f} | {row['bound']}" if "tflops" in row else f"| {row['skipped']}"
        lines.append(f"| {row['direction']} | {row['problem']['heads']} | {row['provider']} | {rate} |")
    return "\n".join(lines)


def table(rows: list[dict]) -> str:
    """Rows of a file as markdown: predicted ones; or those of lists, then those of latents."""
    if "provider" in rows[0]:
        return predicted_table(rows)
    parts: tuple[list[dict], list[dict]] = ([], [])
    for row in rows:
        parts[SparseCase(**row["case"]).latent is not None].append(row)
    return "\n\n".join(show(part) for show, part in zip((lists_table, latents_table), parts) if part)


def lists_table(rows: list[dict]) -> str:
    names = [f"{who} {direction}" for direction, columns in _COLUMNS.items() for who in columns]
    shares = "fa4 forward", "fa4 backward", "deterministic backward"
    head = [
        "lists",
        *(name.replace("fa4 ", "") for name in names),
        *(f"share, {x.removeprefix('fa4 ')}" for x in shares),
    ]
    lines = [f"| {' | '.join((*head, 'error'))} |", "|---|" + "--:|" * len(head)]
    for row in rows:
        case = SparseCase(**row["case"])
        cells = [f"{case.name}; {case.queries} of {case.keys}"]
        cells += [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for name in names]
        cells += [f"{row['share'][name]:.2f}" for name in shares]
        lines.append(f"| {' | '.join((*cells, format(row['error'], '.1e')))} |")
    return "\n".join(lines)


def latents_table(rows: list[dict]) -> str:
    """Of calls in a row, and of a few after a rest."""
    columns = "fa4 forward", "fa4 rested", "product forward", "product rested"
    head = "keys", "ms", "TFLOP/s", "after a rest", "matrix product", "after a rest", "of 640, after a rest", "error"
    lines = [f"| {' | '.join(head)} |", "|" + "--:|" * len(head)]
    for row in rows:
        rates = [row["tflops"][name] for name in columns]
        cells = [str(row["case"]["keys"]), f"{row['ms']['fa4 forward'][0]:.2f}", *(f"{rate:.0f}" for rate in rates)]
        lines.append(f"| {' | '.join((*cells, f'{rates[1] / _PUBLISHED:.2f}', format(row['error'], '.1e')))} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--cases", default=",".join(CASES), help="Names, each up to a comma.", show_default=True)
@click.option("--seconds", default=0.3, show_default=True, help="For each time.")
@click.option("--flex/--no-flex", default=True, show_default=True)
@click.option("--graphs/--no-graphs", default=True, show_default=True, help="Time replays of CUDA graphs.")
@click.option("--out", type=click.Path(dir_okay=False), help="Add rows to a file, lines of JSON.")
@click.option("--show", type=click.Path(exists=True), help="Measure nothing; print the table of this file's rows.")
@click.option("--predict", is_flag=True, help="Measure nothing; predict latents on a B200, beside installed packages.")
def main(
    cases: str, seconds: float, flex: bool, graphs: bool, out: str | None, show: str | None, predict: bool
) -> None:
    if show is not None:
        print(table([json.loads(line) for line in Path(show).read_text().splitlines()]))
        return
    if predict:
        rows = list(predicted())
        print(table(rows))
        if out is not None:
            with Path(out).open("a") as file:
                file.writelines(json.dumps(row | dict(commit=commit())) + "\n" for row in rows)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = dict(machine=facts(device), commit=commit(), graphs=graphs)
    with torch.cuda.stream(torch.cuda.Stream()) if graphs else contextlib.nullcontext():  # one that may be captured
        for case in CASES.values():
            if case.name not in cases:
                continue
            if case.latent is not None:
                found = fields(measure_latents(case, seconds, graphs, device))
            else:
                found = fields(measure(case, seconds, flex, graphs, device))
            print(table([found]).splitlines()[-1], flush=True)
            if out is not None:
                with Path(out).open("a") as file:
                    file.write(json.dumps(found | about) + "\n")


if __name__ == "__main__":
    main()
