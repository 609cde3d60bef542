"""Attention dropout: which probabilities are kept, a function of a seed, an offset and the pair's place alone.

The definition, for every backend. Query i of query head h of sequence b has for its keys 32 n to 32 n + 31 two calls of
Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011), half = 0 and 1, with

    key      (seed mod 2^32, seed / 2^32)
    counter  (2 n + half, i, b * heads + h, offset mod 2^32)

of whose eight words, those of half 0 first, bit j, the first word's the most significant, are the byte of key 32 n + j.
A key is kept if its byte is below t = round(256 (1 - p)), at least 1 and at most 255: so p is a multiple of 1/256. What
is kept is multiplied by 256 / t, which keeps the mean of each probability exactly. With p = 1 nothing is kept.

Places count from 0 within the sequence, also of packed ones; heads: of queries. Seven rounds: the fewest that pass all
of BigCrush for this generator (the paper's table 2), and what flash-attn takes; ten cost two fifths more. A byte for
each pair, as in flash-attn, bounds the cost; that its bits lie in eight words means that one comparison with t, bit by
bit, decides on 32 keys at once, and that a mask of all pairs is a word for 32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # what a round adds to the key
KEYS = 32  # that a word of keep bits tells of
BITS = 8  # of a pair's random number
_WORD = 0xFFFFFFFF


class Rate(NamedTuple):
    """What a probability of dropping comes to: a pair is kept if its byte is below `threshold`, and then multiplied by
    `scale`."""

    threshold: int
    scale: float

    @staticmethod
    def of(dropout_p: float) -> Rate:
        if dropout_p >= 1.0:
            return Rate(0, 0.0)
        threshold = min(max(round((1 << BITS) * (1.0 - dropout_p)), 1), (1 << BITS) - 1)
        return Rate(threshold, (1 << BITS) / threshold)

    def bits(self) -> tuple[int, ...]:
        """The threshold's, the least significant first, each as a word of 32 equal ones."""
        return tuple(-(self.threshold >> i & 1) for i in range(BITS))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Philox4x32 of four counters by two keys: four words, as int64 from 0 to 2^32 - 1, like the arguments."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # Products wrap at 2^64; shifted as signed numbers their upper halves are right but for the sign.
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _upper(high) ^ c1 ^ k0, high & _WORD, _upper(low) ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _upper(x: Tensor) -> Tensor:
    return x >> 32 & _WORD


def keep(dropout_p: float, seed: Tensor, pair: Tensor, query: Tensor, keys: range) -> Tensor:
    """Which of `keys` each query keeps: bool, a last axis of keys behind those that pair and query are broadcast to.

    Args:
        seed: (2,) int64, seed and offset.
        pair: number b * heads + h of sequence and query head, int64. query: its place in the sequence.
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
