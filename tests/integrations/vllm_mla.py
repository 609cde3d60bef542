"""vLLM's modules of latent attention as far as fa4 looks at them: base classes that call what a backend overrides."""

import abc
import enum
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.integrations.contracts import load
from tests.integrations.contracts.vllm import namespace
from tests.integrations.vllm_stubs import module as stub

MULTIPLE_OF, DECODER = (lambda base: SimpleNamespace(base=base)), "decoder"


class MLACommonBackend:
    @classmethod
    def is_mla(cls):
        return True

    @classmethod
    def supports_head_size(cls, head_size):
        return head_size in cls.get_supported_head_sizes()


@dataclass
class MLACommonDecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


@dataclass
class MLACommonMetadata:
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: Any = None
    prefill: Any = None


class MLACommonImpl(abc.ABC):
    """One layer. The base class of vLLM finds the size of the group of decode context parallelism by itself."""

    dcp_world_size = 1
    can_return_lse_for_decode = False

    def __init__(self, *options, kv_lora_rank, qk_rope_head_dim, **further):
        self.num_heads, self.head_size, self.scale = options[:3]
        self.kv_cache_dtype = options[6]
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.need_to_return_lse_for_decode = self.dcp_world_size > 1 and self.can_return_lse_for_decode

    @abc.abstractmethod
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...


class MLACommonMetadataBuilder:
    """Sequences with few query rows come first, and are decoded."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        speculative = 0 if vllm_config is None else vllm_config.num_speculative_tokens
        if self.query_len_support is QueryLenSupport.VARLEN:
            self.reorder_batch_threshold = 1 + speculative

    def build(self, common_prefix_len, common, fast_build=False):
        starts, bound = common.query_start_loc_cpu, self.reorder_batch_threshold
        n = int(((starts[1:] - starts[:-1]) <= bound).int().cumprod(0).sum())
        decode = None
        if n:
            decode = self._build_decode(
                block_table_tensor=common.block_table_tensor[:n],
                seq_lens_device=common.seq_lens[:n],
                max_seq_len=common.max_seq_len,
                query_start_loc_cpu=starts[: n + 1],
                query_start_loc_device=common.query_start_loc[: n + 1],
                num_decode_tokens=int(starts[n]),
                max_query_len=min(common.max_query_len, bound),
                dcp_tot_seq_lens_device=None,
            )
        return MLACommonMetadata(n, int(starts[n]), len(starts) - 1 - n, decode)


class MLAPrefillBackend(abc.ABC):
    def __init__(self, num_heads, scale):
        self.num_heads, self.scale = num_heads, scale

    def prepare_metadata(self, prefill_metadata):
        self._prefill_metadata = prefill_metadata

    @abc.abstractmethod
    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None): ...

    @abc.abstractmethod
    def run_prefill_context_chunk(self, chunk, q, k, v, out=None): ...


QueryLenSupport = enum.Enum("QueryLenSupport", "SINGLE_ONLY UNIFORM VARLEN")


@dataclass
class Registered:
    """What fa4 registered, by vLLM's registries; model: what vLLM's current configuration says of the model."""

    attention: dict = field(default_factory=dict)
    prefill: dict = field(default_factory=dict)
    model: Any = None


def modules(registered: Registered, has_prefill: bool = True) -> list[ModuleType]:
    """has_prefill: whether this vLLM has a registry of prefill backends."""

    def registry(of: dict) -> dict:
        return {"CUSTOM": SimpleNamespace(is_overridden=lambda: bool(of))}

    config = SimpleNamespace(model_config=registered.model)
    layers, mla = "vllm.model_executor.layers", "vllm.v1.attention.backends.mla"
    packages = (
        "vllm", "vllm.model_executor", layers, f"{layers}.attention", "vllm.v1", "vllm.v1.attention",
        "vllm.v1.attention.backends", mla, f"{mla}.prefill",
    )  # fmt: skip
    found = [
        *map(stub, packages),
        stub("vllm.config", get_current_vllm_config_or_none=lambda: config),
        stub(
            f"{layers}.attention.mla_attention",
            MLACommonBackend=MLACommonBackend,
            MLACommonDecodeMetadata=MLACommonDecodeMetadata,
            MLACommonImpl=MLACommonImpl,
            MLACommonMetadata=MLACommonMetadata,
            MLACommonMetadataBuilder=MLACommonMetadataBuilder,
            QueryLenSupport=QueryLenSupport,
        ),
        stub(
            "vllm.v1.attention.backends.registry",
            AttentionBackendEnum=registry(registered.attention),
            register_backend=lambda backend, path: registered.attention.update(path=path),
        ),
        stub(
            "vllm.v1.attention.backend",
            **{name: type(name, (), {}) for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder")},
            AttentionCGSupport=enum.Enum("AttentionCGSupport", "NEVER UNIFORM_BATCH ALWAYS"),
            AttentionType=namespace(load("vllm"), "AttentionType"),
            MultipleOf=MULTIPLE_OF,
        ),
    ]
    if has_prefill:
        found += [
            stub(f"{mla}.prefill.base", MLAPrefillBackend=MLAPrefillBackend),
            stub(
                f"{mla}.prefill.registry",
                MLAPrefillBackendEnum=registry(registered.prefill),
                register_mla_prefill_backend=lambda backend, path: registered.prefill.update(path=path),
            ),
        ]
    return found
