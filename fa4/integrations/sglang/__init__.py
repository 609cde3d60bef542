"""fa4 as an attention backend of SGLang: its plug-in loader calls `register`; `--attention-backend fa4_kernels` selects
it. SGLang's own "fa4" is flash-attn-4."""

from __future__ import annotations

from typing import Any

NAME = "fa4_kernels"


def register() -> None:
    """Add fa4's backend to those that SGLang knows, and its name to those that its command line takes.

    SGLang calls this in each of its processes, through the entry point of the group "sglang.srt.plugins".
    """
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(create)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def create(runner: Any) -> Any:
    """Return the backend for a model runner of SGLang."""
    from .backend import Backend

    return Backend(runner)
