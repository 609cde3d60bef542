"""Command-line options that describe one attention call and its chip."""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable

import click
import torch

from ..mods.frontend.trace import Traced, trace_mask, trace_score
from ..mods.ir.graph import Graph
from ..mods.ir.record import ModSpec
from ..runtime.spec import AttentionSpec, ProblemSize

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
POSITIVE = click.IntRange(min=1)


class ChipNumber(click.ParamType):
    """Click type of a chip: its target, or 10 * major + minor of its compute capability."""

    name = "chip"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(?:sm_)?(\d+)[af]?", str(value))
        if match is None:
            self.fail(f"{value!r} is not a chip, expected a target such as sm_90a, or its number, 90", param, ctx)
        return int(match[1])


_PROBLEM = (
    click.option("--batch", default=1, type=POSITIVE, show_default=True),
    click.option(
        "--seqlen-q", "--seqlen", default=4096, type=POSITIVE, show_default=True, help="Of varlen, the longest."
    ),
    click.option("--seqlen-k", default=None, type=POSITIVE, help="Default: seqlen_q."),
    click.option("--heads-q", default=16, type=POSITIVE, show_default=True),
    click.option("--heads-kv", default=None, type=POSITIVE, help="Default: as many as query heads."),
    click.option("--head-dim", default=128, type=POSITIVE, show_default=True),
    click.option("--head-dim-v", default=None, type=POSITIVE, help="Default: head_dim."),
    click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True),
    click.option("--causal", is_flag=True),
    click.option(
        "--window-size",
        nargs=2,
        type=click.IntRange(min=-1),
        default=(-1, -1),
        show_default=True,
        help="Left and right; -1 is open.",
    ),
    click.option("--softcap", default=0.0, type=click.FloatRange(min=0), show_default=True),
    click.option("--sink", is_flag=True, help="With a learnable sink."),
    click.option("--varlen", is_flag=True, help="Packed sequences."),
    click.option("--seqused", is_flag=True, help="With seqused_q and seqused_k (varlen)."),
    click.option("--backward", is_flag=True, help="Gradients are needed."),
    click.option("--deterministic", is_flag=True),
    click.option("--score-mod", help="MODULE:NAME of a function, or of one that makes it: fa4.scores:softcap(20.0)."),
    click.option("--mask-mod", help="Likewise: fa4.masks:causal."),
    click.option("--block-size", type=POSITIVE, help="The mask_mod comes with a block_mask of such blocks."),
    click.option("--dropout", default=0.0, type=click.FloatRange(0, 1), show_default=True),
    click.option("--backend", default="auto", show_default=True),
)


def problem_options(command):
    """Add the options that describe one attention call to a command."""
    for option in reversed(_PROBLEM):
        command = option(command)
    return command


def problem_from_options(shape: dict) -> tuple[AttentionSpec, ProblemSize]:
    """Return the spec and size that these options describe.

    Raises:
        click.BadParameter: the options contradict each other.
    """
    if not math.isfinite(shape["softcap"]):
        raise click.BadParameter("expected a finite number", param_hint="--softcap")
    heads_q, heads_kv = shape["heads_q"], shape["heads_kv"] or shape["heads_q"]
    if heads_q % heads_kv:
        raise click.BadParameter(f"{heads_kv} does not divide {heads_q} query heads", param_hint="--heads-kv")
    mods = _mods(shape)
    left, right = (None if side == -1 else side for side in shape["window_size"])
    spec = AttentionSpec(
        dtype=DTYPES[shape["dtype"]],
        head_dim=shape["head_dim"],
        head_dim_v=shape["head_dim_v"] or shape["head_dim"],
        heads_q=heads_q,
        heads_kv=heads_kv,
        softmax_scale=shape["head_dim"] ** -0.5,
        window_left=left,
        window_right=0 if shape["causal"] else right,
        softcap=shape["softcap"],
        has_sink=shape["sink"],
        varlen=shape["varlen"] or shape["seqused"],
        has_seqused_q=shape["seqused"],
        has_seqused_k=shape["seqused"],
        deterministic=shape["deterministic"],
        needs_backward=shape["backward"] or bool(mods and mods.trained),
        mods=mods,
    )
    return spec, ProblemSize(shape["batch"], shape["seqlen_q"], shape["seqlen_k"] or shape["seqlen_q"])


def _mods(shape: dict) -> ModSpec | None:
    """Return the functions, blocks and dropout that the options name.

    Raises:
        click.BadParameter: a function does not exist or cannot be traced, or the options contradict each other.
    """
    if shape["score_mod"] and shape["softcap"]:
        raise click.BadParameter("--softcap is given too, expected one of both", param_hint="--score-mod")
    if shape["block_size"] and not shape["mask_mod"]:
        raise click.BadParameter("is given without --mask-mod", param_hint="--block-size")
    if shape["block_size"] and (shape["causal"] or shape["window_size"] != (-1, -1)):
        raise click.BadParameter(
            "--causal or --window-size is given too: the mask_mod says it", param_hint="--block-size"
        )
    score = _graph("--score-mod", shape["score_mod"], trace_score)
    mask = _graph("--mask-mod", shape["mask_mod"], trace_mask)
    block = (shape["block_size"],) * 2 if shape["block_size"] else None
    trained = () if score is None else tuple(sorted({scatter.tensor for scatter in score.scatters}))
    mods = ModSpec(score, mask, block, trained=trained, dropout=shape["dropout"] > 0)
    return None if mods == ModSpec() else mods


def _graph(option: str, path: str | None, trace: Callable[[Callable], Traced]) -> Graph | None:
    """Trace the function that MODULE:NAME or MODULE:NAME(numbers) names."""
    if path is None:
        return None
    module, _, expression = path.partition(":")
    try:
        expr = ast.parse(expression, mode="eval").body
        name = expr.func if isinstance(expr, ast.Call) else expr
        function = getattr(importlib.import_module(module), ast.unparse(name))
        if isinstance(expr, ast.Call):
            function = function(*map(ast.literal_eval, expr.args))
        return trace(function).graph
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise click.BadParameter(f"{path!r}: {error}", param_hint=option) from None
