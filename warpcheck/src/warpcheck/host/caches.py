"""Kernel caches on disk: a real GPU must never load an emulated kernel, and the emulator never a real one."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

# Variables that packages read when they are imported, and the values that disable their kernel caches.
SWITCHES = {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
# Variables of conventional folders, and the subfolders of the scratch directory that replace them.
FOLDERS = {
    "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda", "FLASHINFER_WORKSPACE_BASE": "home",
}  # fmt: skip
# Folders of the user's cache that hold no kernels.
KEPT = ("huggingface", "torch")


@contextlib.contextmanager
def bypassed(kept: Mapping[str, str]) -> Iterator[None]:
    """Redirect caches and temporary files of packages to a directory that is removed when the process ends.

    SWITCHES has the packages that use a folder of their own. kept: variables of libraries that distinguish emulated
    kernels; they keep their caches.
    """
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    scratch = _scratch()
    folders = {name: str(scratch / folder) for name, folder in FOLDERS.items()}
    for folder in folders.values():
        Path(folder).mkdir()
    for name in KEPT:
        with contextlib.suppress(OSError):  # a home that cannot be written to
            (user / name).mkdir(parents=True, exist_ok=True)
            Path(folders["XDG_CACHE_HOME"], name).symlink_to(user / name)
    inside = SWITCHES | folders | dict(kept)
    before, directory = {name: os.environ.get(name) for name in inside}, tempfile.tempdir
    os.environ.update(inside)
    tempfile.tempdir = folders["TMPDIR"]
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
    """Create a directory that this process, and none of its children, removes at its end.

    It outlives `bypassed`, because packages that were imported inside continue to use the folders.
    """
    path, owner = tempfile.mkdtemp(prefix="warpcheck-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return Path(path)
