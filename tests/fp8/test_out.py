"""An output of 8 bits: out / out_descale, rounded to e4m3."""

import pytest
import torch

import fa4
from fa4.emulator import emulate

E4M3 = torch.float8_e4m3fn
SHAPE = (2, 60, 4, 64)


def tensors(seed, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=draw).to(dtype) for _ in range(3)]


def dense(q, k, v, **options):
    return fa4.flash_attn_func(q, k, v, causal=True, return_lse=True, **options)


def packed(q, k, v, **options):
    bounds = torch.tensor([0, 50, 115], dtype=torch.int32)  # 5 rows of padding
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return fa4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, return_lse=True, **options)


def cached(q, k, v, **options):
    lengths = torch.tensor([7, 60], dtype=torch.int32)
    return fa4.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_lse=True, **options)


@pytest.mark.parametrize("function", [dense, packed, cached])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, E4M3])
def test_it_is_the_output_rounded(function, dtype, seed):
    given, descale = tensors(seed, dtype), torch.tensor([0.02])
    expected, expected_lse = function(*given)
    out, lse = function(*given, out_descale=descale)
    assert out.dtype == E4M3 and torch.equal(lse, expected_lse)
    error = (out.float() * descale - expected.float()).abs()
    # Half a step of e4m3, and half one of the 16-bit quotient; numbers below 2^-6 have steps of 2^-9.
    assert (error <= (2**-4 + 2**-8) * expected.float().abs() + 2**-10 * descale).all()


def test_large_numbers_saturate_and_nan_stays(seed):
    q, k, v = tensors(seed)
    v[0, 0] = 1e4
    v[1, 0, 1, 2] = torch.nan
    out = fa4.flash_attn_func(q, k, v, out_descale=torch.tensor(1e-4))
    plain = fa4.flash_attn_func(q, k, v)
    assert (out[0].float() == 448).all()
    assert torch.equal(out.float().isnan(), plain.isnan()) and plain.isnan().any()


@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a", "sm_120a"])
def test_kernels_of_8_bits_feed_it(chip, seed):
    given, descale = tensors(seed, E4M3), torch.tensor(0.02)
    with emulate(chip, sms=2, seed=seed):
        plain, _ = dense(*given)
        out, _ = dense(*given, out_descale=descale)
    torch.testing.assert_close(out.float() * 0.02, plain.float(), rtol=0.07, atol=2e-5)


def test_it_compiles(seed):
    given, descale = tensors(seed), torch.tensor(0.01)
    compiled = torch.compile(dense, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(*given, out_descale=descale), dense(*given, out_descale=descale)):
        assert torch.equal(ours.float(), expected.float())


def _nested(given):
    return [torch.nested.nested_tensor(list(x), layout=torch.jagged) for x in given]


ERRORS = {
    "type": (TypeError, "out_descale is a float, expected a torch.Tensor", dict(out_descale=0.1)),
    "dtype": (TypeError, "out_descale has dtype torch.float64", dict(out_descale=torch.ones((), dtype=torch.float64))),
    "shape": (ValueError, r"out_descale has shape \(2\), expected \(\) or \(1,\)", dict(out_descale=torch.ones(2))),
    "zero": (ValueError, "out_descale is 0.0, expected a finite number above 0", dict(out_descale=torch.zeros(()))),
    "nan": (ValueError, "out_descale is nan", dict(out_descale=torch.full((1,), torch.nan))),
    "device": (ValueError, "out_descale is on meta", dict(out_descale=torch.ones((), device="meta"))),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("function", [dense, cached])
def test_an_error_names_the_argument(function, name, seed):
    error, message, options = ERRORS[name]
    with pytest.raises(error, match=message):
        function(*tensors(seed), **options)


def test_there_are_no_gradients(seed):
    q, k, v = tensors(seed)
    with pytest.raises(NotImplementedError, match="v requires grad, and an out of 8 bits has no gradients"):
        dense(q, k, v.requires_grad_(), out_descale=torch.ones(()))
    bias = torch.zeros(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="score_mod captured a tensor that requires grad"):
        dense(q, k, v.detach(), score_mod=lambda s, b, h, i, j: s + bias[h], out_descale=torch.ones(()))
    with torch.no_grad():
        assert dense(q, k, v, out_descale=torch.ones(()))[0].dtype == E4M3


def test_nested_tensors_are_refused(seed):
    with pytest.raises(ValueError, match="out_descale is given with a nested q"):
        fa4.flash_attn_func(*_nested(tensors(seed)), out_descale=torch.ones(()))
