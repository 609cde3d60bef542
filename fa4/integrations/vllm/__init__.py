"""fa4 as an attention backend of vLLM: its plug-in loader calls `register`; `--attention-backend CUSTOM` selects it."""

from __future__ import annotations

NAME = "CUSTOM"  # vLLM's name for an external backend; its other processes may unpickle a configuration with no other


def register() -> None:
    """Register fa4's backends under vLLM's name for external backends, unless the name is taken.

    vLLM calls this in each of its processes, through the entry point of the group "vllm.general_plugins".
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum[NAME]
    if not custom.is_overridden():
        register_backend(custom, f"{__name__}.Backend")
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    except ImportError:  # a vLLM without a choice of prefill backends
        return
    prefill = MLAPrefillBackendEnum[NAME]
    if not prefill.is_overridden():
        register_mla_prefill_backend(prefill, f"{__name__}.prefill.MlaPrefill")


def __getattr__(name: str) -> type:
    """Resolve the path that `register` gives to vLLM: the backend for the model whose layers are being built. vLLM has
    one name for external backends, and a backend serves either latent attention or keys and values per head."""
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    model = getattr(get_current_vllm_config_or_none(), "model_config", None)
    if model is not None and model.use_mla:
        from .mla import MlaBackend

        return MlaBackend
    from .backend import Backend

    return Backend
