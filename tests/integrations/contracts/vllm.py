"""vLLM's contract: what its classes have, and what its own `validate_configuration` says about fa4's backends."""

import importlib.metadata
import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any, get_args

import torch

from . import classes

CLASSES = [
    "vllm.v1.attention.backend:AttentionType",
    "vllm.v1.attention.backend:AttentionCGSupport",
    "vllm.v1.attention.backend:AttentionBackend",
    "vllm.v1.attention.backend:CommonAttentionMetadata",
    "vllm.v1.attention.backend:AttentionMetadataBuilder",
    "vllm.v1.attention.backend:AttentionImplBase",
    "vllm.v1.attention.backend:AttentionImpl",
    "vllm.v1.attention.backend:MLAAttentionImpl",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonBackend",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonImpl",
    "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend",
]
# Base classes of fa4's: of each, those whose parameters it has to have.
OURS = {
    "backend.Backend": ["AttentionBackend"],
    "backend.MetadataBuilder": ["AttentionMetadataBuilder"],
    "backend.Attention": ["AttentionImplBase", "AttentionImpl"],
    "mla.MlaBackend": ["AttentionBackend", "MLACommonBackend"],
    "mla.MlaMetadataBuilder": ["AttentionMetadataBuilder", "MLACommonMetadataBuilder"],
    "mla.MlaAttention": ["AttentionImplBase", "MLAAttentionImpl"],
    "prefill.MlaPrefill": ["MLAPrefillBackend"],
}
GPUS = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
# What a model and a user can ask for, one at a time, beside an ordinary decoder in bf16 on an H100.
ORDINARY = dict(
    head_size=128, dtype="bfloat16", kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=False,
    use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, device_capability="9.0",
    attn_type="decoder", has_sliding_window=False, use_non_causal=False, use_batch_invariant=False,
    use_kv_connector=False, use_pcp=False, use_adaptive_verification=False, use_dcp=False, use_rswa=False,
)  # fmt: skip
OF_LATENTS = ORDINARY | dict(head_size=576, use_mla=True)
VALUES: dict[str, tuple] = {
    "head_size": (64, 72, 80, 96, 128, 192, 256, 512, 576),
    "dtype": ("float16", "bfloat16", "float32"),
    "block_size": (1, 8, 16, 32, 64, 128, 256),
    "device_capability": ("7.5", *GPUS),
    "attn_type": ("decoder", "encoder", "encoder_only", "encoder_decoder"),
}


def asked(column: str, values: dict[str, tuple]) -> tuple:
    return values.get(column, (True,))


def _arguments(of: dict[str, Any]) -> dict[str, Any]:
    from vllm.platforms.interface import DeviceCapability

    major, minor = map(int, of["device_capability"].split("."))
    return of | dict(dtype=getattr(torch, of["dtype"]), device_capability=DeviceCapability(major, minor))


def verdicts(backend: Any, ordinary: dict[str, Any], cache_dtypes: list[str]) -> dict[str, dict[str, str]]:
    """What vLLM says to each value of each column: "" or its reasons for refusing."""
    values = VALUES | dict(kv_cache_dtype=tuple(cache_dtypes))
    found: dict[str, dict[str, str]] = {}
    for column in inspect.signature(backend.validate_configuration).parameters:
        if column == "use_mla":  # (each kind of model has a backend of its own)
            continue
        for value in asked(column, values):
            reasons = backend.validate_configuration(**_arguments(ordinary | {column: value}))
            found.setdefault(column, {})[str(value)] = "; ".join(reasons)
    return found


def answers() -> dict[str, dict[str, Any]]:
    """What the classes of fa4 say where vLLM's base classes have a default: attributes and questions."""
    found: dict[str, dict[str, Any]] = {}
    for ours, bases in OURS.items():
        cls = resolved(ours)
        own = found.setdefault(ours, {})
        for base in bases:
            contract = classes([path for path in CLASSES if path.endswith(f":{base}")])[base]
            own |= {name: _value(getattr(cls, name)) for name in contract["attributes"]}
            for name, method in contract["methods"].items():
                is_question = name.startswith(("supports_", "is_", "can_", "requires_")) and method["kind"] != "method"
                if is_question and not [x for x in method["parameters"] if x["name"] not in ("self", "cls")]:
                    own[name] = _value(getattr(cls, name)())
    return found


def _value(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def resolved(name: str) -> type:
    module, cls = name.split(".")
    return getattr(import_module(f"fa4.integrations.vllm.{module}"), cls)


def recorded() -> dict:
    """The contract of the installed vLLM."""
    from vllm.config.cache import CacheDType

    cache_dtypes = list(get_args(CacheDType))
    return {
        "version": importlib.metadata.version("vllm"),
        "classes": classes(CLASSES),
        "cache_dtypes": cache_dtypes,
        "answers": answers(),
        "verdicts": {
            "keys and values per head": verdicts(resolved("backend.Backend"), ORDINARY, cache_dtypes),
            "latent attention": verdicts(resolved("mla.MlaBackend"), OF_LATENTS, cache_dtypes),
        },
    }


def stub(contract: dict, name: str, bases: tuple[type, ...] = (), **members: Any) -> type:
    """A class with a base's attributes and abstract methods, without what they do."""
    import abc

    described = contract["classes"][name]
    attributes = {key: value for key, value in described["attributes"].items() if key != "_cudagraph_support"}
    abstract = {
        key: abc.abstractmethod(lambda self, *args, **options: None)
        for key, method in described["methods"].items()
        if method.get("abstract")
    }
    return abc.ABCMeta(name, bases, attributes | abstract | members)


def namespace(contract: dict, name: str) -> SimpleNamespace:
    return SimpleNamespace(**{member: member.lower() for member in contract["classes"][name]["members"]})
