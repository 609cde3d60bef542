"""Small models of transformers with random weights, of kinds whose attention differs."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4

transformers = pytest.importorskip("transformers", reason="hooks into it")

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    attention_dropout=0.0,
)  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A configuration, by the name of its class, and what of attention it is here for."""

    config: str
    reason: str
    extra: dict[str, Any]


MODELS = {
    "llama": Model("LlamaConfig", "grouped queries", {}),
    "mistral": Model("MistralConfig", "a sliding window in every layer", {"sliding_window": 7}),
    "gemma2": Model("Gemma2Config", "softcap, a scale of its own", {
        "sliding_window": 7, "layer_types": LAYERS, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0}),
    "gemma3": Model("Gemma3TextConfig", "windows in some layers", {"sliding_window": 7, "layer_types": LAYERS}),
    "gpt_oss": Model("GptOssConfig", "sinks", {
        "sliding_window": 7, "layer_types": LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1,
        "experts_implementation": "eager"}),
    "gemma4": Model("Gemma4TextConfig", "other head dims in full layers", {
        "sliding_window": 7, "layer_types": LAYERS, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0}),
    "qwen3": Model("Qwen3Config", "normalised queries and keys", {}),
    "qwen3_5": Model("Qwen3_5TextConfig", "gated attention beside linear layers", {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
    "deepseek_v3": Model("DeepseekV3Config", "latent attention before absorption: fewer columns of v", {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16}),
}  # fmt: skip
BATCH, LENGTH = 3, 20


def exact_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_):
    """Eager attention's formula, whose softmax is not rounded to float32 as in the models' own functions."""
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ k.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
    return (scores.softmax(3)[..., : k.shape[2]] @ v).transpose(1, 2), None


def register() -> None:
    fa4.register_transformers()
    transformers.AttentionInterface.register("exact", exact_attention)
    transformers.AttentionMaskInterface.register("exact", transformers.masking_utils.eager_mask)


def model_of(
    name: str, seed: int, implementation: str = "eager", dtype: torch.dtype = torch.float32, layers: int = 2
) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, MODELS[name].config)(**SIZES | MODELS[name].extra | {"num_hidden_layers": layers})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():  # sinks and norms, too, are to matter
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def tokens_of(seed: int, batch: int = BATCH) -> Tensor:
    return torch.randint(3, 64, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))
