"""flashinfer-python: normalisations, and attention through its CuTe DSL wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fa4.oracle.cases import Judgement
from tests.emulator.public.rows import Row, attention, by_formula, draw

PACKAGE = "flashinfer-python"


def _rms_norm(seed: int) -> list[Judgement]:
    import flashinfer

    x, weight = draw(seed, (37, 1024), (1024,))
    return by_formula(
        ["out"], [flashinfer.rmsnorm(x, weight)], lambda x, w: functional.rms_norm(x, (1024,), w, 1e-6), x, weight
    )


def _rms_norm_of_heads(seed: int) -> list[Judgement]:
    import flashinfer

    x, weight = draw(seed, (21, 6, 128), (128,))
    return by_formula(
        ["out"], [flashinfer.rmsnorm(x, weight)], lambda x, w: functional.rms_norm(x, (128,), w, 1e-6), x, weight
    )


def _gemma_norm(seed: int) -> list[Judgement]:
    import flashinfer

    x, weight = draw(seed, (37, 1024), (1024,))
    return by_formula(
        ["out"], [flashinfer.gemma_rmsnorm(x, weight)],
        lambda x, w: functional.rms_norm(x, (1024,), 1 + w, 1e-6), x, weight,
    )  # fmt: skip


def _added_norm(seed: int) -> list[Judgement]:
    """Both arguments are results."""
    import flashinfer

    x, residual, weight = draw(seed, (37, 1024), (37, 1024), (1024,))
    before = x.clone(), residual.clone()
    flashinfer.fused_add_rmsnorm(x, residual, weight)

    def formula(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
        return [functional.rms_norm(x + residual, (1024,), weight, 1e-6), x + residual]

    return by_formula(["out", "sum"], [x, residual], formula, *before, weight)


def _layer_norm(seed: int) -> list[Judgement]:
    import flashinfer

    x, weight, bias = draw(seed, (37, 1024), (1024,), (1024,))
    weight, bias = weight.float(), bias.float()
    return by_formula(
        ["out"], [flashinfer.layernorm(x, weight, bias)],
        lambda x, w, b: functional.layer_norm(x, (1024,), w, b, 1e-6), x, weight, bias,
    )  # fmt: skip


def _prefill(causal: bool, head_dim: int, seed: int) -> list[Judgement]:
    """Packed sequences of 150 and 200 rows, 2 heads on 1."""
    from flashinfer.cute_dsl.attention.wrappers.batch_prefill import BatchPrefillCuteDSLWrapper

    q, k, v = draw(seed, (350, 2, head_dim), (350, 1, head_dim), (350, 1, head_dim))
    ends = torch.tensor([0, 150, 350], dtype=torch.int32, device="cuda")
    wrapper = BatchPrefillCuteDSLWrapper(torch.zeros(1024, dtype=torch.uint8, device="cuda"))
    wrapper.plan(ends, ends, 2, 1, head_dim, head_dim, causal=causal, sm_scale=head_dim**-0.5,
                 q_data_type=q.dtype, kv_data_type=q.dtype)  # fmt: skip

    def formula(*whole: Tensor) -> Tensor:
        parts = zip(*(x.split([150, 200]) for x in whole))
        return torch.cat([attention(*(x[None] for x in part), causal=causal)[0] for part in parts])

    return by_formula(["out"], [wrapper.run(q, k, v)], formula, q, k, v)


def _decode(seed: int) -> list[Judgement]:
    from flashinfer.cute_dsl.attention.wrappers.batch_decode import BatchDecodeCuteDSLWrapper

    q, k, v = draw(seed, (2, 1, 8, 128), (2, 300, 1, 128), (2, 300, 1, 128))
    wrapper = BatchDecodeCuteDSLWrapper(torch.zeros(1 << 20, dtype=torch.float32, device="cuda"))
    wrapper.plan(2, 300, 8, 1, 128, q_data_type=q.dtype, kv_data_type=q.dtype)
    return by_formula(["out"], [wrapper.run(q, k, v)], functools.partial(attention, causal=False), q, k, v)


def _latent_decode(seed: int) -> list[Judgement]:
    """512 + 64 columns in pages of 128 rows, 128 heads."""
    from flashinfer.cute_dsl.attention.wrappers.batch_mla import cute_dsl_mla_decode

    query, cache = draw(seed, (1, 1, 128, 576), (3, 128, 576))
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([300], dtype=torch.int32, device="cuda")
    workspace = torch.zeros(1 << 24, dtype=torch.int8, device="cuda")
    out = cute_dsl_mla_decode(query, cache, workspace, 512, 64, table, lengths, 300, 576**-0.5)

    def formula(query: Tensor, cache: Tensor) -> Tensor:
        rows = cache[[2, 0, 1]].reshape(1, 384, 1, 576)[:, :300]
        return attention(query, rows, rows[..., :512], causal=False)

    return by_formula(["out"], [out], formula, query, cache)


def _task_prefill(causal: bool, seed: int) -> list[Judgement]:
    """Task-scheduled: packed sequences of 150 and 400 rows, 4 heads on 2, several tiles a CTA."""
    from flashinfer.attention.prims_ts import batch_prefill

    q, k, v = draw(seed, (550, 4, 128), (550, 2, 128), (550, 2, 128))
    ends = torch.tensor([0, 150, 550], dtype=torch.int32, device="cuda")
    mask = "causal" if causal else "dense"
    out = batch_prefill(q, k, v, qo_indptr=ends, kv_indptr=ends, mask_type=mask)

    def formula(*whole: Tensor) -> Tensor:
        parts = zip(*(x.split([150, 400]) for x in whole))
        return torch.cat([attention(*(x[None] for x in part), causal=causal)[0] for part in parts])

    return by_formula(["out"], [out], formula, q, k, v)


_PAGES, _PAGE = [[5, 0, 3, 7, 6], [2, 4, 1, 8, 9]], 64
_LENGTHS = (300, 130)


def _task_decode(queries: int, seed: int) -> list[Judgement]:
    """Task-scheduled: 8 heads on 1, pages of 64 keys, sequences of 300 and 130."""
    from flashinfer.attention.prims_ts import batch_decode_with_paged_kv_cache

    q, pool = draw(seed, (2, queries, 8, 128), (2, 10, 1, _PAGE, 128))
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device="cuda")
    table = torch.tensor(_PAGES, dtype=torch.int32, device="cuda")
    given = q[:, 0].contiguous() if queries == 1 else q
    out = batch_decode_with_paged_kv_cache(
        given, (pool[0], pool[1]), table, lengths, seq_len_q=queries, mask_type="dense" if queries == 1 else "causal"
    )

    def formula(q: Tensor, pool: Tensor) -> Tensor:
        rows = [pool[:, pages, 0].reshape(2, 1, -1, 1, 128)[:, :, :n] for pages, n in zip(_PAGES, _LENGTHS)]
        return torch.cat([attention(q[i : i + 1], k, v, causal=True) for i, (k, v) in enumerate(rows)])

    return by_formula(["out"], [out.reshape(q.shape)], formula, q, pool)


def _task_latent_decode(heads: int, seed: int) -> list[Judgement]:
    """Task-scheduled: 512 + 64 columns in pages of 64 rows, sequences of 300 and 130."""
    from flashinfer.attention.prims_ts import batch_mla_decode_with_paged_kv_cache

    q, pool = draw(seed, (2, 1, heads, 576), (10, _PAGE, 576))
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device="cuda")
    table = torch.tensor(_PAGES, dtype=torch.int32, device="cuda")
    out = batch_mla_decode_with_paged_kv_cache(q, pool, table, lengths, bmm1_scale=576**-0.5)

    def formula(q: Tensor, pool: Tensor) -> Tensor:
        rows = [pool[pages].reshape(1, -1, 1, 576)[:, :n] for pages, n in zip(_PAGES, _LENGTHS)]
        return torch.cat([attention(q[i : i + 1], k, k[..., :512], causal=True) for i, k in enumerate(rows)])

    return by_formula(["out"], [out.reshape(2, 1, heads, 512)], formula, q, pool)


def _rows() -> list[Row]:
    norms: dict[str, Callable[[int], list[Judgement]]] = {
        "rmsnorm, 37 x 1024": _rms_norm,
        "rmsnorm of heads, 21 x 6 x 128": _rms_norm_of_heads,
        "gemma_rmsnorm, 37 x 1024": _gemma_norm,
        "fused_add_rmsnorm, 37 x 1024": _added_norm,
        "layernorm, 37 x 1024": _layer_norm,
    }
    attentions: dict[str, Callable[[int], list[Judgement]]] = {
        "BatchPrefillCuteDSLWrapper, d128": functools.partial(_prefill, False, 128),
        "BatchPrefillCuteDSLWrapper, causal d64": functools.partial(_prefill, True, 64),
        "BatchDecodeCuteDSLWrapper, 8 heads on 1, d128": _decode,
        "cute_dsl_mla_decode, 128 heads, pages of 128": _latent_decode,
        "prims_ts.batch_prefill, 150 and 400 rows, 4 heads on 2": functools.partial(_task_prefill, False),
        "prims_ts.batch_prefill, causal, 150 and 400 rows, 4 heads on 2": functools.partial(_task_prefill, True),
        "prims_ts.batch_decode, pages of 64": functools.partial(_task_decode, 1),
        "prims_ts.batch_decode, pages of 64, 4 queries": functools.partial(_task_decode, 4),
        "prims_ts.batch_mla_decode, 128 heads, pages of 64": functools.partial(_task_latent_decode, 128),
        "prims_ts.batch_mla_decode, 16 heads, pages of 64": functools.partial(_task_latent_decode, 16),
    }
    rows = [Row(PACKAGE, name, chip, run) for chip in ("sm_100a", "sm_90a") for name, run in norms.items()]
    return rows + [Row(PACKAGE, name, "sm_100a", run) for name, run in attentions.items()]


ROWS = _rows()
