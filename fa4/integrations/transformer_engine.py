"""TransformerEngine's DotProductAttention on fa4: a module with the same constructor and forward.

    from fa4.integrations.transformer_engine import DotProductAttention

    core_attention = DotProductAttention(16, 128, num_gqa_groups=4, attn_mask_type="causal", qkv_format="bshd")

The module does not import TransformerEngine. It accepts arguments about TransformerEngine's kernels (FP8, random-number
trackers, streams), and raises where they would change the result.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..api.dense import flash_attn_func
from ..distributed import context_parallel_attention
from ..masks import causal as top_left
from ..scores import bias
from .core_attention import METHODS, attend_packed, with_padding
from .documents import PackedLengths, mask_mod_of

FORMATS = ("sbhd", "bshd", "thd")
MASKS = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip


class _Mask(NamedTuple):
    """Mask of a forward: type, window, alignment."""

    kind: str
    window: tuple[int | None, int | None]
    bottom_right: bool

    @property
    def causal(self) -> bool:
        return "causal" in self.kind


class DotProductAttention(nn.Module):
    """Attention between the projections of a layer, with TransformerEngine's arguments (2.20, main of 2026-08).

    Args:
        num_attention_heads: heads of all tensor-parallel ranks; determines the size of a learnable sink.
        kv_channels, num_gqa_groups, layer_number, attention_type, name: ignored.
        attention_dropout: must be 0.
        qkv_format: "sbhd", "bshd" or "thd".
        attn_mask_type: one of MASKS; "causal" is aligned at the first key, as in TransformerEngine.
        window_size: (left, right), -1 is unlimited.
        bottom_right_diagonal: whether a window is aligned bottom-right; None: the mask type decides.
        tp_size, tp_group: for a learnable sink.
        cp_group, cp_comm_type: a group for context parallelism, "p2p" (fa4's ring) or "all_gather".
        softmax_scale: None means 1 / sqrt(head_dim).
        softmax_type: "vanilla", "off-by-one" or "learnable"; the parameter is `softmax_offset`.

    `NVTE_ALLOW_NONDETERMINISTIC_ALGO=0` selects the deterministic backward; so does torch's own flag.

    Raises:
        NotImplementedError: dropout, the largest logit, or another cp_comm_type.
        ValueError: an unknown format, mask type or softmax type.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if attention_dropout:
            raise NotImplementedError(f"attention_dropout is {attention_dropout}, expected 0.0: this module has none")
        if return_max_logit:
            raise NotImplementedError("return_max_logit is set, and fa4 tells no largest logit")
        self.qkv_format, self.attn_mask_type = _check_choice(qkv_format, FORMATS, "qkv_format"), _kind(attn_mask_type)
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.softmax_scale = softmax_scale
        self.deterministic = True if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0" else None
        self.softmax_offset: Tensor | None = None
        if _check_choice(softmax_type, ("vanilla", "off-by-one", "learnable"), "softmax_type") != "vanilla":
            ranks = tp_size if tp_group is None else tp_group.size()
            offset = torch.zeros(num_attention_heads // ranks, device="cuda" if torch.cuda.is_available() else "cpu")
            if softmax_type == "learnable":
                self.softmax_offset = nn.Parameter(offset)
            else:
                del self.softmax_offset
                self.register_buffer("softmax_offset", offset, persistent=False)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int] | None = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Split sequences over the ranks as `fa4.distributed.shard` does; not for None or a group of one process."""
        single = cp_group is None or (not isinstance(cp_group, list) and cp_group.size() == 1)
        if not single and (isinstance(cp_group, list) or cp_comm_type not in METHODS):
            raise NotImplementedError(f"cp_comm_type is {cp_comm_type!r}, expected 'p2p' or 'all_gather'")
        self.cp_group = None if single else cp_group
        self.method = "ring" if single else METHODS[cp_comm_type]

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor:
        """Compute attention of this rank's heads.

        Args:
            query_layer: (seqlen_q, batch, heads_q, head_dim); for "bshd" batch comes first; for "thd"
                (rows, heads_q, head_dim).
            key_layer, value_layer: the same with seqlen_k and heads_kv; value may have another head_dim.
            attention_mask: bool, True for masked. For padding types (batch, 1, 1, seqlen) with padding last, or two of
                them, for queries and keys. For "arbitrary" (batch or 1, heads or 1, seqlen_q or 1, seqlen_k).
            cu_seqlens_q, cu_seqlens_kv: (batch + 1,) int32; for "thd", and for padding instead of attention_mask.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: the starts of sequences, if there is padding between them.
            core_attention_bias: with the type "post_scale_bias", (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k).

        Other arguments override the constructor's. Padding queries get 0.

        Returns:
            like query_layer, with one last axis of heads_q * head_dim_v.

        Raises:
            NotImplementedError: an argument that fa4 does not support; the message names it.
            ValueError: an unknown format or mask, or "thd" without cumulative lengths.
        """
        layout = self.qkv_format if qkv_format is None else _check_choice(qkv_format, FORMATS, "qkv_format")
        _refuse(
            core_attention_bias_type=core_attention_bias_type not in ("no_bias", "post_scale_bias"),
            alibi_slopes=alibi_slopes is not None, inference_params=inference_params is not None,
            fp8_output=bool(fp8_output), score_mod=score_mod is not None, qkv_layer=qkv_layer is not None,
            kv_layer=kv_layer is not None, checkpoint_core_attention=checkpoint_core_attention,
        )  # fmt: skip
        mask = self._mask(attn_mask_type, window_size, bottom_right_diagonal)
        options: dict[str, Any] = dict(
            softmax_scale=self.softmax_scale,
            learnable_sink=self.softmax_offset,
            deterministic=self.deterministic,
            causal=mask.causal,
            window_size=mask.window,
        )
        q, k, v = query_layer, key_layer, value_layer
        if layout == "thd":
            if cu_seqlens_q is None or cu_seqlens_kv is None:
                raise ValueError('cu_seqlens_q or cu_seqlens_kv is None, expected both with qkv_format="thd"')
            q_bounds, q_used = with_padding(cu_seqlens_q, cu_seqlens_q_padded)
            k_bounds, k_used = with_padding(cu_seqlens_kv, cu_seqlens_kv_padded)
            lengths = PackedLengths(q_bounds, k_bounds, q_used, k_used, max_seqlen_q, max_seqlen_kv)
            if not mask.bottom_right and cu_seqlens_q is not cu_seqlens_kv:
                raise NotImplementedError(
                    f'attn_mask_type is {mask.kind!r} with qkv_format="thd" and other lengths of keys than of queries, '
                    'expected a mask type that ends in "bottom_right"'
                )
            return attend_packed(q, k, v, lengths, self.cp_group, self.method, options).flatten(1)
        if layout == "sbhd":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if core_attention_bias_type == "post_scale_bias":
            assert core_attention_bias is not None
            options["score_mod"] = bias(core_attention_bias)
        out = self._padded(q, k, v, mask, attention_mask, (cu_seqlens_q, cu_seqlens_kv), options)
        return (out.transpose(0, 1) if layout == "sbhd" else out).flatten(2)

    def _mask(self, kind: str | None, window: Any, bottom_right: bool | None) -> _Mask:
        kind = self.attn_mask_type if kind is None else _kind(kind)
        left, right = self.window_size if window is None and self.window_size is not None else window or (-1, -1)
        bottom_right = self.bottom_right_diagonal if bottom_right is None else bottom_right
        if kind in ("causal", "padding_causal"):
            bottom_right = False
        return _Mask(
            kind,
            (None if left < 0 else left, None if right < 0 or "causal" in kind else right),
            bottom_right is not False or kind.endswith("bottom_right"),
        )

    def _padded(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: _Mask,
        attention_mask: Any,
        cumulative: tuple[Tensor | None, Tensor | None],
        options: dict[str, Any],
    ) -> Any:
        """Compute out for q, k, v of (batch, seqlen, heads, head_dim)."""
        windowed = mask.window != (None, None)
        if self.cp_group is not None:
            if mask.kind not in ("no_mask", "causal", "causal_bottom_right") or "score_mod" in options:
                raise NotImplementedError(
                    f'attn_mask_type is {mask.kind!r} under context parallelism, expected "thd" for padding'
                )
            return context_parallel_attention(q, k, v, group=self.cp_group, method=self.method, **options)
        if mask.kind == "arbitrary":
            return flash_attn_func(q, k, v, mask_mod=mask_mod_of(attention_mask, True), **options)
        if not mask.bottom_right and q.shape[1] != k.shape[1] and (mask.causal or windowed):
            if windowed or "padding" in mask.kind:
                raise NotImplementedError(
                    f"attn_mask_type is {mask.kind!r}, aligned at the first key, with other numbers of keys than "
                    'queries and a window or padding; expected a mask type that ends in "bottom_right"'
                )
            return flash_attn_func(q, k, v, mask_mod=top_left, **options | {"causal": False})
        if "padding" not in mask.kind:
            return flash_attn_func(q, k, v, **options)
        _refuse(core_attention_bias="score_mod" in options)
        masks = attention_mask if isinstance(attention_mask, tuple) else (attention_mask, attention_mask)
        bounds, used = [], []
        for x, mask_part, starts in zip((q, k), masks, cumulative):
            batch, seqlen = x.shape[:2]
            if starts is None and mask_part is None:
                raise ValueError(f"attention_mask is None with attn_mask_type={mask.kind!r}, expected it or cu_seqlens")
            used.append((~mask_part).flatten(1).sum(1, dtype=torch.int32) if starts is None else starts.diff())
            bounds.append(torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen)
        q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
        (q_bounds, k_bounds), (q_used, k_used) = bounds, used
        lengths = PackedLengths(q_bounds, k_bounds, q_used, k_used, q.shape[1], k.shape[1])
        out = attend_packed(q_rows, k_rows, v_rows, lengths, None, self.method, options)
        return out.unflatten(0, q.shape[:2])


def _check_choice(value: str, expected: tuple[str, ...], name: str) -> str:
    if value not in expected:
        raise ValueError(f"{name} is {value!r}, expected one of {expected}")
    return value


def _kind(value: str) -> str:
    value = value.replace(",", "_")
    return _check_choice("padding_causal" if value == "causal_padding" else value, MASKS, "attn_mask_type")


def _refuse(**refused: bool) -> None:
    for name, is_refused in refused.items():
        if is_refused:
            raise NotImplementedError(f"{name} is given, and fa4's core attention has none")
