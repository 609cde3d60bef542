"""Masks and scores as attention-gym publishes them for torch's flex_attention, written anew; each for LENGTH tokens.

Source: https://github.com/meta-pytorch/attention-gym, attn_gym/masks and attn_gym/mods. Two of its scores are refused,
being no graphs of numbers: that of latent attention, a product of rows (below), and softcap by a Triton operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fa4 import masks, scores

LENGTH, HEADS, SIDE = 144, 2, 12  # a canvas is SIDE x SIDE


def of_documents(starts: Tensor, inner: Callable) -> Callable:
    """Each document by itself under a mask whose places count from its start. starts: (documents + 1,)."""
    document = torch.bucketize(torch.arange(LENGTH), starts.cpu()[1:], right=True).to(starts)

    def mask(b, h, q_idx, kv_idx):
        query, key = q_idx - starts[document[q_idx]], kv_idx - starts[document[kv_idx]]
        return (document[q_idx] == document[kv_idx]) & inner(b, h, query, key)

    return mask


def of_stacked(length: int, inner: Callable) -> Callable:
    """Sequences of one length, one behind the other."""

    def mask(b, h, q_idx, kv_idx):
        return (q_idx // length == kv_idx // length) & inner(b, h, q_idx % length, kv_idx % length)

    return mask


def _near(place: Callable, reach: tuple[int, int]) -> Callable:
    """Neighbours on a canvas. A window that would leave it is moved back. place: of a token, its (column, row)."""

    def mask(b, h, q_idx, kv_idx):
        seen = kv_idx >= 0
        for query, key, half in zip(place(q_idx), place(kv_idx), reach):
            middle = query.clamp(half, SIDE - 1 - half)
            seen = seen & ((middle - key).abs() <= half)
        return seen

    return mask


def by_rows(i):
    return i // SIDE, i % SIDE


def by_tiles(width: int, height: int) -> Callable:
    """Tokens of a tile follow each other."""

    def place(i):
        tile, within = i // (width * height), i % (width * height)
        row, column = tile // (SIDE // width), tile % (SIDE // width)
        return column * width + within % width, row * height + within // width

    return place


def by_bits(i):
    """Along a Z-shaped curve: every other bit of a token's number."""

    def every_other(x):
        x = x & 0x55555555
        for shift, kept in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            x = (x | (x >> shift)) & kept
        return x

    return every_other(i), every_other(i >> 1)


def of_tiles(canvas: tuple[int, ...], kernel: tuple[int, ...], tile: tuple[int, ...], text: int) -> Callable:
    """Sliding tiles on a canvas of any number of axes (arXiv 2502.04507), and tokens of text behind it."""
    tiles = [size // own for size, own in zip(canvas, tile)]
    spans = [size // own for size, own in zip(kernel, tile)]
    picture = math.prod(canvas)

    def places(i):
        number = i // math.prod(tile)
        return [number // math.prod(tiles[axis + 1 :]) % count for axis, count in enumerate(tiles)]

    def mask(b, h, q_idx, kv_idx):
        near = (q_idx < picture) & (kv_idx < picture)
        for query, key, count, span in zip(places(q_idx), places(kv_idx), tiles, spans):
            before, after = span // 2, span // 2 + span % 2 - 1
            middle = query.clamp(before, count - 1 - after)
            near = near & (key >= middle - before) & (key <= middle + after)
        is_text = (kv_idx < picture + text) & ((q_idx >= picture) | (kv_idx >= picture))
        return near | is_text

    return mask


def of_frames(prompt: int, frame: int, width: int, is_temporal: bool) -> Callable:
    """Heads of a video model that look at near frames, or at one place in all of them (arXiv 2502.01776); all look at
    the prompt, which looks at all."""

    def mask(b, h, q_idx, kv_idx):
        query, key = ((q_idx - prompt) % frame, (kv_idx - prompt) % frame) if is_temporal else (q_idx, kv_idx)
        return (kv_idx < prompt) | (q_idx < prompt) | (torch.abs(query - key) < width)

    return mask


def of_images(intervals: Tensor, tokens: int) -> Callable:
    """Text looks at the images of its interval (arXiv 2204.14198). intervals: (images, 2)."""
    image = torch.arange(len(intervals), device=intervals.device).repeat_interleave(tokens)

    def mask(b, h, q_idx, kv_idx):
        interval = intervals[image[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return mask


def sink_and_window(sink: int, window: int) -> Callable:
    return masks.both(masks.either(masks.sliding_window(window), lambda b, h, q, kv: kv < sink), masks.causal)


def make_masks(device: str = "cpu") -> dict[str, Callable]:
    """By the name that the source has."""

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    return {
        "causal": masks.causal,
        "sliding_window": masks.sliding_window(30),
        "prefix_lm": masks.prefix(ints(50, 50)),
        "document": of_documents(ints(0, 20, 21, 100, LENGTH), masks.causal),
        "dilated_sliding_window": masks.dilated(12, 3),
        "sink_window": sink_and_window(4, 25),
        "natten": _near(by_rows, (2, 1)),
        "tiled_natten": _near(by_tiles(4, 3), (2, 3)),
        "morton_natten": _near(by_bits, (2, 2)),
        "sta_2d": of_tiles((12, 8), (6, 6), (3, 2), text=40),
        "sta_3d": of_tiles((4, 4, 6), (2, 4, 6), (2, 2, 2), text=30),
        "svg_spatial": of_frames(14, 26, 40, is_temporal=False),
        "svg_temporal": of_frames(14, 26, 5, is_temporal=True),
        "vision_cross_attention": of_images(ints([0, 70], [20, 90], [90, LENGTH]), LENGTH // 3),
        "batchify": of_stacked(48, masks.sliding_window(20)),
    }


def alibi(heads: int) -> Callable:
    """With the slopes computed where they are used."""
    return lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / heads))


SCORES: dict[str, Callable] = {"alibi": alibi(HEADS), "tanh_softcap": scores.softcap(2)}
NAMES = (*make_masks(), *SCORES)


def latent_attention(query: Tensor, key: Tensor) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score + torch.dot(query[b, h, q_idx], key[b, h // HEADS, kv_idx])
