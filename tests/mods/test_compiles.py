"""What of a call's functions, blocks and dropout asks for other kernels, on each chip: by keys, without compiling."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from fa4.runtime.device import chip_by_number, emulating


def attend(rows=300, keys=260, heads=4, batch=1, **call):
    """Forward and backward."""
    q, k, v = (
        torch.zeros(batch, length, heads, 64, dtype=torch.bfloat16, requires_grad=True) for length in (rows, keys, keys)
    )
    captured = [x for x in call.pop("trained", ()) if x.requires_grad]
    torch.autograd.grad(fa4.flash_attn_func(q, k, v, **call).sum(), [q, k, v, *captured])


def window(width, rows=300, keys=260, heads=None, create=fa4.create_block_mask):
    return create(fa4.masks.sliding_window(width), None, heads, rows, keys, device="cpu")


def documents(count):
    document = torch.arange(300) * count // 300
    return fa4.create_block_mask(fa4.masks.documents(document), None, None, 300, 300, device="cpu")


def learned(heads, reach):
    table = torch.randn(heads, 2 * reach + 1, requires_grad=True)
    return dict(score_mod=fa4.scores.relative_bias(table), trained=(table,), heads=heads)


SAME = {
    "values_that_were_captured": [dict(keys=300, block_mask=documents(count)) for count in (3, 7)],
    "sizes_of_what_was_captured": [learned(4, 10), learned(4, 33)],
    "heads": [learned(4, 10), learned(8, 10)],
    "a_cap": [dict(score_mod=fa4.scores.softcap(cap)) for cap in (20.0, 50.0)],
    "a_windows_number": [dict(mask_mod=fa4.masks.sliding_window(width)) for width in (30, 99)],
    "lists": [dict(block_mask=window(width)) for width in (30, 299)],
    "lengths": [dict(rows=rows, keys=400, block_mask=window(30, rows, 400)) for rows in (300, 390)],
    "torchs_block_mask": [
        dict(block_mask=window(30)),
        dict(block_mask=window(30, create=torch.nn.attention.flex_attention.create_block_mask)),
    ],
    "p_and_seed": [dict(dropout_p=p, dropout_seed=seed) for p, seed in ((0.1, 1), (0.5, (2, 3)))],
}
OTHER = {
    "an_operator": [dict(score_mod=lambda s, b, h, i, j: s + i), dict(score_mod=lambda s, b, h, i, j: s - i)],
    "with_a_gradient": [
        dict(score_mod=fa4.scores.alibi(torch.ones(4, requires_grad=trains)), trained=()) for trains in (False, True)
    ],
    "dropout_or_none": [dict(), dict(dropout_p=0.1)],
}


@pytest.mark.parametrize("what", [*SAME, *OTHER])
@pytest.mark.parametrize("chip", [80, 90, 100])
def test_another_one_of_these_asks_for_other_kernels_or_not(asked, chip, what):
    first, second = (SAME | OTHER)[what]
    with emulating(chip_by_number(chip)):
        attend(**first)
        before = len(asked)
        attend(**second)
    assert before and (len(asked) == before) == (what in SAME), asked[before:]
