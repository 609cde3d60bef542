"""Attention of nvidia-cudnn-frontend's kernels in CuTe DSL, which have no autograd of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Attention(torch.autograd.Function):
    """The package's tensors have heads before rows. Its backward of head dims above 256 is another class."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        from cudnn.sdpa.fwd.api_dsl import sdpa_fwd_wrapper_dsl_sm100

        heads_first = [x.detach().transpose(1, 2) for x in (q, k, v)]
        result = sdpa_fwd_wrapper_dsl_sm100(*heads_first, is_causal=causal)
        ctx.save_for_backward(*heads_first, result["o_tensor"], result["lse_tensor"][..., None])
        ctx.causal = causal
        return result["o_tensor"].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        from cudnn.sdpa.bwd import SdpaBwdDslSm100D256
        from cudnn.sdpa.bwd.api_dsl import SdpaBwdDslSm100

        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in (q, k, v)]
        tensors = q, k, v, out, douts[0].contiguous().transpose(1, 2), lse, *grads
        backward = SdpaBwdDslSm100 if q.shape[-1] > 256 else SdpaBwdDslSm100D256
        api = backward(*tensors, is_causal=ctx.causal)
        api.check_support()
        workspace = torch.empty(api.scratch_workspace_bytes(), dtype=torch.uint8, device=q.device)
        api.execute(*tensors, workspace=workspace)
        return *(x.transpose(1, 2) for x in grads), None


LONG = 4097  # length from which clusters of four compute the matrix products of backwards of head dims above 256


@contextmanager
def kernels_of(seqlen: int) -> Iterator[None]:
    """Give short launches the kernels that the package selects for sequences of `seqlen` tokens."""
    from cudnn.sdpa.bwd import api_dsl

    longest = api_dsl._SM100_STAGE3_SMALL_S_MAX
    api_dsl._SM100_STAGE3_SMALL_S_MAX = 0 if seqlen > longest else longest
    try:
        yield
    finally:
        api_dsl._SM100_STAGE3_SMALL_S_MAX = longest
