"""Prefill backend of vLLM's latent attention (MLA): prompts with keys and values per head, head dims (192, 128)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ...api.dense import flash_attn_varlen_func
from . import NAME
from .backend import Backend
from .mla import MlaBackend

WIDEST = 256  # columns of a head, of keys or values


class MlaPrefill(MLAPrefillBackend):
    """Attention of prompts to their own keys, and to parts of what the cache has of them. vLLM merges the parts."""

    supported_dtypes = Backend.supported_dtypes

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and MlaBackend.supports_compute_capability(device_capability)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        widths = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim, mla_dimensions.v_head_dim
        return all(width % 8 == 0 and width <= WIDEST for width in widths)

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend causally to the keys of the prompts themselves.

        Args:
            q, k: (tokens, heads, qk_head_dim), all prompts concatenated. v: the same with v_head_dim columns.
            out: written and returned, if given.

        Returns:
            out (tokens, heads, v_head_dim) and, with return_softmax_lse, lse (heads, tokens).

        Raises:
            NotImplementedError: a quantized output is asked for.
        """
        if output_scale is not None:
            raise NotImplementedError("a quantized output is asked for, and fa4 writes 16-bit ones")
        lengths, longest = self._prefill_metadata.query_start_loc, self._prefill_metadata.max_query_len
        result, lse = self._attend(q, k, v, out, (lengths, lengths), (longest, longest), causal=True)
        return (result, lse) if return_softmax_lse else result

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend to all keys of a part of the cached context.

        Args:
            chunk: its lengths; sequence b's keys are rows cu_seq_lens[b] to cu_seq_lens[b + 1].
            q, k, v, out: as in `run_prefill_new_tokens`, of the chunk's sequences.

        Returns:
            out and lse.
        """
        lengths, longest = (chunk.query_start_loc, chunk.cu_seq_lens), (chunk.max_query_len, chunk.max_seq_len)
        return self._attend(q, k, v, out, lengths, longest, causal=False)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lengths: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        result, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1], max_seqlen_q=longest[0],
            max_seqlen_k=longest[1], softmax_scale=self.scale, causal=causal, return_lse=True,
        )  # fmt: skip
        return result if out is None else out.copy_(result), lse
