"""Traced scores and masks, and block masks, in the portable kernels on the emulated chip."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

import fa4
from fa4.emulator import emulate
from tests.mods.kernels import DOCUMENT, PACKED_AND_SPLIT, SLOPES, alibi_in_documents, blocks, by_head, many_kinds
from tests.mods.oracle import Problem, assert_kernel_is_right

PROBLEMS = {
    "many_kinds": Problem(
        "many_kinds",
        *(70, 90, 6, 2, 2),
        score_mod=many_kinds,
        mask_mod=fa4.masks.documents(DOCUMENT),
        call=dict(causal=True, deterministic=True),
    ),
    # Blocks that each head has of its own, rows of blocks without a key, a last block of less than a tile.
    "blocks": Problem(
        "blocks",
        *(150, 150),
        score_mod=fa4.scores.temperature(SLOPES),
        mask_mod=by_head,
        call=dict(block_mask=blocks(by_head, 2, 150, 150)),
    ),
    "documents": alibi_in_documents(150, 150),
}
FORWARD = {"packed_and_split": PACKED_AND_SPLIT}


@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_and_gradients(name, seed):
    with emulate("sm_80", seed=seed):
        assert_kernel_is_right(PROBLEMS[name], seed, "sm80")


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, seed):
    with emulate("sm_80", seed=seed):
        assert_kernel_is_right(FORWARD[name], seed, "sm80", gradients=False)
