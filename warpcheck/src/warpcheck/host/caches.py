"""Kernels that packages keep on disk: an emulator's must never be found by a real GPU, nor the other way round."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

# What a package reads when it is imported, and the value that leaves its files alone.
SWITCHES = {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
# Where whoever follows a convention keeps files, and below which folder of a scratch directory it does so inside.
PLACES = {
    "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda", "FLASHINFER_WORKSPACE_BASE": "home",
}  # fmt: skip
# Folders of the user's cache that hold no kernels.
KEPT = ("huggingface", "torch")


@contextlib.contextmanager
def bypassed(kept: Mapping[str, str]) -> Iterator[None]:
    """Inside, what packages keep in the usual places of caches and temporary files goes to a directory that is removed
    when the process ends, so that no later process finds it. Packages that look for a place of their own are named in
    SWITCHES. kept: variables of libraries that tell emulated kernels apart, which keep theirs where they do outside."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    scratch = _scratch()
    places = {name: str(scratch / folder) for name, folder in PLACES.items()}
    for place in places.values():
        Path(place).mkdir()
    for name in KEPT:
        with contextlib.suppress(OSError):  # a home that cannot be written to
            (user / name).mkdir(parents=True, exist_ok=True)
            Path(places["XDG_CACHE_HOME"], name).symlink_to(user / name)
    inside = SWITCHES | places | dict(kept)
    before, directory = {name: os.environ.get(name) for name in inside}, tempfile.tempdir
    os.environ.update(inside)
    tempfile.tempdir = places["TMPDIR"]
    try:
        yield
    finally:
        tempfile.tempdir = directory
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _scratch() -> Path:
    """A new directory that this process removes when it ends, and no child of it. Packages that were imported inside
    `bypassed` remember the places, and go on to use them."""
    path, owner = tempfile.mkdtemp(prefix="warpcheck-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return Path(path)
