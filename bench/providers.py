"""Who is measured: each provider runs attention on (batch, seqlen, heads, head_dim) tensors, or says why it cannot."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4
from fa4.oracle.cases import in_blocks
from fa4.runtime import scaled_rows

from .suites import IN_BLOCKS, BenchCase

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class NotOffered(ValueError):
    """A provider does not have what a case needs."""


@dataclass(frozen=True, slots=True)
class Provider:
    """`build(case)` returns a function of q, k, v; `unavailable()` a reason, or "" where it can run."""

    name: str
    build: Callable[[BenchCase], Attention]
    unavailable: Callable[[torch.device], str]


def _fa4(**flags) -> Callable[[BenchCase], Attention]:
    def build(case: BenchCase) -> Attention:
        if case.page_size is not None or case.converts_kv or case.v_in_k:
            return _in_cache(case, **flags)
        if case.dtype in IN_BLOCKS:
            return _in_blocks(case, **flags)
        window_size = case.window, None
        return functools.partial(fa4.flash_attn_func, causal=case.causal, window_size=window_size, **flags)

    return build


def _in_blocks(case: BenchCase, **flags) -> Attention:
    """q, k and v are rounded to 8 or 4 bits at the first call."""
    made: dict[str, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            for name, (data, scales) in zip("qkv", in_blocks(case.dtype, q, k, v)):
                made.update({name: data, f"{name}_descale": scales})
        return fa4.flash_attn_func(**made, causal=case.causal, window_size=(case.window, None), **flags)

    return attend


def _in_cache(case: BenchCase, **flags) -> Attention:
    """k and v are put into a cache at the first call: pages in a random order, numbers of 8 or 4 bits."""
    made: list = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            table, seqlens = None, torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=k.device)
            if case.page_size is not None:
                k, v, table, seqlens = paged(k, v, case.page_size)
            descales = None, None
            if case.fp8:
                k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
                descales = tuple(torch.ones(case.heads_kv, device=k.device) for _ in range(2))
            if case.nvfp4:
                (k, k_scales), (v, v_scales) = fa4.quantize(k, "nvfp4"), fa4.quantize(v, "nvfp4")
                descales = k_scales, v_scales
            if case.scaled_rows:
                k = scaled_rows.quantised(k)
            if case.v_in_k:
                v = k[..., : case.head_dim_v]
            made.extend((k, v, table, seqlens, *descales))
        k_cache, v_cache, table, seqlens, k_descale, v_descale = made
        call = dict(page_table=table, cache_seqlens=seqlens, k_descale=k_descale, v_descale=v_descale, **flags)
        window_size = case.window, None
        return fa4.flash_attn_with_kvcache(q, k_cache, v_cache, causal=case.causal, window_size=window_size, **call)

    return attend


def paged(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pages of k and of v, the table of pages, and the lengths."""
    batch, rows = k.shape[:2]
    per_sequence = -(-rows // size)
    order = torch.randperm(batch * per_sequence, generator=torch.Generator().manual_seed(0)).to(k.device)
    made = []
    for x in (k, v):
        padded = F.pad(x, (0, 0, 0, 0, 0, per_sequence * size - rows))
        pages = padded.reshape(batch * per_sequence, size, *x.shape[2:])
        made.append(torch.empty_like(pages).index_copy_(0, order, pages))
    table = order.view(batch, per_sequence).int()
    return made[0], made[1], table, torch.full((batch,), rows, dtype=torch.int32, device=k.device)


def _sdpa(backend: SDPBackend | None) -> Callable[[BenchCase], Attention]:
    """torch's attention; it takes (batch, heads, seqlen, head_dim), of which ours is a transposed view. It has none
    of the pages: beside cases with them it shows what the same keys take where they lie evenly."""

    def build(case: BenchCase) -> Attention:
        if case.causal and case.seqlen_q not in (1, case.seqlen_k):
            raise NotOffered("torch aligns causal masks top-left")
        causal = case.causal and case.seqlen_q > 1

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(
                *heads_first, is_causal=causal, enable_gqa=case.heads_q != case.heads_kv
            )
            return out.transpose(1, 2)

        if backend is None:
            return attend

        def attend_with_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attend(q, k, v)

        return attend_with_backend

    return build


def _flash_attn_4(case: BenchCase) -> Attention:
    from flash_attn.cute import flash_attn_func

    if case.page_size is not None:
        return _without_window(_flash_attn_4_in_pages)(case)
    if case.window is not None:
        return lambda q, k, v: flash_attn_func(q, k, v, window_size=(case.window, 0))[0]
    return lambda q, k, v: flash_attn_func(q, k, v, causal=case.causal)[0]


def _flash_attn_4_in_pages(case: BenchCase) -> Attention:
    from flash_attn.cute import flash_attn_varlen_func

    pages: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not pages:
            pages.extend(paged(k, v, case.page_size or 1))
        k_pages, v_pages, table, seqlens = pages
        return flash_attn_varlen_func(q, k_pages, v_pages, page_table=table, seqused_k=seqlens, causal=case.causal)[0]

    return attend


_FLASHINFER_PAGE, _FLASHINFER_WORKSPACE = 16, 256 << 20  # rows; bytes


def _flashinfer(case: BenchCase) -> Attention:
    """Its batched attention on pages, which it always has; the plan is made once, at the first call."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    if case.direction != "fwd":
        raise NotOffered("flashinfer has no backward")
    size = case.page_size or _FLASHINFER_PAGE
    planned: list[Callable[[Tensor], Tensor]] = []

    def plan(q: Tensor, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
        k_pages, v_pages, table, _ = paged(k, v, size)
        batch, rows, heads_q, head_dim = q.shape
        per_sequence, sequences = table.shape[1], torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        of_last = torch.full_like(sequences[1:], k.shape[1] - (per_sequence - 1) * size)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=q.device), "NHD"
        )
        wrapper.plan(
            sequences * rows, sequences * per_sequence, table.flatten(), of_last, heads_q, k.shape[2], head_dim, size,
            head_dim_vo=v.shape[3], causal=case.causal, q_data_type=q.dtype,
        )  # fmt: skip
        return lambda q: wrapper.run(q.flatten(0, 1), (k_pages, v_pages)).view(batch, rows, heads_q, -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not planned:
            planned.append(plan(q, k, v))
        return planned[0](q)

    return attend


def _flex(case: BenchCase) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask, shift = None, case.seqlen_k - case.seqlen_q
    if case.window is not None:

        def is_visible(b, h, i, j):
            return (j <= i + shift) & (j >= i + shift - case.window)

        mask = create_block_mask(is_visible, None, None, case.seqlen_q, case.seqlen_k)
    elif case.causal:
        mask = create_block_mask(lambda b, h, i, j: j <= i + shift, None, None, case.seqlen_q, case.seqlen_k)
    # A backward is timed many times over one forward, whose buffers it must not reuse then.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()  # else its limit on recompilation ends compiled code after eight cases
    compiled = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(*heads_first, block_mask=mask, enable_gqa=case.heads_q != case.heads_kv).transpose(1, 2)

    return attend


def _without_window(build: Callable[[BenchCase], Attention]) -> Callable[[BenchCase], Attention]:
    def build_unless_window(case: BenchCase) -> Attention:
        if case.window is not None:
            raise NotOffered("has no windows")
        return build(case)

    return build_unless_window


def _of_16_bits(build: Callable[[BenchCase], Attention]) -> Callable[[BenchCase], Attention]:
    def build_unless_8bit(case: BenchCase) -> Attention:
        if case.converts_kv:
            raise NotOffered("is not given caches of 8-bit numbers here")
        if case.dtype in IN_BLOCKS:
            raise NotOffered(f"has no {case.dtype}")
        return build(case)

    return build_unless_8bit


def _anywhere(device: torch.device) -> str:
    return ""


def _on_cuda(device: torch.device) -> str:
    return "" if device.type == "cuda" else "needs a CUDA device"


def _with_module(name: str) -> Callable[[torch.device], str]:
    def reason(device: torch.device) -> str:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        return _on_cuda(device) or ("" if found else f"{name} is not installed")

    return reason


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("fa4", _fa4(), _anywhere),
        Provider("fa4-deterministic", _fa4(deterministic=True), _anywhere),
        Provider("fa4-torch", _fa4(backend="torch"), _anywhere),
        Provider("sdpa", _of_16_bits(_without_window(_sdpa(None))), _anywhere),
        Provider("fa2", _of_16_bits(_without_window(_sdpa(SDPBackend.FLASH_ATTENTION))), _on_cuda),
        Provider("cudnn", _of_16_bits(_without_window(_sdpa(SDPBackend.CUDNN_ATTENTION))), _on_cuda),
        Provider("flash-attn-4", _of_16_bits(_flash_attn_4), _with_module("flash_attn.cute")),
        Provider("flashinfer", _of_16_bits(_without_window(_flashinfer)), _with_module("flashinfer")),
        Provider("flex", _of_16_bits(_flex), _with_module("triton")),
    )
}
