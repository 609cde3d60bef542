"""fa4 as an attention backend of vLLM: its plug-ins call `register`, and `--attention-backend CUSTOM` chooses it."""

from __future__ import annotations

NAME = "CUSTOM"  # vLLM's name for a backend from elsewhere


def register() -> None:
    """Make fa4's backend known under the name that vLLM keeps for others, unless somebody else has taken it.

    vLLM calls this in each of its processes, by the entry point of the group "vllm.general_plugins".
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum[NAME]
    if not custom.is_overridden():
        register_backend(custom, "fa4.integrations.vllm.backend.Backend")
