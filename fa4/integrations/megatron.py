"""Megatron Core's core_attention on fa4: replaces its DotProductAttention or TransformerEngine's.

    from fa4.integrations.megatron import CoreAttention

    spec = get_gpt_layer_local_spec()  # or any other spec with a self_attention
    spec.submodules.self_attention.submodules.core_attention = CoreAttention

The module imports nothing from Megatron, except for checkpoints; it uses the objects passed to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..api.dense import flash_attn_func
from ..distributed import context_parallel_attention
from .core_attention import METHODS, attend_packed, with_padding
from .documents import PackedLengths, mask_mod_of

_CAUSAL = dict.fromkeys(("no_mask", "padding", "arbitrary"), False)
_CAUSAL |= dict.fromkeys(("causal", "padding_causal", "causal_bottom_right"), True)


class CoreAttention(nn.Module):
    """Attention between the projections of a Megatron layer.

    Args:
        config: the TransformerConfig. Used are attention_dropout (must be 0), softmax_type, window_size and
            window_attn_skip_freq, deterministic_mode, context_parallel_size, and the fields for a learnable sink.
        layer_number: counts from 1; decides whether the layer has a window.
        attn_mask_type: an AttnMaskType.
        attention_type: "self" or "cross".
        attention_dropout: overrides the config's.
        softmax_scale: None means 1 / sqrt(head_dim).
        k_channels, v_channels: head dims; ignored, because the tensors have them.
        cp_comm_type: under context parallelism "p2p" (fa4's ring, also for None) or "all_gather".
        pg_collection: the groups tp, for a learnable sink, and cp, for context parallelism.

    Raises:
        NotImplementedError: dropout, the largest logit (qk_clip), or another cp_comm_type.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise NotImplementedError(
                f"attention dropout is {dropout}, and this module has none: set attention_dropout=0.0"
            )
        for name in ("qk_clip", "log_max_attention_logit"):
            if getattr(config, name, False):
                raise NotImplementedError(f"config.{name} is set, and fa4 tells no largest logit")
        self.config, self.attn_mask_type, self.softmax_scale = config, attn_mask_type, softmax_scale
        self.window_size = _window(config, layer_number)
        self.deterministic = True if getattr(config, "deterministic_mode", False) else None
        self.group: Any = None
        self.method = "ring"
        if config.context_parallel_size > 1:
            if cp_comm_type not in METHODS:
                raise NotImplementedError(f"cp_comm_type is {cp_comm_type!r}, expected one of {list(METHODS)}")
            if pg_collection is None or pg_collection.cp is None:
                raise ValueError("pg_collection has no cp, expected the group of context parallelism")
            self.group, self.method = pg_collection.cp, METHODS[cp_comm_type]
        self.softmax_offset = self._sink(config, pg_collection)

    def _sink(self, config: Any, pg_collection: Any) -> Tensor | nn.Parameter | None:
        """Return the learnable sink: one extra logit without a value for each of this rank's heads."""
        kind = getattr(config, "softmax_type", "vanilla")
        if kind == "vanilla":
            return None
        if kind not in ("off-by-one", "learnable"):
            raise NotImplementedError(f"softmax_type is {kind!r}, expected 'vanilla', 'off-by-one' or 'learnable'")
        ranks = 1 if pg_collection is None else pg_collection.tp.size()
        device = "cuda" if torch.cuda.is_available() and not config.use_cpu_initialization else "cpu"
        sink = torch.zeros(config.num_attention_heads // ranks, dtype=config.params_dtype, device=device)
        if kind == "off-by-one":
            self.register_buffer("softmax_offset", sink, persistent=False)
            return sink
        if config.perform_initialization:
            config.init_method(sink)
        return nn.Parameter(sink)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute attention of this rank's heads.

        Args:
            query: (seqlen_q, batch, heads_q, head_dim), or packed ("thd") (rows, heads_q, head_dim).
            key, value: the same with seqlen_k and heads_kv; value may have another head_dim.
            attention_mask: bool, True where a pair is masked, (batch or 1, 1, seqlen_q or 1, seqlen_k). Read for the
                mask types padding, padding_causal and arbitrary only.
            attn_mask_type: overrides the constructor's.
            packed_seq_params: PackedSeqParams, for packed rows; padding between sequences is allowed.

        Returns:
            (seqlen_q, batch, heads_q * head_dim_v), or packed (rows, heads_q * head_dim_v).

        Raises:
            NotImplementedError: a bias; an attention_mask under context parallelism, where only causal and no mask are
                supported; a causal mask if seqlen_q and seqlen_k differ, which Megatron aligns at the first key.
        """
        if attention_bias is not None:
            raise NotImplementedError("attention_bias is given, and fa4's core attention takes none")
        out: Any
        kind = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        options: dict[str, Any] = dict(
            softmax_scale=self.softmax_scale,
            causal=_CAUSAL[kind],
            window_size=self.window_size,
            learnable_sink=self.softmax_offset,
            deterministic=self.deterministic,
        )
        if packed_seq_params is not None:
            packed = packed_seq_params
            q_bounds, q_used = with_padding(packed.cu_seqlens_q, packed.cu_seqlens_q_padded)
            k_bounds, k_used = with_padding(packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded)
            lengths = PackedLengths(q_bounds, k_bounds, q_used, k_used, packed.max_seqlen_q, packed.max_seqlen_kv)
            return attend_packed(query, key, value, lengths, self.group, self.method, options).flatten(1)
        if kind == "causal" and query.shape[0] != key.shape[0]:
            raise NotImplementedError(
                "a causal mask with other numbers of keys than queries, expected no_mask to decode"
            )
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        masked = attention_mask if kind in ("padding", "padding_causal", "arbitrary") else None
        if self.group is None:
            out = flash_attn_func(q, k, v, mask_mod=None if masked is None else mask_mod_of(masked, True), **options)
        elif masked is None:
            out = context_parallel_attention(q, k, v, group=self.group, method=self.method, **options)
        else:
            raise NotImplementedError("attention_mask is given under context parallelism, expected packed sequences")
        return out.transpose(0, 1).flatten(2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sharded state for Megatron's distributed checkpoints: a learnable sink, sharded by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        if not state:
            return {}
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(state, 0), sharded_offsets)


def _window(config: Any, layer_number: int) -> tuple[int | None, int | None]:
    """(left, right) of a layer. skip, an int n: every n-th layer has no window. A list: which layers have one."""
    window, skip = config.window_size, config.window_attn_skip_freq
    if window is None or (isinstance(skip, int) and layer_number % skip == 0):
        return None, None
    if isinstance(skip, (list, tuple)) and not skip[layer_number - 1]:
        return None, None
    return tuple(window)
