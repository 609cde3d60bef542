"""Traced scores and masks, and block masks, in the portable kernels on the emulated chip."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

import fa4
from fa4.emulator import emulate
from tests.mods.oracle import Problem, assert_kernel_is_right

_GENERATOR = torch.Generator().manual_seed(5)
_DOCUMENT = torch.randint(0, 3, (2, 200), generator=_GENERATOR).sort(dim=1).values
_TABLE = torch.randn(6, 21, generator=_GENERATOR)
_ROWS = torch.randn(200, generator=_GENERATOR).to(torch.bfloat16)
_IS_TEXT = torch.rand(200, generator=_GENERATOR) < 0.7


def _many_kinds(score, b, h, q_idx, kv_idx):
    """Loads of several dtypes and of computed places, counted from the end too; what does not exist has no root."""
    near = _TABLE[h, (kv_idx - q_idx).clamp(-10, 10)]
    return torch.tanh(score / 2.5) * 2.5 + near + torch.where(_IS_TEXT[kv_idx], _ROWS[q_idx], 0.0) + score.abs().sqrt()


def _divides(b, h, q_idx, kv_idx):
    """Floors and remainders of negative numbers as in Python, bits of integers."""
    distance = q_idx - kv_idx
    return ((distance // 8) % 3 != 1) & ((distance % 5 < 4) | ~(kv_idx & 1 == 0))


def _blocks(mask_mod, heads, queries, keys):
    return fa4.create_block_mask(mask_mod, 1, heads, queries, keys, device="cpu")


def _by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx <= 40 * (h + 1)) & (q_idx >= kv_idx)


PROBLEMS = {
    "many_kinds": Problem(
        "many_kinds",
        *(70, 90, 6, 2, 2),
        score_mod=_many_kinds,
        mask_mod=fa4.masks.documents(_DOCUMENT),
        call=dict(causal=True, deterministic=True),
    ),
    # Blocks that each head has of its own, rows of blocks without a key, a last block of less than a tile.
    "blocks": Problem(
        "blocks",
        *(150, 150),
        score_mod=fa4.scores.temperature(_TABLE[:, 0].abs()),
        mask_mod=_by_head,
        call=dict(block_mask=_blocks(_by_head, 2, 150, 150)),
    ),
}
FORWARD = {
    # Heads are rows of a tile, and the keys are split.
    "packed_and_split": Problem(
        "packed_and_split", *(3, 600, 6, 2), score_mod=fa4.scores.relative_bias(_TABLE), mask_mod=_divides
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_and_gradients(name, seed):
    with emulate("sm_80", seed=seed):
        assert_kernel_is_right(PROBLEMS[name], seed, "sm80")


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, seed):
    with emulate("sm_80", seed=seed):
        assert_kernel_is_right(FORWARD[name], seed, "sm80", gradients=False)
