"""`flash_attn_with_kvcache` writes the caller's `out`."""

import importlib.util
import math

import pytest
import torch

import fa4
from fa4.emulator import emulate

PAGE, HEADS, HEADS_KV, HEAD_DIM = 16, 4, 2, 64
HAS_EMULATOR = all(importlib.util.find_spec(name) for name in ("cutlass", "warpcheck.machine._core"))
EMULATED = pytest.mark.skipif(not HAS_EMULATOR, reason="needs CuTe DSL and the emulator's compiled core")


def problem(seed, dtype=torch.float32):
    """Arguments of a packed call on pages whose lengths leave one packed row unused."""
    draw = torch.Generator().manual_seed(seed)
    pools = [torch.randn(8, PAGE, HEADS_KV, HEAD_DIM, generator=draw).to(dtype) for _ in range(2)]
    return dict(
        q=torch.randn(7, HEADS, HEAD_DIM, generator=draw).to(dtype), k_cache=pools[0], v_cache=pools[1],
        cache_seqlens=torch.tensor([40, 11], dtype=torch.int32), cu_seqlens_q=torch.tensor([0, 5, 6]).int(),
        page_table=torch.randperm(8, generator=draw).view(2, 4).int(), causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", [0, 2])
def test_out_is_written_and_returned(seed, num_splits):
    arguments = problem(seed) | dict(num_splits=num_splits)
    expected, lse = fa4.flash_attn_with_kvcache(**arguments, return_lse=True)
    for _ in range(2):  # the second call is a cached one
        out = torch.full_like(expected, math.nan)
        got, got_lse = fa4.flash_attn_with_kvcache(**arguments, out=out, return_lse=True)
        assert got is out and torch.equal(out, expected) and torch.equal(got_lse, lse)


def test_out_of_a_compiled_function_is_written(seed):
    arguments = problem(seed)
    expected = fa4.flash_attn_with_kvcache(**arguments)
    compiled = torch.compile(lambda out: fa4.flash_attn_with_kvcache(**arguments, out=out), backend="aot_eager")
    out = torch.full_like(expected, math.nan)
    assert torch.equal(compiled(out), expected) and torch.equal(out, expected)


@EMULATED
def test_an_emulated_kernel_writes_out(seed):
    arguments = problem(seed, torch.bfloat16)
    with emulate("sm_90a"):
        expected = fa4.flash_attn_with_kvcache(**arguments, backend="sm90")
        out = torch.full_like(expected, math.nan)
        assert fa4.flash_attn_with_kvcache(**arguments, out=out, backend="sm90") is out
    assert torch.equal(out, expected)


ERRORS = {
    "a list": (TypeError, "out is a list", lambda x: [x]),
    "shape": (ValueError, r"out has shape \(6, 4, 64\), expected \(7, 4, 64\)", lambda x: x[:6]),
    "dtype": (TypeError, "out has dtype torch.float64, expected torch.float32", lambda x: x.double()),
    "strides": (
        ValueError,
        "out has strides .*, expected a contiguous",
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    ),
    "address": (ValueError, "out begins 4 bytes past", lambda x: x.new_empty(x.numel() + 1)[1:].view_as(x)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_out(seed, name):
    error, message, changed = ERRORS[name]
    arguments = problem(seed)
    with pytest.raises(error, match=message):
        fa4.flash_attn_with_kvcache(**arguments, out=changed(arguments["q"]))


def test_out_has_16_bits_only(seed):
    arguments = problem(seed)
    with pytest.raises(ValueError, match="out and out_descale are both given"):
        fa4.flash_attn_with_kvcache(**arguments, out=arguments["q"].clone(), out_descale=torch.ones(()))
