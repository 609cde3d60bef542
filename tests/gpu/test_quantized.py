"""Conversion of 8-bit numbers to 16 bits on a GPU."""

import pytest
import torch

import fa4
from tests.gpu.offered import needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["tensor", "head", "block128", "mxfp8"])
def test_products_with_factors_are_rounded_once(recipe, dtype, seed):
    """A factor without dimensions is no exception: in a product, torch rounds it to the other operand's dtype."""
    x = torch.randn(2, 300, 4, 64, generator=torch.Generator().manual_seed(seed)).cuda()
    data, scales = fa4.quantize(x, recipe)
    exact = fa4.dequantize(data, scales, torch.float32)
    assert torch.equal(fa4.dequantize(data, scales, dtype), exact.to(dtype))
