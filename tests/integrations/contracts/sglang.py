"""SGLang's contract: what its classes have, and which of its features fa4's backend serves."""

import importlib.metadata

from . import classes

CLASSES = [
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
    "sglang.srt.model_executor.forward_batch_info:ForwardMode",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
    "sglang.srt.layers.radix_attention:AttentionType",
    "sglang.srt.layers.radix_attention:RadixAttention",
    "sglang.srt.mem_cache.memory_pool:KVWriteLoc",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
]
T = "tests/integrations/test_sglang.py::"
# Feature, whether fa4 serves it, and the test that shows it or the reason that it does not.
COLUMNS = [
    ("prompts, and prompts in parts", True, f"{T}test_prompts_in_parts_then_tokens"),
    ("batches that mix prompts and tokens", True, f"{T}test_prompts_in_parts_then_tokens"),
    ("pages of 1 to 256 rows (`--page-size`)", True, f"{T}test_prompts_in_parts_then_tokens"),
    ("CUDA graphs of decoding and of verification", True, f"{T}test_graphs_read_the_same_buffers"),
    ("fp8 cache (`--kv-cache-dtype fp8_e4m3`)", True, f"{T}test_a_cache_of_8_bits"),
    ("fp8_e5m2, mxfp8 and fp4 caches", False, "fa4 converts e4m3, int8 and its own layout of NVFP4"),
    ("sliding windows", True, f"{T}test_options_of_layers"),
    ("a pool of its own for windows", False, "not connected; `--disable-hybrid-swa-memory` gives one pool"),
    ("attention sinks", True, f"{T}test_options_of_layers"),
    ("softcap", True, f"{T}test_options_of_layers"),
    ("encoders, decoders that are not causal", True, f"{T}test_layers_that_are_not_causal"),
    ("attention between encoder and decoder", False, "not connected"),
    ("verification of a chain of drafts (topk 1)", True, f"{T}test_drafts_are_verified"),
    ("verification of a tree of drafts (topk > 1)", False, "needs the tree's mask, which is not connected"),
    ("draft steps of a speculative model", False, "SGLang chooses their backend from a list of its own"),
    ("return_lse", True, f"{T}test_lse_is_returned"),
    ("output of the engine", True, f"{T}test_the_output_of_the_engine_is_written"),
    ("latent attention (MLA)", False, "not connected; `fa4.mla_attention_with_kvcache` is what it would call"),
    ("chunked local attention", False, "not connected"),
    ("context parallelism", False, "not connected; `fa4.merge_states` would merge the ranks"),
    ("score_mod, rel_bias, x.ai temperature", False, "SGLang writes these for flash-attn-4"),
    ("diffusion language models", False, "not connected"),
]


def recorded() -> dict:
    """The contract of the installed SGLang."""
    return {"version": importlib.metadata.version("sglang"), "classes": classes(CLASSES)}
