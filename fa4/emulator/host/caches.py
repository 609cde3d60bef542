"""Kernels that packages keep on disk: an emulator's must never be found by a real GPU, nor the other way round."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# What a package reads when it is imported, and the value that leaves its files alone.
SWITCHES = {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}


@contextlib.contextmanager
def bypassed() -> Iterator[None]:
    """Inside, packages that are imported keep no kernels on disk. fa4's own cache tells emulated kernels apart."""
    before = {name: os.environ.get(name) for name in SWITCHES}
    os.environ.update(SWITCHES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
