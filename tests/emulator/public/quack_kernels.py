"""quack-kernels: matrix products with their epilogues, normalisations, softmax, cross-entropy, top k, rotary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fa4.oracle.cases import Judgement
from tests.emulator.public.rows import Row, by_formula, draw

PACKAGE = "quack-kernels"


def _gradients(formula: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """The result of `formula` and the gradients of all its arguments but the last, which is the upstream gradient."""

    def with_gradients(*given: Tensor) -> list[Tensor]:
        *inputs, upstream = given
        leaves = [x.clone().requires_grad_() for x in inputs]
        result = formula(*leaves)
        return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]

    return with_gradients


def _differentiated(
    function: Callable[..., Tensor], formula: Callable[..., Tensor], names: str, inputs: list[Tensor], upstream: Tensor
) -> list[Judgement]:
    """Judge a differentiable function and its gradients."""
    leaves = [x.requires_grad_() for x in inputs]
    result = function(*leaves)
    grads = torch.autograd.grad(result, leaves, upstream)
    given = [x.detach() for x in (*inputs, upstream)]
    return by_formula(names.split(), [result, *grads], _gradients(formula), *given)


def _rms_norm(seed: int) -> list[Judgement]:
    from quack import rmsnorm

    x, weight, upstream = draw(seed, (70, 1024), (1024,), (70, 1024))
    weight = weight.float()
    return _differentiated(
        rmsnorm, lambda x, w: functional.rms_norm(x, (1024,), w, 1e-6), "out dx dweight", [x, weight], upstream
    )


def _rms_norm_residual(seed: int) -> list[Judgement]:
    from quack.rmsnorm import rmsnorm

    x, residual, weight = draw(seed, (33, 4096), (33, 4096), (4096,))
    out, summed = rmsnorm(x, weight.float(), residual=residual, prenorm=True)

    def formula(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
        return [functional.rms_norm(x + residual, (4096,), weight, 1e-6), x + residual]

    return by_formula(["out", "sum"], [out, summed], formula, x, residual, weight)


def _layer_norm(seed: int) -> list[Judgement]:
    from quack.rmsnorm import layernorm_fwd

    x, weight, bias = draw(seed, (37, 1024), (1024,), (1024,))
    out = layernorm_fwd(x, weight.float(), bias.float())
    return by_formula(
        ["out"], [out], lambda x, w, b: functional.layer_norm(x, (1024,), w, b, 1e-6), x, weight.float(), bias.float()
    )


def _softmax(columns: int) -> Callable[[int], list[Judgement]]:
    def run(seed: int) -> list[Judgement]:
        from quack import softmax

        x, upstream = draw(seed, (20, columns), (20, columns))
        return _differentiated(softmax, lambda x: x.softmax(-1), "out dx", [x], upstream)

    return run


def _cross_entropy(seed: int) -> list[Judgement]:
    from quack import cross_entropy

    (logits,) = draw(seed, (37, 1024))
    target = torch.randint(0, 1024, (37,), generator=torch.Generator().manual_seed(seed)).cuda()
    upstream = torch.ones((), device="cuda")
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, target)
    (grad,) = torch.autograd.grad(loss, leaf, upstream)

    def formula(x: Tensor, target: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        loss = functional.cross_entropy(x, target)
        return [loss.detach(), *torch.autograd.grad(loss, x)]

    return by_formula(["loss", "dx"], [loss, grad], formula, logits.detach(), target)


def _top_k(seed: int) -> list[Judgement]:
    from quack.topk import topk

    (x,) = draw(seed, (40, 1024))
    values, indices = topk(x, 16)
    picked = torch.gather(x, 1, indices.long())
    return by_formula(["values", "picked"], [values, picked], lambda x: [x.topk(16)[0]] * 2, x)


def _rotary(seed: int) -> list[Judgement]:
    from quack.rotary import apply_rotary_emb

    x, angle = draw(seed, (2, 50, 2, 128), (50, 64))
    cos, sin = angle.float().cos(), angle.float().sin()

    def formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    return by_formula(["out"], [apply_rotary_emb(x, cos, sin)], formula, x, cos, sin)


def _product(name: str, *shapes: tuple[int, ...], formula: Callable[..., Any], **options: Any) -> Callable:
    """A product of `quack.gemm_interface`, with its standing configuration instead of a search among all."""

    def run(seed: int) -> list[Judgement]:
        from quack import gemm_interface

        given = draw(seed, *shapes)
        results = getattr(gemm_interface, name)(*given, tuned=False, **options)
        results = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
        return by_formula([f"result {i}" for i in range(len(results))], results, formula, *given)

    return run


def _symmetric(seed: int) -> list[Judgement]:
    from quack.gemm_interface import gemm_symmetric

    (a,) = draw(seed, (1, 256, 192))
    result = gemm_symmetric(a, a.mT)
    result = next(x for x in (result if isinstance(result, tuple) else (result,)) if x is not None)
    return by_formula(["out"], [result], lambda a: a @ a.mT, a)


_PROBLEMS = [37, 213, 50]  # rows of each, one behind the other


def _ends() -> Tensor:
    return torch.tensor([0, *_PROBLEMS], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()


def _packed(seed: int) -> list[Judgement]:
    """Rows of three problems one behind the other."""
    from quack.gemm_interface import gemm

    a, b = draw(seed, (300, 128), (3, 128, 192))
    out = gemm(a, b, cu_seqlens_m=_ends(), tuned=False)

    def formula(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([part @ one for part, one in zip(a.split(_PROBLEMS), b)])

    return by_formula(["out"], [out], formula, a, b)


def _gathered(seed: int) -> list[Judgement]:
    """A mixture of experts' first product: rows of tokens, some of them twice, are gathered for three problems."""
    from quack.gemm_interface import gemm

    a, b = draw(seed, (180, 192), (3, 192, 264))
    index = torch.randint(0, 180, (300,), generator=torch.Generator().manual_seed(seed))
    out = gemm(a, b, cu_seqlens_m=_ends(), A_idx=index.to(torch.int32).cuda(), tuned=False)

    def formula(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a[rows] @ one for rows, one in zip(index.split(_PROBLEMS), b)])

    return by_formula(["out"], [out], formula, a, b)


def _packed_sums(seed: int) -> list[Judgement]:
    """A mixture of experts' gradients of weights: sums over the rows of each of three problems."""
    from quack.gemm_interface import gemm

    a, b = draw(seed, (300, 136), (300, 264))
    out = gemm(a.mT, b, cu_seqlens_k=_ends(), tuned=False)

    def formula(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([x.mT @ y for x, y in zip(a.split(_PROBLEMS), b.split(_PROBLEMS))])

    return by_formula(["out"], [out], formula, a, b)


def _eight_bits(dtype: torch.dtype) -> Callable:
    """Both operands in a float format of 8 bits, without factors."""

    def run(seed: int) -> list[Judgement]:
        from quack.gemm_interface import gemm

        a, b = draw(seed, (200, 256), (272, 256))
        a, b = a.to(dtype), b.to(dtype)
        out = gemm(a, b.mT, out_dtype=torch.bfloat16, tuned=False)
        return by_formula(["out"], [out], lambda a, b: a @ b.T, a, b)

    return run


def _block_scaled(format: str) -> Callable:
    """Operands of 4 to 8 bits with a factor for each 16 or 32 of them.

    They are quantised on the host, where the package would compile its quantiser; the product of what they stand for is
    the oracle's.
    """

    def run(seed: int) -> list[Judgement]:
        from quack.blockscaled import BlockScaledOperand
        from quack.gemm_interface import gemm

        a, b = draw(seed, (384, 256), (256, 256))
        with torch.compiler.set_stance("force_eager"):
            operands = [BlockScaledOperand.quantize(x.cpu(), format) for x in (a, b)]
            exact = [x.dequantize(torch.float32) for x in operands]
        left, right = (x.to("cuda") for x in operands)
        out = gemm(left, right.mT, tuned=False)
        return by_formula(["out"], [out], lambda a, b: a @ b.T, *exact)

    return run


def _gated(a: Tensor, b: Tensor) -> list[Tensor]:
    before = a @ b
    return [before, functional.silu(before[..., ::2]) * before[..., 1::2]]


def _activated(a: Tensor, b: Tensor) -> list[Tensor]:
    before = a @ b
    return [before, functional.gelu(before, approximate="tanh")]


def _rows() -> list[Row]:
    small = ((200, 192), (192, 264))
    norms = {
        "rmsnorm and its gradients, 70 x 1024": _rms_norm,
        "rmsnorm with residual, 33 x 4096": _rms_norm_residual,
        "layernorm, 37 x 1024": _layer_norm,
        "softmax and its gradient, 20 x 512": _softmax(512),
        "softmax and its gradient, 20 x 32768 (cluster)": _softmax(32768),
        "cross_entropy and its gradient, 37 x 1024": _cross_entropy,
        "topk 16 of 1024, 40 rows": _top_k,
        "apply_rotary_emb, 2 x 50 x 2 x 128": _rotary,
    }
    products = {
        "gemm 200 x 264 x 192": _product("gemm", *small, formula=torch.matmul),
        "gemm 520 x 520 x 1096": _product("gemm", (520, 1096), (1096, 520), formula=torch.matmul),
        "gemm 2 x 300 x 520 x 256, batched": _product("gemm", (2, 300, 256), (2, 256, 520), formula=torch.matmul),
        "gemm, packed rows of 3 problems": _packed,
        "gemm_add 200 x 264 x 192": _product("gemm_add", *small, (200, 264), formula=lambda a, b, c: a @ b + c),
        "gemm_act gelu 200 x 264 x 192": _product(
            "gemm_act", *small, activation="gelu_tanh_approx", formula=_activated
        ),
        "gemm_act swiglu 200 x 512 x 192": _product(
            "gemm_act", (200, 192), (192, 512), activation="swiglu", formula=_gated
        ),
        "gemm_symmetric 256 x 192": _symmetric,
        "gemm, gathered rows of 3 problems": _gathered,
        "gemm, sums over 3 packed problems": _packed_sums,
        "gemm e4m3 200 x 272 x 256": _eight_bits(torch.float8_e4m3fn),
        "gemm e5m2 200 x 272 x 256": _eight_bits(torch.float8_e5m2),
    }
    rows = [Row(PACKAGE, name, chip, run) for chip in ("sm_100a", "sm_90a") for name, run in (norms | products).items()]
    rows += [
        Row(PACKAGE, f"gemm {format} 384 x 256 x 256", "sm_100a", _block_scaled(format))
        for format in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3_packed", "mxfp6_e3m2_packed", "mxfp4", "nvfp4")
    ]
    wide = _product("gemm", (2, 520, 256), (2, 256, 520), formula=torch.matmul)
    rows += [Row(PACKAGE, "gemm 2 x 520 x 520 x 256 on 2 SMs", chip, wide, sms=2) for chip in ("sm_100a", "sm_90a")]
    return rows


ROWS = _rows()
