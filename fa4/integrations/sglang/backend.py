"""Attention backend of SGLang: metadata once per batch, and attention on its pool of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from ...kvcache import flash_attn_with_kvcache

_CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)


@dataclass
class Metadata:
    """Metadata of a batch. Sequence b's new queries are rows query_start_loc[b] to query_start_loc[b + 1]; they are the
    last of its seq_lens[b] keys."""

    query_start_loc: Tensor
    seq_lens: Tensor
    page_table: Tensor
    max_query_len: int
    max_seq_len: int


class Backend(AttentionBackend):
    """Backend for decoders and encoders with keys and values per head.

    Raises:
        NotImplementedError: the model or the server needs what fa4 is not connected for; the message names it.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _refuse(model_runner)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_cache_dtype, self.page_size = model_runner.kv_cache_dtype, model_runner.page_size
        self.max_context_len, self.device = model_runner.model_config.context_len, model_runner.device
        self.forward_metadata: Metadata | None = None
        self._buffers: Metadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of a batch that no CUDA graph replays."""
        counts, lengths, longest = _lengths(forward_batch)
        longest_key = self.max_context_len
        if forward_batch.seq_lens_cpu is not None and forward_batch.seq_lens_cpu.numel():
            longest_key = int(forward_batch.seq_lens_cpu.max()) + _drafts(forward_batch)
        starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
        starts[1:].copy_(counts.cumsum(0))
        table = self._pages(forward_batch, longest_key)
        self.forward_metadata = Metadata(starts, lengths.int(), table, longest, longest_key)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what the graphs of all batch sizes read."""
        pages = -(-self.max_context_len // self.page_size)
        as_int = dict(dtype=torch.int32, device=self.device)
        self._buffers = Metadata(
            torch.zeros(max_bs + 1, **as_int), torch.zeros(max_bs, **as_int), torch.zeros(max_bs, pages, **as_int), 1,
            self.max_context_len,
        )  # fmt: skip

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Write a batch's lengths and pages to where the graph of its size reads them."""
        buffers = self._buffers
        if buffers is None:
            raise RuntimeError("a CUDA graph is prepared before init_cuda_graph_state was called")
        counts, lengths, longest = _lengths(forward_batch)
        batch = len(counts)
        buffers.query_start_loc[1 : batch + 1].copy_(counts.cumsum(0))
        buffers.seq_lens[:batch].copy_(lengths)
        buffers.page_table[:batch].copy_(self._pages(forward_batch, self.max_context_len))
        self.forward_metadata = Metadata(
            buffers.query_start_loc[: batch + 1], buffers.seq_lens[:batch], buffers.page_table[:batch], longest,
            self.max_context_len,
        )  # fmt: skip

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Write the new keys and values and attend: prompts, or their parts, and drafts that are verified.

        Args:
            q, k, v: (tokens, heads * head_dim), all requests concatenated, or with an axis for the heads.
            kwargs: `sinks`, (heads,), and `return_lse`; others have to be None or False.

        Returns:
            out (tokens, heads * v_head_dim); with return_lse out (tokens, heads, v_head_dim) and lse (tokens, heads).
        """
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """As `forward_extend`, with one query for each sequence."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save_kv_cache: bool, *,
        sinks: Tensor | None = None, return_lse: bool = False, **unknown: Any,
    ) -> Any:  # fmt: skip
        _refuse_layer(layer, batch, unknown)
        pool, metadata = self.token_to_kv_pool, self.forward_metadata
        assert metadata is not None
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc.for_layer(batch, layer), k, v, layer.k_scale, layer.v_scale)
        caches = (
            x.view(x.shape[0], heads, columns).unflatten(0, (-1, self.page_size))
            for x, heads, columns in zip(
                pool.get_kv_buffer(layer.layer_id), (layer.tp_k_head_num, layer.tp_v_head_num),
                (layer.qk_head_dim, layer.v_head_dim),
            )
        )  # fmt: skip
        is_fp8 = self.kv_cache_dtype is torch.float8_e4m3fn
        causal = layer.attn_type not in (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)
        window = layer.sliding_window_size
        window = None if window is None or window < 0 else window  # (SGLang does not count the query's own key)
        result = getattr(batch, "_attn_output", None)
        shape = -1, layer.tp_q_head_num, layer.v_head_dim
        out, lse = flash_attn_with_kvcache(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            *caches,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.page_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            k_descale=layer.k_scale if is_fp8 else None,
            v_descale=layer.v_scale if is_fp8 else None,
            softmax_scale=layer.scaling,
            causal=causal,
            window_size=(window, None if causal else window),
            softcap=layer.logit_cap or 0.0,
            learnable_sink=sinks,
            out=None if result is None else result.view(shape),
            return_lse=True,
        )
        return (out, lse.transpose(0, 1).contiguous()) if return_lse else out.flatten(1)

    def _pages(self, batch: Any, longest: int) -> Tensor:
        """Page numbers of each sequence, from the slots of its tokens."""
        slots = self.req_to_token_pool.req_to_token[:, : longest : self.page_size][batch.req_pool_indices]
        return slots.int() if self.page_size == 1 else (slots // self.page_size).int()


def _drafts(batch: Any) -> int:
    """Drafted tokens that are verified after the `seq_lens` of a sequence."""
    return int(batch.spec_info.draft_token_num) if batch.forward_mode.is_target_verify() else 0


def _lengths(batch: Any) -> tuple[Tensor, Tensor, int]:
    """New tokens of each sequence, its keys with these, and a bound of the former.

    Raises:
        NotImplementedError: a batch of a kind that fa4 is not connected for.
    """
    mode, lengths = batch.forward_mode, batch.seq_lens
    if batch.encoder_lens is not None:
        raise NotImplementedError("encoder_lens is given: attention between encoder and decoder is not connected")
    if mode.is_dllm_extend():
        raise NotImplementedError(f"forward_mode is {mode.name}, expected no diffusion language model")
    if mode.is_target_verify():
        drafts = _drafts(batch)
        if getattr(batch.spec_info, "topk", 1) > 1:
            raise NotImplementedError(f"topk is {batch.spec_info.topk}, expected 1: drafts are a chain, not a tree")
        if getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
            raise NotImplementedError("ragged_verify_layout is given, expected as many drafts for each request")
        return torch.full_like(lengths, drafts), lengths + drafts, drafts
    if not mode.is_extend(include_draft_extend_v2=True):
        if batch.spec_info is not None:
            raise NotImplementedError("spec_info is given with one query a sequence: draft steps are not connected")
        return torch.ones_like(lengths), lengths, 1
    counts, on_host = batch.extend_seq_lens, batch.extend_seq_lens_cpu
    return counts, lengths, max(on_host) if on_host is not None else len(batch.input_ids)


def _refuse(runner: Any) -> None:
    unsupported = {
        "use_mla_backend": (runner.use_mla_backend, "latent attention is not connected"),
        "is_encoder_decoder": (runner.model_config.is_encoder_decoder, "a decoder only, or an encoder only"),
        "attention_chunk_size": (runner.attention_chunk_size, "chunked local attention is not connected"),
        "kv_index_translator": (
            getattr(runner.kv_index_translator, "is_translating", False),
            "a pool that all layers index alike",
        ),
        "swa_kv_pool": (
            getattr(runner.token_to_kv_pool, "swa_kv_pool", None) is not None,
            "one pool for all layers: --disable-hybrid-swa-memory",
        ),
    }
    for name, (value, reason) in unsupported.items():
        if value:
            raise NotImplementedError(f"{name} is {value!r}, expected none: {reason}")
    if runner.kv_cache_dtype not in _CACHE_DTYPES:
        expected = ", ".join(map(str, _CACHE_DTYPES))
        raise NotImplementedError(f"kv_cache_dtype is {runner.kv_cache_dtype}, expected one of {expected}")


def _refuse_layer(layer: Any, batch: Any, unknown: dict[str, Any]) -> None:
    for name, value in unknown.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is given, and fa4's backend of SGLang has no such argument")
    if layer.is_cross_attention:
        raise NotImplementedError("is_cross_attention is True: attention between encoder and decoder is not connected")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(f"logit_capping_method is {layer.logit_capping_method!r}, expected 'tanh'")
    if layer.xai_temperature_len > 0:
        raise NotImplementedError(f"xai_temperature_len is {layer.xai_temperature_len}, expected -1")
    if getattr(batch, "dcp_kv_mask", None) is not None:
        raise NotImplementedError("dcp_kv_mask is given: decode context parallelism is not connected")
