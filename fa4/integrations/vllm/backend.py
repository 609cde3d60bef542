"""Attention backend of vLLM: supported layers, metadata once per batch, and attention on a paged cache."""

from __future__ import annotations

import os
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from ... import scores
from ...api.dense import flash_attn_varlen_func
from ...kvcache import flash_attn_with_kvcache
from . import NAME

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def is_batch_invariant() -> bool:
    """Whether vLLM is asked for results that do not depend on the rest of a batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


class Metadata(NamedTuple):
    """Metadata of a batch. Sequence b's new queries are rows query_start_loc[b] to query_start_loc[b + 1]; they are the
    last of its seq_lens[b] keys."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool


class Backend(AttentionBackend):
    """Backend for decoders on a paged 16-bit cache, and for encoders."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type:
        return Attention

    @staticmethod
    def get_builder_cls() -> type:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class MetadataBuilder(AttentionMetadataBuilder):
    """Builder of `Metadata` from vLLM's common metadata. It reads nothing from the device, so batches with one query
    length can be captured in a CUDA graph."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal differs between requests of a batch, and fa4 takes one for all")
        return Metadata(
            common.num_actual_tokens, common.query_start_loc, common.seq_lens, common.block_table_tensor,
            common.slot_mapping, common.max_query_len, common.max_seq_len, common.causal,
        )  # fmt: skip


class Attention(AttentionImpl):
    """Attention of one layer.

    Raises:
        NotImplementedError: attention between encoder and decoder, an fp8 cache, or a quantized output.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if not Backend.supports_attn_type(attn_type):
            raise NotImplementedError(f"attn_type is {attn_type!r}, expected a decoder's or an encoder's own attention")
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype is {kv_cache_dtype!r}, expected one of {Backend.supported_kv_cache_dtypes}"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, attn_type, sinks
        self.softcap = logits_soft_cap or 0.0
        self.writes_keys = kv_sharing_target_layer_name is None  # else another layer writes them
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._alibi: Any = None
        left = None if sliding_window is None else sliding_window - 1  # vLLM counts the query's own key
        self.window_size = (left, left if attn_type in _ENCODERS else None)
        self.batch_invariant = is_batch_invariant()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values to their pages and attend.

        Args:
            layer: has the scales for writing the cache.
            query, key, value: (tokens, heads, head_size), all requests concatenated; rows from num_actual_tokens on are
                padding.
            kv_cache: (pages, heads_kv, rows of a page, 2 * head_size) with keys before values in each row, or of older
                versions of vLLM, `Backend.get_kv_cache_shape`.
            attn_metadata: None while vLLM measures memory.
            output: like query; rows before num_actual_tokens are written.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("a quantized output is asked for, and fa4 writes 16-bit ones")
        if attn_metadata is None:
            return output.zero_()
        batch, rows = attn_metadata, attn_metadata.num_actual_tokens
        options: dict[str, Any] = dict(
            softmax_scale=self.scale,
            window_size=self.window_size,
            softcap=self.softcap,
            score_mod=self._score_mod(query.device),
            learnable_sink=self.sinks,
            max_seqlen_q=batch.max_query_len,
        )
        if self.attn_type in _ENCODERS:
            lengths = batch.query_start_loc
            options |= dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_k=batch.max_query_len)
            out = flash_attn_varlen_func(query[:rows], key[:rows], value[:rows], **options)
        else:
            k_cache, v_cache = self._split(kv_cache)
            if self.writes_keys and key is not None:
                self._write(layer, key, value, k_cache, v_cache, batch.slot_mapping)
            out = flash_attn_with_kvcache(
                query[:rows],
                k_cache,
                v_cache,
                cache_seqlens=batch.seq_lens,
                page_table=batch.block_table,
                cu_seqlens_q=batch.query_start_loc,
                max_seqlen_k=batch.max_seq_len,
                causal=batch.causal,
                batch_invariant=self.batch_invariant,
                **options,
            )
        output[:rows].copy_(out.view_as(output[:rows]))
        return output

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values, (pages, rows of a page, heads_kv, head_size)."""
        if kv_cache.ndim == 5:
            return kv_cache.unbind(0)
        return kv_cache.transpose(1, 2).split(self.head_size, -1)

    def _write(self, layer: Any, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Write keys and values by vLLM's own kernel, which skips padding (slot -1)."""
        from vllm._custom_ops import reshape_and_cache_flash

        reshape_and_cache_flash(
            key, value, k_cache, v_cache, slots, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )

    def _score_mod(self, device: torch.device) -> Any:
        if self.alibi_slopes is None:
            return None
        if self._alibi is None:
            self._alibi = scores.alibi(self.alibi_slopes.to(device))  # a backend object stays on one device
        return self._alibi
