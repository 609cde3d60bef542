"""`fa4.quantize` and `fa4.dequantize` against a float64 definition by loops over groups of numbers."""

import math

import pytest
import torch

import fa4

E8M0 = torch.float8_e8m0fnu
CHOICES = [("tensor", "head_dim"), ("head", "head_dim"), ("block128", "head_dim"), ("mxfp8", "head_dim"),
           ("mxfp8", "tokens")]  # fmt: skip


def e4m3():
    """All finite e4m3 numbers, ascending."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return numbers[numbers.isfinite()].unique()


def scale_of(group, is_mx):
    """The scale of a group of numbers, by definition."""
    if not group.isfinite().all():
        return math.nan
    largest = float(group.abs().max()) if group.numel() else 0.0
    if is_mx:
        return 2.0 ** max(math.floor(math.log2(largest)) - 8, -127) if largest else 2.0**-127
    return max(float(torch.tensor(largest).float() / 448), 2.0**-126) if largest else 1.0


def nearest(x, scale):
    """x / scale rounded to the nearest e4m3 number, whose significand is even in a tie; saturated."""
    x = (x.float() / scale).double().clamp(-448, 448)
    numbers = e4m3()
    above = torch.searchsorted(numbers, x.contiguous()).clamp(max=len(numbers) - 1)
    low, high = numbers[(above - 1).clamp(min=0)], numbers[above]
    step = (high - low).masked_fill(high == low, 1.0)
    middle = (low + high) / 2
    is_even = (high / step) % 2 == 0
    return torch.where((x > middle) | ((x == middle) & is_even), high, torch.where(high == x, high, low))


def definition(x, recipe, axis, heads, used):
    """data and scales of one sequence (tokens, heads, head_dim) with `used` rows: float64."""
    x = x.double().clone()
    x[used:] = 0.0
    data, is_mx = torch.zeros_like(x), recipe == "mxfp8"
    tokens, all_heads, columns = x.shape
    rows = 128 if recipe == "block128" else 32 if axis == "tokens" else 1 if is_mx else max(tokens, 1)
    of_row = {"head": 1, "block128": 1}.get(recipe, columns if axis == "tokens" else columns // 32)
    scales = torch.zeros(-(-tokens // rows) if recipe != "head" else 1, heads, of_row, dtype=torch.float64)
    for i in range(scales.shape[0]):
        for h in range(heads):
            for c in range(of_row):
                wide, group = columns // of_row, all_heads // heads
                part = (
                    slice(i * rows, (i + 1) * rows),
                    slice(h * group, (h + 1) * group),
                    slice(c * wide, (c + 1) * wide),
                )
                scales[i, h, c] = scale = scale_of(x[part], is_mx)
                data[part] = nearest(x[part], scale) if scale == scale else math.nan
    if not is_mx:
        scales = scales[..., 0]
    return data, scales[0] if recipe == "head" else scales


def assert_same(got, expected):
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=0, equal_nan=True)


def drawn(seed, *shape, dtype=torch.float32):
    """Numbers of many magnitudes, with groups of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 6)
    x[..., :1, :1, :] = 0.0
    return x.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("recipe, axis", CHOICES)
@pytest.mark.parametrize("tokens, dtype", [(1, torch.bfloat16), (33, torch.float16), (290, torch.float32)])
def test_padded(recipe, axis, tokens, dtype, seed):
    x = drawn(seed, 2, tokens, 4, 64, dtype=dtype)
    data, scales = fa4.quantize(x, recipe, axis=axis)
    assert data.dtype == torch.float8_e4m3fn and data.shape == x.shape
    if recipe == "tensor":
        assert_same(scales, torch.tensor(scale_of(x.double(), False)))
        return assert_same(data, nearest(x.double(), float(scales)))
    expected = [definition(one, recipe, axis, 4, tokens) for one in x]
    assert_same(data, torch.stack([d for d, _ in expected]))
    assert_same(scales, torch.stack([s for _, s in expected]))
    assert scales.dtype == (E8M0 if recipe == "mxfp8" else torch.float32)
    expected_rows = fa4.dequantize(data, scales, torch.float32)
    error = (expected_rows - x.float()).abs() / x.float().abs().amax()
    assert error.max() < 2**-3


@pytest.mark.parametrize("recipe, axis", CHOICES[1:])
@pytest.mark.parametrize("lengths", [(200, 0, 129, 1), (3, 5), (128, 128), ()], ids=str)
def test_packed(recipe, axis, lengths, seed):
    """Each sequence has the scales that it has alone; rows past the last one are 0."""
    total, block = sum(lengths) + 7, 128 if recipe == "block128" else 32
    x = drawn(seed, total, 4, 64)
    x[total - 7 :] = 1e30
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    data, scales = fa4.quantize(x, recipe, axis=axis, cu_seqlens=bounds)
    back = fa4.dequantize(data, scales, torch.float32, cu_seqlens=bounds)
    for b, (n, first) in enumerate(zip(lengths, bounds.tolist())):
        alone, own = definition(x[first : first + n], recipe, axis, 4, n)
        assert_same(data[first : first + n], alone)
        if recipe == "head":
            assert_same(scales[b], own)
        else:
            start = first if axis == "head_dim" and recipe == "mxfp8" else first // block + b
            assert_same(scales[start : start + len(own)], own)
        one = fa4.quantize(x[None, first : first + n], recipe, axis=axis)
        assert_same(back[first : first + n], fa4.dequantize(*one, torch.float32)[0])
    if recipe != "mxfp8" or axis == "tokens":
        assert not data[total - 7 :].float().any()


@pytest.mark.parametrize("recipe", ["head", "block128"])
def test_heads_share_a_scale(recipe, seed):
    x = drawn(seed, 2, 150, 6, 32)
    data, scales = fa4.quantize(x, recipe, heads=2)
    expected = [definition(one, recipe, "head_dim", 2, 150) for one in x]
    assert_same(data, torch.stack([d for d, _ in expected]))
    assert_same(scales, torch.stack([s for _, s in expected]))


@pytest.mark.parametrize("recipe, axis", CHOICES[1:])
def test_rows_that_are_not_used_count_nowhere(recipe, axis, seed):
    x = drawn(seed, 2, 40, 2, 64)
    x[0, 35:], x[1, 7:] = torch.nan, torch.inf
    data, scales = fa4.quantize(x, recipe, axis=axis, seqused=torch.tensor([35, 7], dtype=torch.int32))
    expected = [definition(one, recipe, axis, 2, n) for one, n in zip(x, (35, 7))]
    assert_same(data, torch.stack([d for d, _ in expected]))
    assert_same(scales, torch.stack([s for _, s in expected]))


@pytest.mark.parametrize("recipe, axis", CHOICES)
def test_strides_change_nothing(recipe, axis, seed):
    x = drawn(seed, 2, 2, 37, 64).transpose(1, 2)
    views = x, x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), x[:, :, :1].expand(-1, -1, 2, -1)
    for view in views:
        got, expected = (fa4.quantize(y, recipe, axis=axis) for y in (view, view.contiguous()))
        assert got.data.is_contiguous()
        assert_same(got.data, expected.data), assert_same(got.scales, expected.scales)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("recipe, axis", CHOICES)
def test_a_number_that_is_not_finite_shows_in_its_group_alone(recipe, axis, bad):
    x = torch.ones(2, 130, 2, 64)
    x[1, 129, 1, 5] = bad
    for packed in (False, True):
        cu = torch.tensor([0, 130, 260], dtype=torch.int32) if packed else None
        back = fa4.dequantize(
            *fa4.quantize(x.flatten(0, 1) if packed else x, recipe, axis=axis, cu_seqlens=cu), cu_seqlens=cu
        ).view(x.shape)
        is_nan = torch.zeros_like(x, dtype=torch.bool)
        group = {"tensor": (slice(None),), "head": (1, slice(None), 1), "block128": (1, slice(128, 130), 1)}
        place = group.get(recipe, (1, 129, 1, slice(0, 32)) if axis == "head_dim" else (1, slice(128, 130), 1, 5))
        is_nan[place] = True
        assert torch.equal(back.isnan(), is_nan)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 3.0, 1e30, 3.4e38])
@pytest.mark.parametrize("recipe, axis", CHOICES)
def test_magnitudes(recipe, axis, magnitude):
    x = torch.full((1, 32, 1, 32), magnitude) * torch.linspace(0.5, 1, 32)
    back = fa4.dequantize(*fa4.quantize(x, recipe, axis=axis), torch.float32)
    # below 2^-126 * 2^-10 nothing is left; an E8M0 scale saturates numbers above 448 / 512 of the largest power of two
    error = ((back - x).abs().max() / x.max()).item()
    assert error <= (2**-4 if recipe != "mxfp8" else 2**-3) or magnitude < 1e-37
    assert back.isfinite().all()


def test_zeros_are_exact_and_empty_tensors_work():
    for recipe, axis in CHOICES:
        for shape in ((1, 40, 2, 32), (1, 0, 2, 32), (0, 5, 2, 32)):
            data, scales = fa4.quantize(torch.zeros(shape), recipe, axis=axis)
            back = fa4.dequantize(data, scales)
            assert back.shape == shape and not back.any() and scales.float().isfinite().all()


def test_smoothing_subtracts_the_mean_of_used_tokens(seed):
    torch.manual_seed(seed)
    k = torch.randn(2, 50, 2, 32) + 20 * torch.randn(2, 1, 2, 32)
    used = torch.tensor([50, 13], dtype=torch.int32)
    expected = torch.stack([x - x[:n].mean(0) for x, n in zip(k, used)])
    for b, n in enumerate(used):
        expected[b, n:] = 0
    got = fa4.dequantize(*fa4.quantize(k, "head", smooth=True, seqused=used), torch.float32)
    torch.testing.assert_close(got, expected, atol=0.1, rtol=0.07)
    bounds = torch.tensor([0, 50, 100], dtype=torch.int32)
    rows = fa4.quantize(k.flatten(0, 1), "head", smooth=True, cu_seqlens=bounds, seqused=used)
    packed = fa4.dequantize(*rows, torch.float32, cu_seqlens=bounds)
    torch.testing.assert_close(packed.view(k.shape), got, atol=1e-4, rtol=0.13)


def test_smoothed_keys_give_the_same_out_and_lse_less_a_known_term(seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 40, 2, 32) for _ in range(3))
    k += 8 * torch.randn(2, 1, 2, 32)
    exact, exact_lse = fa4.flash_attn_func(q, k, v, return_lse=True)
    (q8, sq), (k8, sk), (v8, sv) = (fa4.quantize(x, "head", smooth=x is k) for x in (q, k, v))
    out, lse = fa4.flash_attn_func(q8, k8, v8, q_descale=sq, k_descale=sk, v_descale=sv, return_lse=True)
    plain, plain_scale = fa4.quantize(k, "head")
    rough = fa4.flash_attn_func(q8, plain, v8, q_descale=sq, k_descale=plain_scale, v_descale=sv)
    assert (out - exact).norm() < 0.6 * (rough - exact).norm()
    # The query of the scores is the rounded one; the term is of the true one.
    term = torch.einsum("bshd,bhd->bhs", q, k.mean(1)) * 32**-0.5
    torch.testing.assert_close(lse + term, exact_lse, atol=0.15, rtol=0.03)


@pytest.mark.parametrize("head_dim", [1, 2, 64, 256])
def test_rotation_keeps_products_and_spreads_an_outlier(head_dim, seed):
    from fa4.torch_ops import recipes

    torch.manual_seed(seed)
    q, k = torch.randn(2, 3, 5, 2, head_dim).unbind()
    torch.testing.assert_close((recipes.rotated(q) * recipes.rotated(k)).sum(-1), (q * k).sum(-1), atol=1e-4, rtol=1e-4)
    one = torch.zeros(head_dim)
    one[head_dim // 2] = 1.0
    torch.testing.assert_close(recipes.rotated(one).abs(), torch.full((head_dim,), head_dim**-0.5))


def test_scales_of_training_are_powers_of_two(seed):
    from fa4.torch_ops import recipes

    x = drawn(seed, 2, 40, 3, 32)
    _, scales = recipes.quantized(x, "head", power_of_two=True)
    exact = x.abs().amax((1, 3)) / 448
    assert torch.equal(scales, torch.exp2(torch.log2(exact.double()).ceil()).float())


def test_a_gradient_is_not_traced():
    data, scales = fa4.quantize(torch.ones(1, 2, 1, 32, requires_grad=True), "head")
    assert not (data.requires_grad or scales.requires_grad)


X, CU = torch.zeros(2, 40, 4, 64), torch.tensor([0, 40, 80], dtype=torch.int32)
PACKED = X.flatten(0, 1)
WRONG = {
    "type": (dict(x=None), TypeError, "x is a NoneType, expected a torch.Tensor"),
    "dtype": (dict(x=X.double()), TypeError, "x has dtype torch.float64, expected float16, bfloat16 or float32"),
    "axes": (dict(x=X[0, 0]), ValueError, r"x has shape \(4, 64\), expected \(batch, seqlen"),
    "recipe": (dict(recipe="row"), ValueError, "recipe is 'row', expected 'tensor', 'head', 'block128', 'mxfp8' or"),
    "axis": (dict(recipe="mxfp8", axis="rows"), ValueError, "axis is 'rows', expected 'head_dim' or 'tokens'"),
    "axis of heads": (dict(axis="tokens"), ValueError, "axis is 'tokens' with recipe 'head', expected recipe 'mxfp8'"),
    "heads": (dict(heads=3), ValueError, "heads is 3, expected a divisor of x's 4 heads"),
    "heads of mx": (dict(recipe="mxfp8", heads=2), ValueError, "heads is given with recipe 'mxfp8', expected recipe"),
    "head_dim": (dict(x=X[..., :40], recipe="mxfp8"), ValueError, "x has head_dim 40, expected a multiple of 32"),
    "rotate": (dict(x=X[..., :40], rotate=True), ValueError, "x has head_dim 40, expected a power of two with rotate"),
    "smooth": (dict(smooth=1), TypeError, "smooth is a int, expected a bool"),
    "no bounds": (dict(x=PACKED), ValueError, "cu_seqlens is None.*: recipe 'head' of a"),
    "no bounds, smooth": (dict(x=PACKED, recipe="tensor", smooth=True), ValueError, "cu_seqlens is None.*: smooth"),
    "bounds": (dict(cu_seqlens=CU), ValueError, r"cu_seqlens is given with x of shape .* expected \(total, heads"),
    "bounds dtype": (dict(x=PACKED, cu_seqlens=CU.long()), TypeError, "cu_seqlens has dtype torch.int64, expected"),
    "used": (dict(seqused=CU), ValueError, r"seqused has shape \(3\), expected \(2,\)"),
    "used of packed": (dict(x=PACKED, recipe="tensor", seqused=CU[1:]), ValueError, "seqused is given without cu_seq"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    change, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        fa4.quantize(**(dict(x=X, recipe="head") | change))


DATA = X.to(torch.float8_e4m3fn)
WRONG_BACK = {
    "type": (dict(data=None), TypeError, "data is a NoneType, expected a torch.Tensor"),
    "dtype": (dict(data=X), TypeError, "data has dtype torch.float32, expected float8_e4m3fn"),
    "axes": (dict(data=DATA[0, 0]), ValueError, r"data has shape \(4, 64\), expected"),
    "to": (dict(dtype=torch.int8), TypeError, "dtype is torch.int8, expected float16"),
    "scales": (dict(scales=torch.ones(2, 3)), ValueError, r"scales has shape \(2, 3\), expected one of \(\), \(1"),
    "scales dtype": (dict(scales=torch.ones(2, 4).half()), TypeError, "scales has dtype torch.float16, expected"),
    "no bounds": (dict(data=DATA.flatten(0, 1), scales=torch.ones(2, 4)), ValueError, "cu_seqlens is None"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_BACK)
def test_a_wrong_argument_of_dequantize_is_named(name):
    change, error, text = WRONG_BACK[name]
    with pytest.raises(error, match=text):
        fa4.dequantize(**(dict(data=DATA, scales=torch.ones(2, 4)) | change))
