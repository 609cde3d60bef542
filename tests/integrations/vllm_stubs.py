"""vLLM's modules as far as `fa4.integrations.vllm.backend` looks at them, from the checked-in contract; or, where vLLM
is installed, its own. What needs a GPU, writing the cache and adding up ranks, is computed by torch in both."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import torch

from tests.integrations.contracts import load
from tests.integrations.contracts.vllm import namespace, stub

IS_INSTALLED = importlib.util.find_spec("vllm") is not None
ENGINES = ("contract", "installed")
OURS = tuple(f"fa4.integrations.vllm.{name}" for name in ("backend", "mla", "prefill"))


def module(name, **members):
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


def write_pages(key, value, k_cache, v_cache, slots, kv_cache_dtype, k_scale, v_scale):
    """What vLLM's kernel of this name does: rows to their slots, those of -1 nowhere; fp8 as bytes of row / scale."""
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        if kv_cache_dtype.startswith("fp8"):
            assert cache.dtype == torch.uint8 and scale is not None
            x = (x.float() / scale.reshape(-1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
            cache = cache.view(torch.float8_e4m3fn)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = x[row]


def local_lens(seq_lens, dcp_size=1, dcp_rank=None, cp_kv_cache_interleave_size=1):
    """Rows of each sequence that a rank has: it has every dcp_size-th group."""
    kept = [
        sum(row // cp_kv_cache_interleave_size % dcp_size == dcp_rank for row in range(n)) for n in seq_lens.tolist()
    ]
    return torch.tensor(kept, dtype=torch.int32)


def contract_modules():
    contract = load("vllm")
    base = stub(contract, "AttentionImplBase")
    packages = (
        "vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.v1.attention.ops",
        "vllm.distributed",
    )  # fmt: skip
    registry = SimpleNamespace(path=None)
    custom = SimpleNamespace(is_overridden=lambda: registry.path is not None)

    def keep(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec, layer_names, vllm_config, device,
        )  # fmt: skip

    return [
        *map(module, packages),
        module("vllm.config", get_current_vllm_config_or_none=lambda: None),
        module("vllm.v1.attention.ops.dcp", cp_lse_ag_out_rs=None, dcp_a2a_lse_reduce=None),
        module("vllm.v1.attention.backends.utils", get_dcp_local_seq_lens=local_lens),
        module(
            "vllm.v1.attention.backends.registry",
            AttentionBackendEnum={"CUSTOM": custom},
            register_backend=lambda backend, path: registry.__dict__.update(path=path),
            of_stubs=registry,
        ),
        module(
            "vllm.v1.attention.backend",
            AttentionBackend=stub(contract, "AttentionBackend"),
            AttentionImpl=stub(contract, "AttentionImpl", (base,)),
            AttentionMetadataBuilder=stub(contract, "AttentionMetadataBuilder", __init__=keep),
            AttentionCGSupport=namespace(contract, "AttentionCGSupport"),
            AttentionType=namespace(contract, "AttentionType"),
            MultipleOf=lambda base: SimpleNamespace(base=base),
        ),
    ]


def install(engine, monkeypatch):
    """Make `fa4.integrations.vllm.backend` importable beside a kind of vLLM; return the module."""
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    if engine == "contract":
        for found in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
            monkeypatch.delitem(sys.modules, found)
        for made in contract_modules():
            monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setitem(
        sys.modules, "vllm._custom_ops", module("vllm._custom_ops", reshape_and_cache_flash=write_pages)
    )
    backend = importlib.import_module("fa4.integrations.vllm.backend")
    del sys.modules[backend.__name__]
    monkeypatch.setitem(sys.modules, backend.__name__, backend)  # which is taken out again after the test
    return backend
