"""Attention dropout: the kept probabilities are a function of seed, offset and the pair's position only.

Definition, for every backend. For query i of query head h of sequence b, keys 32 n to 32 n + 31 take two calls of
Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011), half = 0 and 1, with

    key      (seed mod 2^32, seed / 2^32)
    counter  (2 n + half, i, b * heads + h, offset mod 2^32)

Bit j of the eight words (half 0 first, the first word's bit the most significant) forms the byte of key 32 n + j. A key
is kept if its byte is below t = round(256 (1 - p)), clamped to 1 to 255: p is effectively a multiple of 1/256. Kept
probabilities are multiplied by 256 / t, which preserves the mean of each probability exactly. With p = 1 nothing is
kept.

Positions count from 0 within the sequence, also for packed ones; heads: query heads. Seven rounds are the fewest that
pass all of BigCrush for this generator (the paper's table 2), as in flash-attn; ten cost two fifths more. One byte per
pair, as in flash-attn, bounds the cost. Its bits are in eight words, so one bit-wise comparison with t decides on 32
keys at once, and the mask of all pairs takes one word per 32 keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
KEYS = 32  # keys per word of keep bits
BITS = 8  # bits of a pair's random number
_WORD = 0xFFFFFFFF


class Rate(NamedTuple):
    """Dropout rate: a pair is kept if its byte is below `threshold`, and then multiplied by `scale`."""

    threshold: int
    scale: float

    @staticmethod
    def of(dropout_p: float) -> Rate:
        if dropout_p >= 1.0:
            return Rate(0, 0.0)
        threshold = min(max(round((1 << BITS) * (1.0 - dropout_p)), 1), (1 << BITS) - 1)
        return Rate(threshold, (1 << BITS) / threshold)

    def bits(self) -> tuple[int, ...]:
        """Return the threshold's bits, least significant first, each as a word of 32 equal bits."""
        return tuple(-(self.threshold >> i & 1) for i in range(BITS))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Philox4x32 of four counters and two keys: return four words, as int64 from 0 to 2^32 - 1, like the arguments."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # Products wrap at 2^64; after a signed shift only the sign bits are wrong, and the mask removes them.
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _upper(high) ^ c1 ^ k0, high & _WORD, _upper(low) ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _upper(x: Tensor) -> Tensor:
    return x >> 32 & _WORD


def keep(dropout_p: float, seed: Tensor, pair: Tensor, query: Tensor, keys: range) -> Tensor:
    """Return which of `keys` each query keeps: bool, the broadcast shape of pair and query, and a last axis of keys.

    Args:
        seed: (2,) int64, seed and offset.
        pair: index b * heads + h of sequence and query head, int64. query: its position in the sequence.
    """
    first, stop = keys.start // KEYS, -(-keys.stop // KEYS)
    block = torch.arange(first, stop, device=pair.device)
    pair, query = pair[..., None], query[..., None]
    offset, key = seed[1] & _WORD, (seed[0] & _WORD, _upper(seed[0]))
    words = [word for half in (0, 1) for word in philox((2 * block + half, query, pair & _WORD, offset), key)]
    below = torch.zeros_like(words[0])
    for word, bit in zip(reversed(words), Rate.of(dropout_p).bits()):
        below = below | ~word if bit else below & ~word
    bits = below[..., None] >> torch.arange(KEYS, device=pair.device) & 1
    return bits.flatten(-2)[..., keys.start - KEYS * first : keys.stop - KEYS * first].bool()
