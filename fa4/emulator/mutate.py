"""Would a missing synchronisation of fa4's own kernels be noticed?

    python -m fa4.emulator.mutate fwd|bwd [--seqlen 256 --causal ...]

As `warpcheck mutate` does for any kernel. --seqlen given again is a further shape of the same kernel, tried in turn on
each mutant.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from warpcheck.options import CHIP, COUNT, SIDE_OF_WINDOW
from warpcheck.tools.mutate import Judging, judging
from warpcheck.tools.recording import Recorder

import fa4
from fa4.oracle import cases

LATENT = 576, 512
E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu  # as the dtype of a case: e4m3 with scales of blocks
E2M1 = torch.float4_e2m1fn_x2  # likewise: NVFP4


def _of_blocks(tensors: tuple[torch.Tensor, ...], recipe: str) -> dict[str, torch.Tensor]:
    """q, k and v with scales of blocks, as arguments of a call."""
    arguments = dict[str, torch.Tensor]()
    for name, (data, scales) in zip("qkv", cases.in_blocks(recipe, *tensors)):
        arguments |= {name: data, f"{name}_descale": scales}
    return arguments


def _record(direction: str, case: cases.Case, chip: str, sms: int, folder: Path) -> None:
    from fa4.emulator import emulate

    is_8bit = case.dtype in (E4M3, E8M0)
    is_low = is_8bit or case.dtype == E2M1
    problem = cases.make(dataclasses.replace(case, dtype=torch.bfloat16) if is_low else case, seed=0)
    operands = {name: x.to(E4M3) for name, x in zip("qkv", problem.inputs[:3])} if is_8bit else {}
    if case.dtype in (E8M0, E2M1):
        operands = _of_blocks(problem.inputs[:3], "mxfp8" if case.dtype == E8M0 else "nvfp4")
    with emulate(chip, sms=sms) as gpu:
        if (case.head_dim, case.head_dim_v) == LATENT:
            q, k = problem.inputs.q, problem.inputs.k
            Recorder(gpu, folder, case.name)
            options: dict[str, Any] = dict(softmax_scale=case.head_dim**-0.5, causal=case.causal, num_splits=1)
            if is_8bit:
                k, one = k.to(E4M3), torch.ones(())
                options |= dict(k_descale=one, v_descale=one)
            fa4.flash_attn_with_kvcache(q, k, k[..., : case.head_dim_v], **options)
        elif direction == "fwd":
            Recorder(gpu, folder, case.name)
            problem.call(**operands)
        else:
            leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.tensors().items()}
            precision = {E4M3: "fp8", E8M0: "mxfp8"}.get(case.dtype)
            out, _ = problem.call(**leaves, precision=precision)
            Recorder(gpu, folder, case.name)
            torch.autograd.grad(out, list(leaves.values()), problem.dout)


def cases_of(
    direction: str, lengths: tuple[tuple[int, int], ...], named: tuple[str, ...], **flags: Any
) -> list[cases.Case]:
    """The shapes that the options say. flags: of a case; heads_kv may be None, as many as heads_q, and window_size;
    latent: of a cache of latents. e4m3: of such tensors. mxfp8: of such with scales of blocks. nvfp4: of such of 4
    bits."""
    for name, dtype in (("e4m3", E4M3), ("mxfp8", E8M0), ("nvfp4", E2M1)):
        if flags.pop(name, False):
            flags["dtype"] = dtype
    if flags.pop("latent", False):
        flags |= dict(zip(("head_dim", "head_dim_v", "heads_kv"), (*LATENT, 1)))
    flags["heads_kv"] = flags["heads_kv"] or flags["heads_q"]
    flags["window_size"] = flags["window_size"] or (None, None)
    asked = lengths or (() if named else ((256, 256),))
    drawn = [cases.Case(f"{direction} {q}x{k}", seqlen_q=q, seqlen_k=k, **flags) for q, k in asked]
    return drawn + [dataclasses.replace(cases.CASES[name], name=f"{direction} {name}") for name in named]


class _Lengths(click.ParamType):
    """`seqlen_q` or `seqlen_qXseqlen_k`."""

    name = "QxK"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", str(value))
        if match is None:
            self.fail(f"{value!r}: expected a length such as 256, or queries and keys such as 256x100", param, ctx)
        return int(match[1]), int(match[2] or match[1])


@click.command(help=__doc__)
@click.argument("direction", type=click.Choice(["fwd", "bwd"]))
@click.option("--seqlen", "lengths", type=_Lengths(), multiple=True,
              help="Given again, a further shape [default: 256, without --case].")  # fmt: skip
@click.option("--case", "named", type=click.Choice(list(cases.CASES)), multiple=True, metavar="NAME",
              help="A named case of fa4.oracle.cases; may be repeated.")  # fmt: skip
@click.option("--head-dim", type=COUNT, default=128, show_default=True)
@click.option("--heads", "heads_q", type=COUNT, default=1, show_default=True)
@click.option("--heads-kv", type=COUNT, help="Of keys and values [default: as many as of queries].")
@click.option("--causal", is_flag=True)
@click.option("--latent", is_flag=True, help="A cache of latents: v is the memory of k's first columns.")
@click.option("--e4m3", is_flag=True, help="Products of e4m3; with --latent, a cache of e4m3.")
@click.option("--mxfp8", is_flag=True, help="Products of e4m3 with scales of blocks.")
@click.option("--nvfp4", is_flag=True, help="Products of e2m1 with scales of blocks; forwards.")
@click.option("--window", "window_size", type=(SIDE_OF_WINDOW, SIDE_OF_WINDOW), help="Left and right; -1 is open.")
@click.option("--logits", default=1.0, show_default=True, help="Factor on q: large ones make rows be rescaled.")
@click.option("--deterministic", is_flag=True)
@click.option("--chip", type=CHIP, default="sm_100a", show_default=True)
@judging
def main(direction: str, chip: str, judging: Judging, **shape: Any) -> None:
    judging.run([partial(_record, direction, case, chip, judging.sms) for case in cases_of(direction, **shape)])


if __name__ == "__main__":
    main()
