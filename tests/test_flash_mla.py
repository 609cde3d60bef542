"""FlashMLA's names on fa4: the same numbers as latent attention by fa4's name, and what is refused."""

import pytest
import torch

import fa4
from fa4.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from fa4.runtime import scaled_rows

COLUMNS, LATENT = 40, 32


def call(seed, **changes):
    torch.manual_seed(seed)
    q = torch.randn(2, 3, 4, COLUMNS)
    pages, table = torch.randn(9, 8, 1, COLUMNS), torch.randperm(9)[:6].view(2, 3).int()
    metadata, num_splits = get_mla_metadata(torch.zeros(2), 12, 1)
    lengths = torch.tensor([20, 5], dtype=torch.int32)
    arguments = dict(q=q, k_cache=pages, block_table=table, cache_seqlens=lengths, head_dim_v=LATENT)
    return arguments | dict(tile_scheduler_metadata=metadata, num_splits=num_splits, causal=True) | changes


@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_latent_attention(scale, seed):
    given = call(seed, softmax_scale=scale)
    out, lse = flash_mla_with_kvcache(*list(given.values())[:7], scale, True)
    q, pages = given["q"], given["k_cache"].squeeze(-2)
    expected, expected_lse = fa4.mla_attention_with_kvcache(
        q[..., :LATENT],
        q[..., LATENT:],
        pages,
        softmax_scale=COLUMNS**-0.5 if scale is None else scale,
        causal=True,
        page_table=given["block_table"],
        cache_seqlens=given["cache_seqlens"],
        return_lse=True,
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert out.shape == (2, 3, 4, LATENT) and lse.shape == (2, 4, 3)


def test_hopper_loads_rows_once(seed):
    """The values are a view of the keys, so that the kernel of latents takes the call."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    from fa4.kvcache import api

    seen = []
    found = api._is_in_k
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_is_in_k", lambda k, v: seen.append(found(k, v)) or seen[-1])
        wide = torch.randn(2, 1, 4, 576), torch.randn(9, 8, 1, 576)
        flash_mla_with_kvcache(**call(seed, q=wide[0], k_cache=wide[1], head_dim_v=512))
    assert seen == [True]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_rows_of_656_bytes(dtype, seed):
    """The same numbers as attention on the bfloat16 keys that the rows stand for."""
    torch.manual_seed(seed)
    keys = torch.randn(9, 8, 1, 576).bfloat16()
    rows = scaled_rows.quantised(keys)
    given = call(seed, q=torch.randn(2, 3, 4, 576).bfloat16(), k_cache=rows.view(dtype), head_dim_v=512)
    expected = flash_mla_with_kvcache(**given | dict(k_cache=scaled_rows.values(rows)))
    got = flash_mla_with_kvcache(**given, is_fp8_kvcache=True)
    assert all(torch.equal(x, y) for x, y in zip(got, expected))
    q = given["q"]
    direct = fa4.mla_attention_with_kvcache(
        q[..., :512],
        q[..., 512:],
        rows.view(dtype),
        softmax_scale=576**-0.5,
        causal=True,
        page_table=given["block_table"],
        cache_seqlens=given["cache_seqlens"],
    )
    assert torch.equal(direct, expected[0])


WRONG = {
    "sparse": (
        dict(indices=torch.zeros(2, 3, 4).int()),
        NotImplementedError,
        "indices is given, expected None: dense attention",
    ),
    "8 bits": (dict(is_fp8_kvcache=True), ValueError, "k_cache has dtype torch.float32 .* and 656 columns to go with"),
    "sink": (dict(attn_sink=torch.zeros(4)), NotImplementedError, "attn_sink is given"),
    "metadata": (dict(tile_scheduler_metadata=torch.zeros(3)), TypeError, "are a Tensor and a NoneType, expected what"),
    "splits": (dict(num_splits=torch.zeros(3)), TypeError, "are a Metadata and a Tensor, expected what"),
    "table": (dict(block_table=None), TypeError, "block_table is None, expected a torch.Tensor"),
    "lengths": (dict(cache_seqlens=None), TypeError, "cache_seqlens is None, expected a torch.Tensor"),
    "columns": (dict(head_dim_v=41), ValueError, "head_dim_v is 41, expected 1 to 40, the columns of k_cache"),
    "no columns": (dict(head_dim_v=0), ValueError, "head_dim_v is 0, expected 1 to 40"),
    "cache": (dict(k_cache=None), TypeError, "k_cache is a NoneType, expected a torch.Tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name, seed):
    change, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        flash_mla_with_kvcache(**call(seed, **change))
