"""docs/results/serving-engines.md: each column of an engine, with yes or the reason."""

from pathlib import Path

from . import load
from .sglang import COLUMNS

PAGE = Path(__file__).parents[3] / "docs" / "results" / "serving-engines.md"
HEADS, LATENTS = "keys and values per head", "latent attention"
# Why fa4 declines what vLLM's `validate_configuration` refuses: by column, or column and value, and kind of backend.
WHY = {
    ("head_size", HEADS): "kernels have up to 512 columns; 576 is for latent attention",
    ("head_size", LATENTS): "512 columns of latents and 64 rotated ones; other widths have not been tried",
    ("dtype", None): "tensor cores multiply 16-bit numbers",
    ("kv_cache_dtype", HEADS): "fa4 converts e4m3 with a factor for the layer or each head; others are not connected",
    ("kv_cache_dtype=float16", LATENTS): "a 16-bit cache has the model's dtype",
    ("kv_cache_dtype", LATENTS): "fa4 converts e4m3 with a factor for the layer; others are not connected",
    ("block_size", None): "vLLM's kernels of the cache take multiples of 16",
    ("has_sink", LATENTS): "vLLM's prefill backends have no argument for sinks",
    ("use_sparse", None): "`fa4.sparse` is not connected",
    ("use_mm_prefix", None): "needs a mask of the image's tokens, which is not connected",
    ("use_per_head_quant_scales", LATENTS): "there is one head of keys",
    ("device_capability", None): "kernels need compute capability 8.0",
    ("attn_type", LATENTS): "latent attention is a decoder's",
    ("has_sliding_window", LATENTS): "vLLM's prefill backends have no argument for windows",
    ("use_non_causal", LATENTS): "blocks of draft tokens that see each other have not been tried",
    ("use_pcp", None): "prefill context parallelism is not connected",
    ("use_rswa", None): "needs a mask with the prompt's length, which is not connected",
}  # fmt: skip
# What vLLM reads from the classes beside `validate_configuration`.
ATTRIBUTES = {
    "backend.MetadataBuilder": ("_cudagraph_support", "supports_update_block_table", "reorder_batch_threshold"),
    "backend.Attention": (
        "can_return_lse_for_decode", "supports_dcp", "supports_pcp", "supports_quant_query_input",
        "supports_mtp_with_cp_non_trivial_interleave_size",
    ),
    "mla.MlaMetadataBuilder": ("_cudagraph_support", "query_len_support"),
    "mla.MlaAttention": ("can_return_lse_for_decode", "supports_dcp", "supports_pcp", "supports_quant_query_input"),
}  # fmt: skip
MEANING = {
    "_cudagraph_support": "CUDA graphs; lengths and pages are read on the device",
    "supports_update_block_table": "metadata is shared by groups of the cache",
    "reorder_batch_threshold": "query rows up to which vLLM puts requests first",
    "can_return_lse_for_decode": "lse, for ranks that have parts of a sequence",
    "supports_dcp": "decode context parallelism",
    "supports_pcp": "prefill context parallelism: not connected",
    "supports_quant_query_input": "queries of 8 bits: kernels convert keys to 16 bits, and take queries of 16",
    "supports_mtp_with_cp_non_trivial_interleave_size": "drafts with interleaved context parallelism: not tried",
    "query_len_support": "query rows of requests that are decoded together",
}


def reason(column: str, value: str, kind: str) -> str:
    for key in (f"{column}={value}", column):
        for of in (kind, None):
            if (key, of) in WHY:
                return WHY[key, of]
    raise KeyError(f"{column}={value} of {kind} is refused, and WHY has no reason")


def _columns(verdicts: dict[str, dict[str, str]], kind: str) -> list[str]:
    lines = [f"| column | fa4, {kind} | reason for no |", "|---|---|---|"]
    for column, values in verdicts.items():
        yes = [value for value, refused in values.items() if not refused]
        no = [value for value, refused in values.items() if refused]
        by_reason: dict[str, list[str]] = {}
        for value in no:
            by_reason.setdefault(reason(column, value, kind), []).append(value)
        why = "; ".join(f"{', '.join(of)}: {why}" if of != ["True"] else why for why, of in by_reason.items())
        told = "yes" if list(values) == yes == ["True"] else "no" if list(values) == no == ["True"] else ", ".join(yes)
        lines.append(f"| `{column}` | {told or 'no'} | {why} |")
    return lines


def text() -> str:
    vllm, sglang = load("vllm"), load("sglang")
    lines = [
        "# Serving engines: columns",
        "",
        "Written by `python -m tests.integrations.contracts page` from the files in `tests/integrations/contracts`.",
        "",
        f"## vLLM {vllm['version']}",
        "",
        "What vLLM's own `validate_configuration` answered about fa4's backends: one column changed at a time, beside",
        "a decoder in bfloat16 on compute capability 9.0.",
        "",
    ]
    for kind, verdicts in vllm["verdicts"].items():
        lines += [*_columns(verdicts, kind), ""]
    lines += ["Attributes that vLLM reads:", "", "| class | attribute | fa4 | meaning |", "|---|---|---|---|"]
    for name, attributes in ATTRIBUTES.items():
        for attribute in attributes:
            value = vllm["answers"][name][attribute]
            shown = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
            shown = str(shown).split(".")[-1]
            lines.append(f"| `{name.split('.')[1]}` | `{attribute}` | {shown} | {MEANING[attribute]} |")
    lines += [
        "",
        "Cascade attention: this vLLM passes `common_prefix_len` 0 always. With an older one that passes a prefix, it",
        "is attended to once and merged by `fa4.merge_states`.",
        "",
        f"## SGLang {sglang['version']}",
        "",
        "| feature | fa4 | test, or reason |",
        "|---|---|---|",
        *(
            f"| {name} | yes | `{why.split('::')[1]}` |" if yes else f"| {name} | no | {why} |"
            for name, yes, why in COLUMNS
        ),
    ]
    return "\n".join(lines) + "\n"
