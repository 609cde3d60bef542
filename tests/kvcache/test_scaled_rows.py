"""Rows of 656 bytes: what is where, and which calls on them are refused."""

import struct

import pytest
import torch

import fa4
from fa4.runtime import scaled_rows


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_a_row_read_byte_by_byte(seed):
    keys = torch.randn(3, 576, generator=torch.Generator().manual_seed(seed)).bfloat16()
    keys[1, :128] = 0.0  # a tile of zeros has the smallest factor
    rows = scaled_rows.quantised(keys)
    assert rows.shape == (3, 656)
    for row, key, value in zip(rows.tolist(), keys, scaled_rows.values(rows)):
        factors = struct.unpack("4f", bytes(row[512:528]))
        for column in range(512):
            exact = e4m3(row[column]) * factors[column // 128]
            assert value[column].item() == torch.tensor(exact).bfloat16().item()
            largest = key[column // 128 * 128 :][:128].float().abs().max().item()
            assert factors[column // 128] == pytest.approx(max(largest / 448, 2.0**-126))
            assert (
                abs(exact - key[column].item()) <= 2.0**-4 * abs(key[column].item()) + 2.0**-10 * factors[column // 128]
            )
        assert torch.equal(torch.tensor(row[528:], dtype=torch.uint8).view(torch.bfloat16), key[512:])
        assert torch.equal(value[512:], key[512:])


def test_numbers_that_are_not_finite_stay_in_their_row():
    keys = torch.ones(4, 576, dtype=torch.bfloat16)
    keys[1, 5], keys[2, 200] = torch.nan, torch.inf
    values = scaled_rows.values(scaled_rows.quantised(keys))
    assert values[0].eq(1).all() and values[3].eq(1).all()
    assert values[1].isnan().nonzero().tolist() == [[5]] and values[1, :5].eq(1).all()
    assert values[2, 200].isnan() and values[2, 256:].eq(1).all()


def call(**changes):
    rows = torch.zeros(2, 8, 1, 656, dtype=torch.uint8)
    given = dict(q=torch.zeros(2, 1, 4, 576, dtype=torch.bfloat16), k_cache=rows)
    given |= changes
    given.setdefault("v_cache", given["k_cache"][..., :512])
    return fa4.flash_attn_with_kvcache(**given)


WRONG = {
    "dtype": (dict(q=torch.zeros(2, 1, 4, 576)), TypeError, "q has dtype torch.float32, expected torch.bfloat16 to go"),
    "head_dim": (
        dict(q=torch.zeros(2, 1, 4, 512, dtype=torch.bfloat16)),
        ValueError,
        r"q has shape \(2, 1, 4, 512\), expected 576 columns to go with a k_cache of 656-byte rows",
    ),
    "row": (
        dict(k_cache=torch.zeros(2, 8, 1, 640, dtype=torch.uint8)),
        ValueError,
        r"k_cache has dtype torch.uint8 and shape \(2, 8, 1, 640\), expected \(\*, \*, 1, 656\)",
    ),
    "heads": (
        dict(k_cache=torch.zeros(2, 8, 2, 656, dtype=torch.uint8)),
        ValueError,
        r"k_cache .* shape \(2, 8, 2, 656\), expected \(\*, \*, 1, 656\)",
    ),
    "other values": (
        dict(v_cache=torch.zeros(2, 8, 1, 512, dtype=torch.uint8)),
        ValueError,
        r"v_cache has shape \(2, 8, 1, 512\), expected k_cache\[\.\.\., :512\] of 656-byte rows",
    ),
    "factors": (dict(k_descale=torch.ones(())), ValueError, "k_descale is given with a cache of dtype torch.uint8"),
    "rotation": (
        dict(
            k=torch.zeros(2, 1, 1, 576, dtype=torch.bfloat16),
            v=torch.zeros(2, 1, 1, 512, dtype=torch.bfloat16),
            cache_seqlens=3,
            **dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(9, 32)),
        ),
        ValueError,
        "rotary_cos is given with a k_cache of 656-byte rows, expected rows that are rotated",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    changes, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call(**changes)
    call()
