"""Traced scores and masks, and block masks, in the Hopper kernels on the emulated chip."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

import fa4
from fa4.emulator import emulate
from tests.mods.kernels import (
    DOCUMENT,
    PACKED_AND_SPLIT,
    SLOPES,
    alibi_in_documents,
    blocks,
    by_head,
    divides,
    many_kinds,
)
from tests.mods.oracle import Problem, assert_kernel_is_right

FORWARD = {
    # Loads of several dtypes, causal as well, a half block alone, query rows that do not exist.
    "many_kinds": Problem(
        "many_kinds", *(150, 190, 6, 2, 2), score_mod=many_kinds, mask_mod=fa4.masks.documents(DOCUMENT),
        call=dict(causal=True),
    ),
    # Lists of blocks with both kinds in them, a last block that keys end in, indices that grow evenly.
    "documents": alibi_in_documents(400, 400, head_dim=64),
    # Blocks that each head has of its own, rows of blocks without a key.
    "heads": Problem(
        "heads", *(300, 260), score_mod=fa4.scores.temperature(SLOPES), mask_mod=by_head,
        call=dict(block_mask=blocks(by_head, 2, 300, 260)),
    ),
    "packed_and_split": PACKED_AND_SPLIT,
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, seed):
    with emulate("sm_90a", sms=2, seed=seed):
        assert_kernel_is_right(FORWARD[name], seed, "sm90", gradients=False)


GRADIENTS = {
    # Steps in order, which keep scores; causal as well; heads of a group; keys and queries that do not exist.
    "many_kinds": FORWARD["many_kinds"],
    # The same by lists, with a score that is not asked for again.
    "documents": FORWARD["documents"],
    # Steps that overlap, and a mask alone, whose lists begin with blocks seen whole for some keys.
    "heads": Problem(
        "heads", *(300, 260), head_dim=128, mask_mod=by_head, call=dict(block_mask=blocks(by_head, 2, 300, 260))
    ),
    "divides": Problem("divides", *(140, 200, 4, 2), head_dim=128, mask_mod=divides, call=dict(deterministic=True)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, seed):
    with emulate("sm_90a", sms=4, seed=seed):
        assert_kernel_is_right(GRADIENTS[name], seed, "sm90")
