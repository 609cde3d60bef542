"""nvidia-cudnn-frontend: the kernels that it has in CuTe DSL. libcudnn is not needed for them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fa4.oracle.cases import Judgement
from tests.emulator.public import cudnn_attention, cudnn_sparse
from tests.emulator.public.rows import Row, attention, by_formula, draw

PACKAGE = "nvidia-cudnn-frontend"


def _dense(chip: str, causal: bool, head_dim: int, seed: int) -> list[Judgement]:
    """Heads come before rows in its tensors."""
    from cudnn.sdpa.fwd import api_dsl

    q, k, v = draw(seed, (1, 200, 2, head_dim), (1, 200, 1, head_dim), (1, 200, 1, head_dim))
    function = getattr(api_dsl, f"sdpa_fwd_wrapper_dsl_{chip}")
    result = function(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    out = result["o_tensor"].transpose(1, 2)
    return by_formula(["out"], [out], functools.partial(attention, causal=causal), q, k, v)


def _flex(head_dim: int, seed: int) -> list[Judgement]:
    """Intervals of keys [0, i] for query i: causal; with gradients."""
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    q, k, v, upstream = draw(seed, *((1, 200, 2, head_dim),) * 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.arange(1, 201, dtype=torch.int32, device="cuda").reshape(1, 1, 200)
    plan = create_mask_plan(ends, q, k, v)
    out = flex_attn_func(q, k, v, mask_plan=plan)
    grads = torch.autograd.grad(out, leaves, upstream)

    def formula(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> list[Tensor]:
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*given, causal=True)
        return [out.detach(), *torch.autograd.grad(out, given, upstream)]

    return by_formula(["out", "dq", "dk", "dv"], [out, *grads], formula, *(x.detach() for x in (q, k, v)), upstream)


def _gemm_swiglu(seed: int) -> list[Judgement]:
    """The product alone is judged: its gate takes columns in an order of the kernel's own."""
    import cudnn

    a, b = draw(seed, (256, 128), (256, 128))
    result = cudnn.gemm_swiglu_wrapper_sm100(a[..., None], b[..., None])
    return by_formula(["ab12"], [result["ab12_tensor"][..., 0]], lambda a, b: a @ b.T, a, b)


def _rms_norm_hadamard(seed: int) -> list[Judgement]:
    """Blocks of 16 columns are rotated by a Hadamard matrix; amax is over the rows of a CTA."""
    import cudnn

    x, weight = draw(seed, (64, 2048), (2048,))
    result = cudnn.rmsnorm_rht_amax_wrapper_sm100(x, weight)
    rows = 64 // result["amax_tensor"].numel()

    def formula(x: Tensor, weight: Tensor) -> list[Tensor]:
        hadamard = x.new_ones(1, 1)
        for _ in range(4):
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
        normed = functional.rms_norm(x, (2048,), weight, 1e-5)
        rotated = (normed.reshape(64, 128, 16) @ hadamard / 4).reshape(64, 2048)
        return [rotated, rotated.reshape(-1, rows * 2048).abs().amax(1)]

    return by_formula(["out", "amax"], [result["o_tensor"], result["amax_tensor"]], formula, x, weight)


def _causal_convolution(seed: int) -> list[Judgement]:
    from cudnn.causal_conv1d_bulk_sm100.api import causal_conv1d_bulk_fwd_wrapper_sm100

    x, weight = draw(seed, (1, 96, 256), (256, 4))
    with torch.no_grad():
        out = causal_conv1d_bulk_fwd_wrapper_sm100(x, weight)["output_tensor"]

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        padded = functional.pad(x.transpose(1, 2), (3, 0))
        return functional.silu(functional.conv1d(padded, weight[:, None], groups=256)).transpose(1, 2)

    return by_formula(["out"], [out], formula, x, weight)


def _rows() -> list[Row]:
    blackwell: dict[str, Callable[[int], list[Judgement]]] = {
        "sdpa_fwd_wrapper_dsl_sm100, d128": functools.partial(_dense, "sm100", False, 128),
        "sdpa_fwd_wrapper_dsl_sm100, causal d128": functools.partial(_dense, "sm100", True, 128),
        "sdpa_fwd_wrapper_dsl_sm100, causal d256": functools.partial(_dense, "sm100", True, 256),
        "sdpa_fwd_wrapper_dsl_sm100, d512": functools.partial(_dense, "sm100", False, 512),
        "gemm_swiglu_wrapper_sm100, 256 x 256 x 128": _gemm_swiglu,
        "rmsnorm_rht_amax_wrapper_sm100, 64 x 2048": _rms_norm_hadamard,
        "causal_conv1d_bulk_fwd_wrapper_sm100, 96 x 256": _causal_convolution,
    }
    rows = [Row(PACKAGE, name, "sm_100a", run) for name, run in blackwell.items()]
    rows += [
        Row(PACKAGE, f"flex_attn_func and its gradients, d{head_dim}", chip, functools.partial(_flex, head_dim))
        for chip in ("sm_100a", "sm_90a")
        for head_dim in (128, 64)
    ]
    rows.append(Row(PACKAGE, "sdpa_fwd_wrapper_dsl_sm90, d512", "sm_90a",
                    functools.partial(_dense, "sm90", False, 512)))  # fmt: skip
    lengths = 300, 0, 100, 257
    several: dict[str, Callable[[int], list[Judgement]]] = {  # tiles a CTA
        "sdpa_fwd_wrapper_dsl_sm100, d128, 4 lengths, 4 heads": functools.partial(
            cudnn_attention.forward, 4, 300, lengths, 128
        ),
        "SdpaFwdDslSm100, head dims (192, 128), few keys": cudnn_attention.short_and_empty,
        "SdpaFwdDslSm100, e4m3, causal d256": cudnn_attention.e4m3,
        "SdpaBwdDslSm100D128, causal d128": functools.partial(cudnn_attention.backward_d128, 128, True, False),
    }
    rows += [Row(PACKAGE, name, "sm_100a", run, sms=2) for name, run in several.items()]
    further: dict[str, Callable[[int], list[Judgement]]] = {
        "sdpa_fwd_wrapper_dsl_sm100, d512, lengths 200, 0 and 100": functools.partial(
            cudnn_attention.forward, 1, 200, (200, 0, 100), 512
        ),
        "SdpaFwdDslSm100, decode d128, 4 heads on 1": functools.partial(cudnn_attention.decode, 128),
        "SdpaFwdDslSm100, decode d256, 4 heads on 1": functools.partial(cudnn_attention.decode, 256),
        "SdpaBwdDslSm100D128, deterministic d128": functools.partial(cudnn_attention.backward_d128, 128, False, True),
        "SdpaBwdDslSm100D128, deterministic causal d64": functools.partial(
            cudnn_attention.backward_d128, 64, True, True
        ),
        "SdpaBwdDslSm100, causal d512": functools.partial(cudnn_attention.gradients, 512),
        "SdpaBwdDslSm100, causal d512, clusters of four": functools.partial(cudnn_attention.gradients, 4097),
        "block_sparse_attention and its gradients, blocks of 128": functools.partial(cudnn_sparse.of_blocks, 128, True),
        "sparse_attention_forward_wrapper, 64 heads": cudnn_sparse.sparse_forward,
        "sparse_attention_backward_wrapper, 64 heads, d576": functools.partial(cudnn_sparse.sparse_backward, 576),
        "indexer_backward_wrapper, 64 heads": cudnn_sparse.indexer,
        "dense_indexer_backward_wrapper, 64 heads": cudnn_sparse.dense_indexer,
    }
    rows += [Row(PACKAGE, name, "sm_100a", run) for name, run in further.items()]
    rows += [
        Row(PACKAGE, "block_sparse_attention, blocks of 64", "sm_90a",
            functools.partial(cudnn_sparse.of_blocks, 64, False)),
        Row(PACKAGE, "indexer_backward_wrapper, 64 heads", "sm_90a", cudnn_sparse.indexer),
        *(Row(PACKAGE, f"sdpa_bwd_wrapper_sm80, deterministic causal d{head_dim}", "sm_80",
              functools.partial(cudnn_attention.backward_sm80, head_dim)) for head_dim in (64, 128)),
    ]  # fmt: skip
    return rows


ROWS = _rows()
