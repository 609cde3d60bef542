"""Recipe "nvfp4" of `fa4.quantize` against a float64 definition by loops over groups of 16 numbers."""

import math

import pytest
import torch

import fa4
from fa4.runtime import nvfp4

from .test_recipes import assert_same, drawn, e4m3

E2M1 = torch.float4_e2m1fn_x2
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by code


def decoded(data):
    """E2M1 numbers of bytes, the even column in the low half: float64."""
    numbers = torch.tensor(MAGNITUDES + [-x for x in MAGNITUDES], dtype=torch.float64)
    return numbers[torch.stack((data.view(torch.uint8) % 16, data.view(torch.uint8) // 16), -1).flatten(-2).long()]


def nearest(x, numbers):
    """The nearest of ascending numbers; in a tie, the one with an even index."""
    distance = [abs(x - n) for n in numbers]
    near = [i for i, d in enumerate(distance) if d == min(distance)]
    return next(i for i in near if len(near) == 1 or i % 2 == 0)


def definition(group):
    """Numbers and scale of 16 numbers."""
    if not group.isfinite().all():
        return None, math.nan
    scales = e4m3()[e4m3() > 0].tolist()  # from code 1 on
    largest = (group.abs().max().float() / 6).item()
    scale = scales[nearest(largest, [0.0, *scales]) - 1] if largest > scales[0] / 2 else scales[0]
    quotients = (group.float() / scale).tolist()
    return [math.copysign(MAGNITUDES[nearest(abs(x), MAGNITUDES)], x) for x in quotients], scale


@pytest.mark.parametrize("shape", [(2, 3, 2, 32), (5, 3, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_numbers_and_scales(shape, dtype, seed):
    x = drawn(seed, *shape, dtype=dtype)
    data, scales = fa4.quantize(x, "nvfp4")
    assert data.dtype == E2M1 and data.shape == (*shape[:-1], shape[-1] // 2) and data.is_contiguous()
    assert scales.dtype == torch.float8_e4m3fn and scales.shape == (*shape[:-1], shape[-1] // 16)
    for got, scale, group in zip(decoded(data).view(-1, 16), scales.flatten(), x.reshape(-1, 16)):
        numbers, expected = definition(group)
        assert got.tolist() == numbers and scale.item() == expected, f"seed {seed}"
    assert_same(fa4.dequantize(data, scales, torch.float32).view(-1, 16), decoded(data).view(-1, 16)
                * scales.double().view(-1, 1))  # fmt: skip


def test_ties_go_to_the_even_number():
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x = torch.cat((halfway, -halfway)).view(1, 1, 1, 16)
    expected = torch.tensor([0.0, 1, 1, 2, 2, 4, 4, 6])
    assert_same(fa4.dequantize(*fa4.quantize(x, "nvfp4")), torch.cat((expected, -expected)).view(x.shape))


def test_every_product_is_exact_in_16_bits():
    codes = torch.arange(256, dtype=torch.uint8)
    data = codes.view(32, 1, 8).repeat_interleave(256, 1)
    scales = (
        torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(32, 256, 1).contiguous().view(nvfp4.SCALE_DTYPE)
    )
    exact = decoded(data) * scales.double()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert_same(fa4.dequantize(data.view(E2M1), scales, dtype), exact)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_shows_in_its_group_alone(bad):
    x = torch.ones(2, 9, 2, 64)
    x[1, 8, 1, 20] = bad
    back = fa4.dequantize(*fa4.quantize(x, "nvfp4"))
    is_nan = torch.zeros_like(x, dtype=torch.bool)
    is_nan[1, 8, 1, 16:32] = True
    assert torch.equal(back.isnan(), is_nan)


@pytest.mark.parametrize("magnitude, error", [(1e-45, 1.0), (0.1, 0.23), (3.0, 0.23), (2688.0, 0.23)])
def test_magnitudes(magnitude, error):
    """Of the largest number: numbers between 4 and 6 err by up to 1/6, a normal scale by up to 1/16."""
    x = torch.full((1, 1, 1, 16), magnitude) * torch.linspace(0.5, 1, 16)
    back = fa4.dequantize(*fa4.quantize(x, "nvfp4"), torch.float32)
    assert (back - x).abs().max() <= error * x.max()
    assert fa4.dequantize(*fa4.quantize(1e30 * x + 1e30, "nvfp4"), torch.float32).max() == 2688


def test_rotation_and_rows_that_are_not_used(seed):
    x, used = drawn(seed, 2, 9, 1, 32).clamp(-9, 9), torch.tensor([9, 4], dtype=torch.int32)
    x[1, 4:] = torch.nan
    back = fa4.dequantize(*fa4.quantize(x, "nvfp4", seqused=used, rotate=True), torch.float32)
    assert not back[1, 4:].any() and back.isfinite().all()
    torch.testing.assert_close(back.norm(dim=-1), x.nan_to_num(0.0).norm(dim=-1), rtol=0.15, atol=0.05)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles(backend, seed):
    x = drawn(seed, 2, 5, 1, 32)
    eager = fa4.quantize(x, "nvfp4")
    data, scales = torch.compile(fa4.quantize, fullgraph=True, backend=backend)(x, "nvfp4")
    assert torch.equal(data.view(torch.uint8), eager.data.view(torch.uint8)) and data.dtype == E2M1
    assert_same(scales, eager.scales)
    assert_same(
        torch.compile(fa4.dequantize, fullgraph=True, backend="aot_eager")(data, scales), fa4.dequantize(*eager)
    )


X = torch.zeros(2, 4, 1, 32)
DATA, SCALES = fa4.quantize(X, "nvfp4")
WRONG = {
    "columns": (lambda: fa4.quantize(X[..., :24], "nvfp4"), ValueError, "x has head_dim 24, expected a multiple of 16"),
    "axis": (lambda: fa4.quantize(X, "head", axis="tokens"), ValueError, "axis is 'tokens' with recipe 'head'"),
    "heads": (lambda: fa4.quantize(X, "nvfp4", heads=1), ValueError, "heads is given with recipe 'nvfp4'"),
    "type": (
        lambda: fa4.dequantize(DATA, None),
        TypeError,
        "scales is a NoneType, expected torch.float8",
    ),
    "dtype": (
        lambda: fa4.dequantize(DATA, SCALES.float()),
        TypeError,
        "scales has dtype torch.float32, expected",
    ),
    "shape": (
        lambda: fa4.dequantize(DATA, SCALES[..., :1]),
        ValueError,
        r"scales has shape \(2, 4, 1, 1\), expected \(2, 4, 1, 2\) beside data \(2, 4, 1, 16\)",
    ),
    "attention": (lambda: fa4.flash_attn_func(X, DATA, DATA), TypeError, "k has dtype torch.float4_e2m1fn_x2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_argument(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
