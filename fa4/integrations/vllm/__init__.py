"""fa4 as an attention backend of vLLM: its plug-in loader calls `register`; `--attention-backend CUSTOM` selects it."""

from __future__ import annotations

NAME = "CUSTOM"  # vLLM's name for an external backend


def register() -> None:
    """Register fa4's backend under vLLM's name for external backends, unless the name is taken.

    vLLM calls this in each of its processes, through the entry point of the group "vllm.general_plugins".
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum[NAME]
    if not custom.is_overridden():
        register_backend(custom, "fa4.integrations.vllm.backend.Backend")
