"""Backend of vLLM's latent attention (MLA): decoding of absorbed queries on a paged cache of latents.

Prompts go through vLLM's own layer, which projects latents to keys and values per head and calls a prefill backend:
`prefill.MlaPrefill` is fa4's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from ...kvcache import flash_attn_with_kvcache
from ...runtime.spec import AttentionSpec, CacheSpec
from . import NAME
from .backend import FP8_CACHES, Backend, has_kernel, is_batch_invariant

LATENT, ROPE, PAGE = 512, 64, 16
_CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class MlaDecodeMetadata(MLACommonDecodeMetadata):
    """Metadata of the decoded part of a batch. Sequence b's queries are rows query_start_loc[b] to query_start_loc[b +
    1]; they are the last of its seq_lens[b] rows in the cache."""

    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int


class MlaBackend(MLACommonBackend):
    """Backend for rows of 512 + 64 columns in a paged cache of 16 or 8 bits."""

    supported_dtypes: ClassVar[list[torch.dtype]] = Backend.supported_dtypes
    supported_kv_cache_dtypes: ClassVar[list[str]] = Backend.supported_kv_cache_dtypes

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type:
        return MlaAttention

    @staticmethod
    def get_builder_cls() -> type:
        return MlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(PAGE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT + ROPE]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether kernels of fa4 serve decoding on such a GPU, from caches of 16 and of 8 bits."""
        caches = (CacheSpec(page_size=PAGE), CacheSpec(page_size=PAGE, dtype=torch.float8_e4m3fn))
        return all(
            has_kernel(
                AttentionSpec(
                    torch.bfloat16, LATENT + ROPE, LATENT, 128, 1, 1.0, window_right=0, has_seqused_k=True,
                    cache=cache, v_in_k=True,
                ),
                capability,
            )
            for cache in caches
        )  # fmt: skip

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why a 16-bit cache of another dtype than the model's is refused, or None."""
        if _CACHE_DTYPES.get(kv_cache_dtype or "auto", dtype) == dtype:
            return None
        return f"kv_cache_dtype is {kv_cache_dtype!r}, expected the model's {dtype}, or 'auto'"


class MlaMetadataBuilder(MLACommonMetadataBuilder):
    """Builder of vLLM's metadata with `MlaDecodeMetadata`. Lengths stay on the device, so queries may have any number
    of rows in one batch, and batches with one number can be captured in a CUDA graph."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.VARLEN

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.supports_draft_decode_metadata_update = getattr(self, "dcp_world_size", 1) == 1

    def update_draft_decode_metadata(self, metadata: MLACommonMetadata) -> None:
        """Do nothing: metadata of decoding is vLLM's own tensors."""

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> MlaDecodeMetadata:
        return MlaDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )


class MlaAttention(MLACommonImpl):
    """Latent attention of one layer.

    Raises:
        NotImplementedError: a cache with other numbers than `MlaBackend` supports, a window, softcap, ALiBi slopes, or
            attention of an encoder.
    """

    can_return_lse_for_decode = True
    supports_dcp = True  # one query row a sequence: vLLM leaves longer queries to prefill
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        unsupported = dict(alibi_slopes=alibi_slopes, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap)
        for name, value in unsupported.items():
            if value:
                raise NotImplementedError(f"{name} is {value!r}, expected None: vLLM's prefill backends take none")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type is {attn_type!r}, expected a decoder's own attention")
        if kv_cache_dtype not in MlaBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype is {kv_cache_dtype!r}, expected one of {MlaBackend.supported_kv_cache_dtypes}"
            )
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        self.batch_invariant = is_batch_invariant()
        self.supports_quant_query_input = False  # kernels convert rows of 8 bits, and take queries of 16

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the rows of the cache, which vLLM has written before.

        Args:
            q: (tokens, heads, 576), absorbed, or its columns of latents and its rotated ones as two tensors.
            kv_c_and_k_pe_cache: (pages, rows of a page, 576); e4m3 if the layer's cache is fp8.
            layer: has the factor of an fp8 cache.

        Returns:
            out (tokens, heads, 512) and, with decode context parallelism, lse (tokens, heads) of this rank's rows.
        """
        batch = attn_metadata.decode
        keys, descales = kv_c_and_k_pe_cache.unsqueeze(-2), {}
        if self.kv_cache_dtype in FP8_CACHES:
            keys = keys.view(torch.float8_e4m3fn)
            descales = dict(k_descale=layer._k_scale, v_descale=layer._k_scale)  # values are columns of the same rows
        out, lse = flash_attn_with_kvcache(
            torch.cat(q, -1) if isinstance(q, tuple) else q,
            keys,
            keys[..., : self.kv_lora_rank],
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            batch_invariant=self.batch_invariant,
            return_lse=True,
            **descales,
        )
        return out, lse.transpose(0, 1) if self.need_to_return_lse_for_decode else None
