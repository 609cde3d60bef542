"""Attention backend of vLLM: supported layers, metadata once per batch, and attention on a paged cache."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

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
from ...runtime import dispatch
from ...runtime.device import chip_by_number
from ...runtime.spec import AttentionSpec, CacheSpec
from . import NAME, parts

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_ALL_TYPES = (AttentionType.DECODER, *_ENCODERS, AttentionType.ENCODER_DECODER)
FP8_CACHES = ("fp8", "fp8_e4m3")  # e4m3 numbers with a factor for the layer or for each head, as bytes
PAGE, WIDEST = 16, 512


def is_batch_invariant() -> bool:
    """Whether vLLM is asked for results that do not depend on the rest of a batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def has_kernel(spec: AttentionSpec, capability: Any) -> bool:
    """Whether a kernel of fa4 serves these calls on GPUs of such a compute capability; tiled torch does not count."""
    try:
        chip = chip_by_number(10 * capability.major + capability.minor)
    except ValueError:
        return False
    return dispatch.select(spec, chip).name != "torch"


@dataclasses.dataclass
class Metadata:
    """Metadata of a batch. Sequence b's new queries are rows query_start_loc[b] to query_start_loc[b + 1]; they are the
    last of its seq_lens[b] keys. vLLM replaces slot_mapping for attention between encoder and decoder.

    prefix_len: tokens that all sequences begin with, if that is used. dcp_context_lens: of each sequence, the keys
    before its new ones that this rank has, with decode context parallelism; None if no sequence has such keys.
    """

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool
    prefix_len: int = 0
    dcp_context_lens: Tensor | None = None


class Backend(AttentionBackend):
    """Backend for decoders on a paged cache of 16 or 8 bits, for encoders, and for attention between them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_CACHES]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

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
        return [MultipleOf(PAGE)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of a cache in vLLM before 0.33."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= WIDEST

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return _has_kernel_for(128, torch.bfloat16, None, False, capability)

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
        """Return why a GPU has no kernel for the combination, or None."""
        if _has_kernel_for(head_size, dtype, kv_cache_dtype, has_sink, device_capability):
            return None
        cache = kv_cache_dtype or "auto"
        return f"no kernel of fa4 has head_size {head_size} with kv_cache_dtype {cache!r} on this GPU"

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in _ALL_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
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


def _has_kernel_for(
    head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, has_sink: bool, capability: Any
) -> bool:
    of_cache = torch.float8_e4m3fn if kv_cache_dtype in FP8_CACHES else None
    spec = AttentionSpec(
        dtype, head_size, head_size, 8, 1, 1.0, window_right=0, has_sink=has_sink, varlen=True, has_seqused_k=True,
        cache=CacheSpec(page_size=PAGE, dtype=of_cache),
    )  # fmt: skip
    return has_kernel(spec, capability)


class MetadataBuilder(AttentionMetadataBuilder):
    """Builder of `Metadata` from vLLM's common metadata. It reads nothing from the device and passes vLLM's own
    buffers on, so a CUDA graph serves all batches within the sizes it was captured with."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._context = parts.DcpContext.of(vllm_config, kv_cache_spec, device)
        # Metadata of a draft step is vLLM's own tensors, except for lengths that this builder computes on the host.
        self.supports_draft_decode_metadata_update = self._context is None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Return the metadata of a batch. common_prefix_len: tokens that all sequences begin with, in whole pages;
        vLLM 0.33 passes 0."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal differs between requests of a batch, and fa4 takes one for all")
        context = None if self._context is None else self._context.lengths(common)
        return Metadata(
            common.num_actual_tokens, common.query_start_loc, common.seq_lens, common.block_table_tensor,
            common.slot_mapping, common.max_query_len, common.max_seq_len, common.causal, common_prefix_len, context,
        )  # fmt: skip

    def use_cascade_attention(self, common_prefix_len: int, *args: Any, **options: Any) -> bool:
        """Whether to compute a common prefix once for all sequences. vLLM 0.33 has no such question."""
        return common_prefix_len >= parts.SHORTEST_PREFIX

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Do nothing: all of it is vLLM's own tensors."""


class Attention(AttentionImpl):
    """Attention of one layer.

    Raises:
        NotImplementedError: a cache of other numbers than those of `Backend`, a quantized output, or with decode
            context parallelism a window or ALiBi slopes.
    """

    can_return_lse_for_decode = True
    supports_dcp = True

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
        if attn_type not in _ALL_TYPES:
            raise NotImplementedError(f"attn_type is {attn_type!r}, expected one of {[str(x) for x in _ALL_TYPES]}")
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype is {kv_cache_dtype!r}, expected one of {Backend.supported_kv_cache_dtypes}"
            )
        if attn_type in _ENCODERS and kv_cache_dtype in FP8_CACHES:
            raise NotImplementedError(f"kv_cache_dtype is {kv_cache_dtype!r}, and an encoder has no cache")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, attn_type, sinks
        self.softcap = logits_soft_cap or 0.0
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._alibi: Any = None
        self.window = None if sliding_window is None else sliding_window - 1  # vLLM counts the query's own key
        self.batch_invariant = is_batch_invariant()
        self._combine = None
        if getattr(self, "dcp_world_size", 1) > 1:
            unsupported = dict(sliding_window=sliding_window, alibi_slopes=alibi_slopes)
            for name, value in unsupported.items():
                if value is not None:
                    raise NotImplementedError(
                        f"{name} is {value!r} with decode context parallelism, expected None: a rank's keys have gaps"
                    )
            self._combine = parts.combine()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; new keys and values were written to their pages before.

        Args:
            layer: has the factors of an fp8 cache.
            query, key, value: (tokens, heads, head_size), all requests concatenated; rows from num_actual_tokens on are
                padding. Only encoders and decode context parallelism use key and value.
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
        query, out = query[:rows], output[:rows]
        if self.attn_type in _ENCODERS:
            assert key is not None and value is not None
            out.copy_(self._attend_to_new(query, key[:rows], value[:rows], batch, causal=False).view_as(out))
        elif self._combine is not None:
            self._attend_with_ranks(layer, query, key, value, kv_cache, batch, out)
        elif batch.prefix_len and self.window is None and self.alibi_slopes is None and not self.batch_invariant:
            out.copy_(parts.cascade(self._on_cache(layer, query, kv_cache, batch), batch, kv_cache.shape[2]))
        else:
            call = self._on_cache(layer, query, kv_cache, batch)
            flash_attn_with_kvcache(**call, out=out.view_as(query))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values by vLLM's own kernel, which skips padding (slot -1)."""
        if self.attn_type in _ENCODERS:
            return
        from vllm._custom_ops import reshape_and_cache_flash

        k_cache, v_cache = self._split(kv_cache)
        reshape_and_cache_flash(
            key, value, k_cache, v_cache, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values, (pages, rows of a page, heads_kv, head_size)."""
        if kv_cache.ndim == 5:
            return kv_cache.unbind(0)
        return kv_cache.transpose(1, 2).split(self.head_size, -1)

    def _on_cache(self, layer: Any, query: Tensor, kv_cache: Tensor, batch: Metadata) -> dict[str, Any]:
        """Arguments of `flash_attn_with_kvcache` for all keys of the batch."""
        descales: dict[str, Tensor] = {}
        if self.kv_cache_dtype in FP8_CACHES:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            descales = dict(k_descale=layer._k_scale, v_descale=layer._v_scale)
        k_cache, v_cache = self._split(kv_cache)
        return dict(
            q=query, k_cache=k_cache, v_cache=v_cache, cache_seqlens=batch.seq_lens, page_table=batch.block_table,
            cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len, max_seqlen_k=batch.max_seq_len,
            softmax_scale=self.scale, causal=batch.causal, window_size=self._window_size(batch.causal),
            softcap=self.softcap, score_mod=self._score_mod(query.device), learnable_sink=self.sinks,
            batch_invariant=self.batch_invariant, **descales,
        )  # fmt: skip

    def _attend_to_new(self, query: Tensor, key: Tensor, value: Tensor, batch: Metadata, **options: Any) -> Any:
        """Attend to the batch's new keys alone."""
        lengths, longest = batch.query_start_loc, batch.max_query_len
        return flash_attn_varlen_func(
            query, key, value, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=longest, max_seqlen_k=longest,
            softmax_scale=self.scale, window_size=self._window_size(options["causal"]), softcap=self.softcap,
            score_mod=self._score_mod(query.device), learnable_sink=self.sinks, **options,
        )  # fmt: skip

    def _attend_with_ranks(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, batch: Metadata,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Attend to the new keys, which each rank has, and to all ranks' keys before them."""
        if key is None or value is None:
            raise NotImplementedError(
                "key and value are None with decode context parallelism, which needs the new rows"
            )
        new = key[: len(query)], value[: len(query)]
        own = self._attend_to_new(query, *new, batch, causal=batch.causal, return_lse=True)
        if batch.dcp_context_lens is None:
            out.copy_(own[0].view_as(out))
        else:
            call = self._on_cache(layer, query, kv_cache, batch)
            out.copy_(parts.with_context(call, own, batch.dcp_context_lens, self._combine).view_as(out))

    def _window_size(self, causal: bool) -> tuple[int | None, int | None]:
        """Encoders, and decoders that are not causal, see as far to the right as to the left."""
        return self.window, None if causal else self.window

    def _score_mod(self, device: torch.device) -> Any:
        if self.alibi_slopes is None:
            return None
        if self._alibi is None:
            self._alibi = scores.alibi(self.alibi_slopes.to(device))  # a backend object stays on one device
        return self._alibi
