"""Problems with traced functions and block masks, for the kernels of every chip; each with what it shows."""

import torch

import fa4
from tests.mods.oracle import Problem

_GENERATOR = torch.Generator().manual_seed(5)
LONGEST = 700
DOCUMENT = torch.randint(0, 3, (2, LONGEST), generator=_GENERATOR).sort(dim=1).values
TABLE = torch.randn(6, 21, generator=_GENERATOR)
SLOPES = TABLE[:, 0].abs()
_ROWS = torch.randn(LONGEST, generator=_GENERATOR).to(torch.bfloat16)
_IS_TEXT = torch.rand(LONGEST, generator=_GENERATOR) < 0.7


def many_kinds(score, b, h, q_idx, kv_idx):
    """Loads of several dtypes and of computed places, counted from the end too; what does not exist has no root."""
    near = TABLE[h, (kv_idx - q_idx).clamp(-10, 10)]
    return torch.tanh(score / 2.5) * 2.5 + near + torch.where(_IS_TEXT[kv_idx], _ROWS[q_idx], 0.0) + score.abs().sqrt()


def divides(b, h, q_idx, kv_idx):
    """Floors and remainders of negative numbers as in Python, bits of integers."""
    distance = q_idx - kv_idx
    return ((distance // 8) % 3 != 1) & ((distance % 5 < 4) | ~(kv_idx & 1 == 0))


def by_head(b, h, q_idx, kv_idx):
    """Another window for each head; rows of blocks that see nothing."""
    return (q_idx - kv_idx <= 40 * (h + 1)) & (q_idx >= kv_idx)


def blocks(mask_mod, heads, queries, keys):
    return fa4.create_block_mask(mask_mod, 1, heads, queries, keys, device="cpu")


def alibi_in_documents(queries: int, keys: int, **options) -> Problem:
    """A causal document mask, whose words of bits and loads meet, and a score that grows evenly along keys."""
    mask = fa4.masks.both(fa4.masks.causal, fa4.masks.documents(DOCUMENT[0, :queries], DOCUMENT[0, :keys]))
    return Problem(
        "alibi_in_documents", queries, keys, score_mod=fa4.scores.alibi(SLOPES), mask_mod=mask,
        call=dict(block_mask=blocks(mask, None, queries, keys)), **options,
    )  # fmt: skip


# Heads are rows of a tile, and the keys are split.
PACKED_AND_SPLIT = Problem(
    "packed_and_split", *(3, 600, 6, 2), score_mod=fa4.scores.relative_bias(TABLE), mask_mod=divides
)
