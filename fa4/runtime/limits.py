"""Limits of backends: parts of a feature that a row of the table of backends lacks, each with a text for users."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..mods.ir.record import ModSpec
from .spec import MX_BLOCK, AttentionSpec, Feature, Operands


@dataclass(frozen=True, slots=True)
class Limit:
    """Unsupported part of a feature that a row has: a text, and a test that yields the parts a spec needs. of: the
    features; the text applies to rows that have one of them."""

    text: str
    of: frozenset[Feature]
    refusals: Callable[[AttentionSpec], Iterator[str]]


def _limit(text: str, *of: Feature) -> Callable[[Callable[[AttentionSpec], Iterator[str]]], Limit]:
    return lambda refusals: Limit(text, frozenset(of), refusals)


# Loads of captured tensors by a function: each costs at least one instruction for every element, in sequence.
_MOST_LOADS = 64


@_limit(
    f"a score_mod or mask_mod that reads more than {_MOST_LOADS} captured numbers for each pair",
    Feature.SCORE_MOD, Feature.MASK_MOD,
)  # fmt: skip
def mod_limits(spec: AttentionSpec) -> Iterator[str]:
    mods = spec.mods or ModSpec()
    for role, graph in (("score_mod", mods.score), ("mask_mod", mods.mask)):
        count = 0 if graph is None else len(graph.loads())
        if count > _MOST_LOADS:
            yield f"lacks a {role} that reads {count} captured numbers for each pair (has up to {_MOST_LOADS})"


@_limit(
    "a block_mask whose block sizes share no factor of 16 with 128, or, inside torch.compile, are no multiples of it",
    Feature.BLOCK_MASK,
)
def block_limits(spec: AttentionSpec) -> Iterator[str]:
    block = None if spec.mods is None else spec.mods.block
    if block is not None and any(size % 128 for size in block):
        yield f"lacks block_mask with blocks of {block} (has multiples of 128)"


@_limit(
    "gradients of captured tensors: deterministic ones of elements that several pairs read, and those of elements "
    "chosen by the number of a packed sequence",
    Feature.CAPTURED_GRADIENTS,
)
def captured_limits(spec: AttentionSpec) -> Iterator[str]:
    graph = None if spec.mods is None else spec.mods.score
    if graph is None or Feature.CAPTURED_GRADIENTS not in spec.features():
        return
    for scatter in graph.scatters:
        if not graph.is_per_head(scatter):
            if spec.deterministic and not graph.has_single_writer(scatter):
                yield "lacks deterministic gradients of captured tensors to whose elements several pairs add"
        elif spec.varlen and "b" in graph.inputs_of(*scatter.indices):
            yield "lacks gradients of captured tensors that are chosen by packed sequences"


@_limit("products of 16-bit numbers", Feature.OPERANDS_8BIT, Feature.OPERANDS_4BIT)
def only_8bit_limits(spec: AttentionSpec) -> Iterator[str]:
    if spec.operands is None:
        yield "lacks products of 16-bit numbers, also of 8-bit ones that are dequantised (fa4.explain says why)"


@_limit("e2m1 q and k of a head_dim that is no multiple of 32", Feature.OPERANDS_4BIT)
def e2m1_limits(spec: AttentionSpec) -> Iterator[str]:
    if spec.operands is Operands.NVFP4 and spec.head_dim % 32:  # 16 bytes
        yield f"lacks e2m1 q and k of head_dim {spec.head_dim} (has multiples of 32)"


@_limit("scales of blocks of 32 columns of a head_dim that is no multiple of 32", Feature.BLOCK_SCALES)
def block_scale_limits(spec: AttentionSpec) -> Iterator[str]:
    if spec.operands is Operands.MXFP8 and spec.head_dim % MX_BLOCK:
        yield f"lacks scales of blocks of head_dim {spec.head_dim} (has multiples of {MX_BLOCK})"


@_limit(
    "a cache of 8-bit numbers of a head_dim that is no multiple of 16, or of 4-bit numbers that is no multiple of 32",
    Feature.CACHE_8BIT, Feature.CACHE_4BIT,
)  # fmt: skip
def narrow_cache_limits(spec: AttentionSpec) -> Iterator[str]:
    if spec.cache is None or not spec.cache.converts_kv:
        return
    bits, multiple = spec.cache.bits, 16 * 8 // spec.cache.bits  # 16 bytes
    if spec.head_dim % multiple or spec.head_dim_v % multiple:
        dims = f"head_dim ({spec.head_dim}, {spec.head_dim_v})"
        yield f"lacks a cache of {bits}-bit numbers of {dims} (has multiples of {multiple})"


@_limit(
    "pages of a size that is no multiple of 8, or with cache_leftpad, above head_dim 192 (of 8-bit numbers: up to 256; "
    "none of 4-bit numbers), but for pages of one row of one key/value head above head_dim 256",
    Feature.PAGES,
)
def sm100_page_limits(spec: AttentionSpec) -> Iterator[str]:
    widest = max(spec.head_dim, spec.head_dim_v)
    is_fetched = spec.cache is not None and spec.cache.converts_kv and (spec.cache.is_nvfp4 or widest > 256)
    if spec.cache is None or not spec.cache.is_scattered or is_fetched:
        return
    if widest > 192 and not (widest > 256 and spec.cache.page_size == 1 and spec.heads_kv == 1):
        yield f"lacks single rows of pages of head_dim {widest}: room for three blocks of them (has up to 192)"


@_limit("a v that is not the memory of k's first columns, as in a cache of latents", Feature.HEAD_DIM_V)
def latent_limits(spec: AttentionSpec) -> Iterator[str]:
    if not spec.v_in_k:
        yield "lacks a v that is not the memory of k's first columns"


@_limit("pages of 16-bit numbers of a size that is no multiple of 8, or with cache_leftpad", Feature.PAGES)
def scattered_limits(spec: AttentionSpec) -> Iterator[str]:
    if spec.cache is not None and spec.cache.is_scattered and not spec.cache.converts_kv:
        yield "lacks single rows of pages (has pages of multiples of 8 rows, without cache_leftpad)"


@_limit("dropout_p above head_dim 128", Feature.DROPOUT)
def sm90_dropout_limits(spec: AttentionSpec) -> Iterator[str]:
    if spec.has_dropout and max(spec.head_dim, spec.head_dim_v) > 128:  # its random words would spill registers
        yield f"lacks dropout_p with all else at head_dim ({spec.head_dim}, {spec.head_dim_v}) (has up to 128)"


@_limit("a cache of 4-bit numbers above head_dim 256", Feature.CACHE_4BIT)
def nvfp4_limits(spec: AttentionSpec) -> Iterator[str]:
    dims = spec.head_dim, spec.head_dim_v
    if spec.cache is not None and spec.cache.is_nvfp4 and max(dims) > 256:
        yield f"lacks a cache of 4-bit numbers of head_dim {dims} (has up to 256)"
