"""python -m bench.cache_accuracy: errors of attention on key/value caches of 16, 8 and 4 bits, as a table in Markdown.

Inputs are those of `bench.accuracy`, queries the last 128. An error is the Frobenius norm of the difference to float64
attention on the bfloat16 numbers, divided by the norm of the latter; a cell has the geometric mean over seeds. Factors
of 8 bits are for a sequence and head, of all its tokens: an append that is given them in advance does no better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import click
import torch
from torch import Tensor

import fa4
from fa4.cli.main import device_named
from fa4.oracle import reference
from fa4.runtime import nvfp4
from fa4.runtime.spec import AttentionInputs, AttentionSpec, Flags
from fa4.torch_ops import recipes

from .accuracy import HEAD_DIM, KINDS, drawn

LARGEST_INT8 = 127
_LLOYD_MAX = 0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326  # magnitudes
Stored = tuple[Tensor, Tensor | None]  # numbers of a cache, and their factors or scales


class CacheKind(NamedTuple):
    """store: from k or v to what the cache has. bytes_of_number: with its part of the scales. is_smooth: the mean of k
    over the tokens is subtracted before, which adds a constant to all scores of a query. is_rotated: q, k and v are
    multiplied by the matrix of `fa4.quantize(..., rotate=True)` before, and so is the exact out."""

    store: Callable[[Tensor], Stored]
    bytes_of_number: float
    is_smooth: bool = False
    is_rotated: bool = False


def _int8(x: Tensor) -> Stored:
    factors = x.float().abs().amax((1, 3)) / LARGEST_INT8
    return (x.float() / factors[:, None, :, None]).round().to(torch.int8), factors


def _nvfp4(x: Tensor) -> Stored:
    return tuple(fa4.quantize(x, "nvfp4"))


def _levels(x: Tensor) -> Stored:
    """Of a cache that fa4 does not have: the root mean square of a row, in bfloat16, times one of 16 levels, those with
    the least square error of a normal number (Lloyd-Max); as in TurboQuant, arXiv 2504.19874. Here as bfloat16."""
    size = x.float().square().mean(-1, keepdim=True).sqrt().to(torch.bfloat16).float()
    levels = torch.tensor(_LLOYD_MAX, device=x.device)
    index = torch.bucketize(x.float().abs() / size.clamp(min=1e-30), (levels[1:] + levels[:-1]) / 2)
    return (levels[index] * size * x.float().sign()).to(x.dtype), None


CACHES = {
    "bfloat16": CacheKind(lambda x: (x, None), 2.0),
    "e4m3": CacheKind(lambda x: tuple(fa4.quantize(x, "head")), 1.0),
    "int8": CacheKind(_int8, 1.0),
    "NVFP4": CacheKind(_nvfp4, nvfp4.BYTES_OF_NUMBER),
    "NVFP4, k less its mean": CacheKind(_nvfp4, nvfp4.BYTES_OF_NUMBER, is_smooth=True),
    "NVFP4, rotated": CacheKind(_nvfp4, nvfp4.BYTES_OF_NUMBER, is_rotated=True),
    "16 levels, rotated": CacheKind(_levels, 0.5 + 2 / HEAD_DIM, is_rotated=True),
}


def error(kind: str, cache: CacheKind, tokens: int, seed: int, device: torch.device) -> float:
    """Return the error of out."""
    q, k, v, _ = drawn(kind, tokens, seed, device)
    q = q[:, -128:]
    inputs = AttentionInputs(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=tokens)
    exact, _ = reference.forward(inputs, AttentionSpec.of(inputs, Flags(HEAD_DIM**-0.5, window_right=0)))
    if cache.is_smooth:
        k = (k.float() - k.float().mean(1, keepdim=True)).to(k.dtype)
    if cache.is_rotated:
        q, k, v = (recipes.rotated(x.float()).to(x.dtype) for x in (q, k, v))
        exact = recipes.rotated(exact)
    (k_cache, k_descale), (v_cache, v_descale) = cache.store(k), cache.store(v)
    out = fa4.flash_attn_with_kvcache(q, k_cache, v_cache, k_descale=k_descale, v_descale=v_descale, causal=True)
    return ((out.double() - exact).norm() / exact.norm()).item()


@click.command(help=__doc__)
@click.option("--tokens", default=4096, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--device", default="cpu", show_default=True, callback=lambda _ctx, _param, name: device_named(name))
def main(tokens: int, seeds: int, device: torch.device) -> None:
    click.echo("| cache | bytes a token and head, of K and V | " + " | ".join(KINDS) + " |")
    click.echo("|---|--:|" + "--:|" * len(KINDS))
    for name, cache in CACHES.items():
        cells = [
            f"{statistics.geometric_mean(error(kind, cache, tokens, seed, device) for seed in range(seeds)):.2%}"
            for kind in KINDS
        ]
        size = round(2 * HEAD_DIM * cache.bytes_of_number)
        click.echo(f"| {name} | {size} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
