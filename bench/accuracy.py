"""python -m bench.accuracy: errors of attention on 8- and 4-bit numbers, for each recipe beside bfloat16, as rows and a
page.

Inputs are bfloat16. An error is the Frobenius norm of the difference to float64 attention, divided by the norm of the
latter. Gradients are straight-through: those of attention on the rounded numbers.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch import Tensor

import fa4
from fa4.cli.main import device_named
from fa4.oracle import reference
from fa4.runtime.spec import AttentionInputs, AttentionSpec, Flags, Operands, Saved
from fa4.torch_ops import low_precision, recipes
from fa4.torch_ops.descales import dequantized

from . import machine
from .compare import read_rows

RESULTS = Path("bench/results")
HEADS_Q, HEADS_KV, HEAD_DIM = 4, 2, 128
ALL_QUERIES = 2048  # up to so many tokens every token has a query
QUERIES = 128  # of longer sequences: the last ones


class Recipe(NamedTuple):
    """recipe: of `fa4.quantize`, "" for none. trained: a precision of training calls, instead of a recipe. multiplied:
    also P, dO and dS are 8-bit, as in the kernels of sm_100; with a recipe P is 4-bit, as in that of sm_120."""

    recipe: str = ""
    smooth: bool = False
    rotate: bool = False
    trained: str = ""
    multiplied: bool = False


RECIPES = {
    "bfloat16": Recipe(),
    "tensor": Recipe("tensor"),
    "head": Recipe("head"),
    "block128": Recipe("block128"),
    "mxfp8": Recipe("mxfp8"),
    "head, smooth": Recipe("head", smooth=True),
    "head, rotate": Recipe("head", rotate=True),
    "head, both": Recipe("head", smooth=True, rotate=True),
    "precision='fp8'": Recipe(trained="fp8"),
    "'fp8', 8-bit products": Recipe(trained="fp8", multiplied=True),
    "precision='mxfp8'": Recipe(trained="mxfp8"),
    "'mxfp8', 8-bit products": Recipe(trained="mxfp8", multiplied=True),
    "nvfp4": Recipe("nvfp4"),
    "nvfp4, smooth": Recipe("nvfp4", smooth=True),
    "nvfp4, both": Recipe("nvfp4", smooth=True, rotate=True),
    "nvfp4, 4-bit products": Recipe("nvfp4", multiplied=True),
}


def _normal(draw: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Independent normal numbers."""


def _outlier_channels(draw: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Four columns of k have a mean of about 20, the same for all tokens, as in models without a norm on k."""
    k[..., ::32] += 20 * draw(*k.shape[:1], 1, k.shape[2], k.shape[3] // 32)


def _sink(draw: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Every query gives most of its probability to the first key, whose value is small."""
    direction = draw(1, 1, k.shape[2], k.shape[3])
    direction = direction / direction.norm(dim=-1, keepdim=True)
    q += 12 * direction.repeat_interleave(q.shape[2] // k.shape[2], 2)
    k[:, :1] = (math.log(k.shape[1]) + 2) * math.sqrt(k.shape[3]) / 12 * direction
    v[:, :1] *= 0.01


def _long_tailed(draw: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Student's t with three degrees of freedom: rare numbers far out in any column."""
    for x in (q, k, v):
        x /= torch.stack([draw(*x.shape) for _ in range(3)]).square().mean(0).sqrt()


KINDS = {"normal": _normal, "outlier channels": _outlier_channels, "sink": _sink, "long-tailed": _long_tailed}


def drawn(kind: str, tokens: int, seed: int, device: torch.device) -> list[Tensor]:
    """q, k, v and dout in bfloat16; equal seeds give equal numbers on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    queries = tokens if tokens <= ALL_QUERIES else QUERIES
    q, dout = (draw(1, queries, HEADS_Q, HEAD_DIM) for _ in range(2))
    k, v = (draw(1, tokens, HEADS_KV, HEAD_DIM) for _ in range(2))
    KINDS[kind](draw, q, k, v)
    return [x.to(torch.bfloat16).to(device) for x in (q, k, v, dout)]


def rounded(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """q, k and v as float32 numbers that 8 bits and their scales stand for, through which gradients pass unchanged."""
    if not recipe.recipe and not recipe.trained:
        return [q.float(), k.float(), v.float()]
    results = []
    inputs = AttentionInputs(q.detach(), k.detach(), v.detach())
    trained = low_precision.rounded(inputs, recipe.trained) if recipe.trained else None
    for i, x in enumerate((q, k, v)):
        smooth, rotate = recipe.smooth and i == 1, recipe.rotate and i < 2
        if trained is not None:
            data, scales = trained[0][i], trained[1][i]
        else:
            axis = "tokens" if recipe.recipe in ("mxfp8", "nvfp4") and i == 2 else "head_dim"
            data, scales = fa4.quantize(x, recipe.recipe, axis=axis, smooth=smooth, rotate=rotate)
        x = x.float()
        x = x - x.mean(1, keepdim=True) if smooth else x
        x = recipes.rotated(x) if rotate else x
        numbers = recipes.dequantized(data, scales, torch.float32) if data.dtype == recipes.E4M3 else None
        if numbers is None:
            numbers = fa4.dequantize(data, scales, torch.float32, seqlen=x.shape[1] if i == 2 else None)
        results.append(numbers + (x - x.detach()))
    return results


def outcomes(tensors: list[Tensor], leaves: list[Tensor], dout: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """out of causal attention in dtype, and the gradients of the leaves."""
    out = fa4.flash_attn_func(*(x.to(dtype) for x in tensors), causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def outcomes_of_8_bits(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, precision: str) -> list[Tensor]:
    """The same of products of 8-bit numbers, by the reference that judges the kernels of sm_100."""
    plain = AttentionInputs(q.detach(), k.detach(), v.detach(), max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    eight, descales = low_precision.rounded(plain, precision)
    inputs = dequantized(eight, descales, torch.float32)
    flags = Flags(softmax_scale=HEAD_DIM**-0.5, window_right=0, needs_backward=True)
    spec = replace(AttentionSpec.of(inputs, flags), dtype=torch.bfloat16, operands=low_precision.PRECISIONS[precision])
    dout, operands = low_precision.gradient_operands(Saved(dout, dout, dout), eight, descales)
    out, _ = reference.forward(inputs, spec, precise=False)
    grads = reference.backward(inputs, spec, dout, precise=False, ds_factors=operands.ds_factors(spec.group))
    return [out, *grads[:3]]


def out_of_4_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out of products of 4-bit numbers, by the reference that judges the kernel of sm_120. There are no gradients."""
    inputs = AttentionInputs(q.detach(), k.detach(), v.detach(), max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    flags = Flags(softmax_scale=HEAD_DIM**-0.5, window_right=0)
    spec = replace(AttentionSpec.of(inputs, flags), dtype=torch.bfloat16, operands=Operands.NVFP4)
    return reference.forward(inputs, spec, precise=False)[0]


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def cosine(x: Tensor, exact: Tensor) -> float:
    return float((x.double() * exact).sum() / (x.double().norm() * exact.norm()))


def measured(kind: str, tokens: int, names: list[str], seed: int, device: torch.device) -> list[dict]:
    """A row for each recipe."""
    *inputs, dout = drawn(kind, tokens, seed, device)
    leaves = [x.requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = outcomes(wide, wide, dout, torch.float64)
    rows = []
    for name in names:
        tensors = rounded(RECIPES[name], *leaves)
        if RECIPES[name].multiplied and RECIPES[name].recipe:
            results = [out_of_4_bits(*tensors)]
        elif RECIPES[name].multiplied:
            results = outcomes_of_8_bits(*inputs, dout, RECIPES[name].trained)
        else:
            results = outcomes(tensors, leaves, dout, torch.bfloat16)
        with torch.no_grad():
            of_rounded = fa4.flash_attn_func(*(x.double() for x in tensors), causal=True)
        row: dict = {
            "provider": name,
            "label": f"{kind} {tokens}",
            "kind": kind,
            "seqlen_q": dout.shape[1],
            "seqlen_k": tokens,
            "seed": seed,
        }
        row |= {"heads_q": HEADS_Q, "heads_kv": HEADS_KV, "head_dim": HEAD_DIM, "causal": True}
        for of, x, y in zip(("out", "dq", "dk", "dv"), results, exact):
            row[of] = {"error": error(x, y), "cosine": cosine(x, y)}
        row["out"]["error_on_rounded"] = error(results[0], of_rounded)
        rows.append(row)
    return rows


def table(rows: list[dict], cell: Callable[[dict], str]) -> str:
    """Lines of a table: inputs by recipe."""
    names = list(dict.fromkeys(row["provider"] for row in rows))
    lines = [f"| inputs | keys | {' | '.join(names)} |", "|---|--:|" + "--:|" * len(names)]
    for kind, keys in dict.fromkeys((row["kind"], row["seqlen_k"]) for row in rows):
        of = {row["provider"]: cell(row) for row in rows if (row["kind"], row["seqlen_k"]) == (kind, keys)}
        lines.append(f"| {kind} | {keys} | {' | '.join(of.get(name, '-') for name in names)} |")
    return "\n".join(lines)


def _percent(x: float) -> str:
    return f"{100 * x:.2g}"


def page(rows: list[dict], file: str) -> str:
    """The page of docs/results."""
    places = (
        f"{row['machine']['device']}, torch {row['machine']['versions']['torch']}, {row['time'][:10]}" for row in rows
    )
    where = " and ".join(dict.fromkeys(places))
    shape = f"{HEADS_Q} query heads, {HEADS_KV} key/value heads, head_dim {HEAD_DIM}, causal"
    kinds = "\n".join(f"* {kind}: {function.__doc__}" for kind, function in KINDS.items())
    parts = [
        "# Accuracy of 8-bit and 4-bit attention",
        "What the recipes are: [FP8 attention](../fp8.md). This command measures and writes the page:\n"
        "`python -m bench.accuracy --page docs/results/fp8-accuracy.md`.",
        f"{where}; {shape}.\nSequences above {ALL_QUERIES} tokens have {QUERIES} queries, the last ones. Rows:\n"
        f"`bench/results/{file}`.\nBackend `torch`, which multiplies the dequantised numbers in 16 bits; with 8-bit "
        "products,\nwhere P, dO and dS are 8-bit, too, and 4-bit products, where P is 4-bit, the formulas of\n"
        "`fa4.oracle.reference`.",
        "An error is the Frobenius norm of the difference to float64 attention on the bfloat16 inputs, divided by the "
        "norm\nof the latter, in percent. Gradients are straight-through.",
        kinds,
        "## Error of out, percent", table(rows, lambda row: _percent(row["out"]["error"])),
        "## Errors of dq / dk / dv, percent",
        table(rows, lambda row: " / ".join(_percent(row[x]["error"]) for x in ("dq", "dk", "dv") if x in row) or "-"),
        "## Smallest cosine of out, dq, dk and dv",
        table(rows, lambda row: f"{min(row[x]['cosine'] for x in ('out', 'dq', 'dk', 'dv') if x in row):.5f}"),
        "## Error of out against float64 attention on the rounded numbers, percent",
        "What the arithmetic adds to the rounding of the inputs.",
        table(rows, lambda row: _percent(row["out"]["error_on_rounded"])),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


@click.command(help=__doc__)
@click.option("--lengths", default="1024,4096,16384,65536", show_default=True, help="Comma-separated numbers of keys.")
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Comma-separated.")
@click.option("--recipe", "names", type=click.Choice(list(RECIPES)), multiple=True, help="Again for more [all].")
@click.option("--quick", is_flag=True, help="1024 keys only.")
@click.option("--device", default=None, help="Default: cuda if there is one, else cpu.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Default: a file of bench/results; rows are appended.")
@click.option("--page", "to_page", type=click.Path(path_type=Path), help="Write the rows of the file as this page.")
@click.option("--rows", type=click.Path(exists=True, path_type=Path), help="Measure nothing; take these rows.")
def main(
    lengths: str, kinds: str, names: tuple[str, ...], quick: bool, device: str | None, seed: int, output: Path | None,
    to_page: Path | None, rows: Path | None,
) -> None:  # fmt: skip
    if rows is None:
        where, now = device_named(device), datetime.datetime.now(datetime.UTC)
        facts = machine.facts(where)
        output = output or RESULTS / f"{now:%Y-%m-%d}_{machine.slug(facts['device'])}_fp8-accuracy.jsonl"
        output.parent.mkdir(parents=True, exist_ok=True)
        common = {"suite": "accuracy", "time": now.isoformat(timespec="seconds"), "machine": facts}
        counts = [1024] if quick else [int(n) for n in lengths.split(",")]
        for kind, tokens in itertools.product(kinds.split(","), counts):
            found = measured(kind, tokens, list(names or RECIPES), seed, where)
            with output.open("a") as file:
                file.writelines(json.dumps(common | row) + "\n" for row in found)
            click.echo(table(found, lambda row: _percent(row["out"]["error"])))
        click.echo(f"rows appended to {output}")
        rows = output
    if to_page is not None:
        to_page.write_text(page(read_rows(rows), rows.name))


if __name__ == "__main__":
    main()
