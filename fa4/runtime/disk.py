"""Disk cache of compiled kernels: ownership, locks and removal.

A root holds a folder per toolchain and source text (16 hex digits). A folder holds entries (32 hex digits, `.so`, or
`.o` if they are not linked), each with a lock file, and what `manifest` and `linked` write. Loading an entry runs its
code, so no other user may be able to write one. An entry is looked up, compiled, loaded and removed under its lock.
Entries that no process has loaded for some days are removed, then the least recently used until the rest fits. Nothing
else in a root is removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from . import env, manifest
from .toolchain import RUNTIME_LIBRARY

_FOLDER, _ENTRY = re.compile(r"[0-9a-f]{16}"), re.compile(r"([0-9a-f]{32})(\.[0-9a-f]{32})?\.(o|so)")
_SUFFIXES = (".o", ".so")
_BESIDE = {manifest.TOOLCHAIN, manifest.KERNELS, RUNTIME_LIBRARY}  # without entries of no use
_DAY = 24 * 3600
_KEPT, _TENDED = "kept", "tended"  # marker files in a root: no automatic removal; time of the last pruning


def check_private(root: Path) -> None:
    """Raise PermissionError unless the user owns root, and no other user can write or replace it.

    Parent directories belong to the user or the administrator, and are sticky, as /tmp is, if others may write them.
    """
    user = os.getuid()
    info = root.stat()
    if info.st_uid != user or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{root} is not yours alone to write")
    for parent in dict.fromkeys((*root.absolute().parents, *root.resolve().parents)):
        info = parent.stat()
        others = stat.S_IWOTH if info.st_gid in (0, os.getgid()) else stat.S_IWOTH | stat.S_IWGRP
        if info.st_uid not in (user, 0) or (info.st_mode & others and not info.st_mode & stat.S_ISVTX):
            raise PermissionError(f"{root} is not yours alone to write: others may replace what is in {parent}")


@contextlib.contextmanager
def file_lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Lock `path` against other processes; yield whether the lock is held. Without `wait`, it is not if another process
    holds it.

    On a disk without lock support or space, the lock is not held: then several processes may compile the same kernel,
    and each puts a complete entry in place.
    """
    import fcntl

    with contextlib.ExitStack() as stack:
        held = False
        with contextlib.suppress(OSError):
            while not held:
                try:
                    file = stack.enter_context(open(path, "w"))
                except FileNotFoundError:  # an empty folder was removed meanwhile
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    continue
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Closing is not enough: a forked child has the file too, and would hold the lock for its lifetime.
                stack.callback(_unlock, file)
                held = _is_still_there(file, path)  # the previous holder may have removed it
        yield held


def _is_still_there(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _unlock(file: IO[str]) -> None:
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def lock_of(entry: Path) -> Path:
    return entry.with_name(entry.name.split(".")[0] + ".lock")


class Entry(NamedTuple):
    """Compiled kernel: its file, size in bytes, and time of last load, in seconds since 1970."""

    path: Path
    size: int
    used: float


def used(entry: Path) -> None:
    """Mark an entry as loaded."""
    with contextlib.suppress(OSError):  # the directory may belong to others, and be read-only
        os.utime(entry)


def folders(root: Path) -> list[Path]:
    """Return the folders of a root, one per toolchain and source text."""
    return [folder for folder in _files(root) if _FOLDER.fullmatch(folder.name) and folder.is_dir()]


def entries(root: Path) -> list[Entry]:
    """Return all entries of a root, the least recently used first."""
    found = []
    for folder in folders(root):
        for path in _files(folder):
            if _ENTRY.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # removed by another process
                    info = path.stat()
                    found.append(Entry(path, info.st_size, info.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def _files(folder: Path) -> list[Path]:
    """Return the content of a folder, which another process may have removed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []


def limits() -> tuple[float, float]:
    """Return the maximum age in seconds and size in bytes that the environment sets; infinite where it is 0.

    Raises:
        ValueError: a variable is not a number of 0 or more.
    """
    numbers = []
    for variable, unit in ((env.CACHE_DAYS, _DAY), (env.CACHE_GB, 1e9)):
        try:
            number = float(variable.get())
        except ValueError:
            number = -1.0
        if not number >= 0:
            raise ValueError(f"{variable.name} is {variable.get()!r}, expected a number of 0 or more")
        numbers.append(number * unit or float("inf"))
    return numbers[0], numbers[1]


def prune(root: Path, age: float, size: float) -> list[Entry]:
    """Remove entries not used for `age` seconds, then the least recently used until at most `size` bytes remain.
    Entries locked by another process stay. Return the removed entries."""
    candidates, removed = entries(root), []
    remaining, now = sum(entry.size for entry in candidates), time.time()
    for entry in candidates:
        if now - entry.used <= age and remaining <= size:
            break
        if _remove(entry):
            removed.append(entry)
            remaining -= entry.size
    for folder in {entry.path.parent for entry in removed}:
        for lock in (path for path in _files(folder) if path.suffix == ".lock"):
            if not any(path.suffix in _SUFFIXES and path.name.startswith(lock.stem) for path in _files(folder)):
                with file_lock(lock, wait=False) as held:
                    if held:
                        lock.unlink(missing_ok=True)
        left = _files(folder)  # once: an entry may be on its way into the folder meanwhile
        if {path.name for path in left} <= _BESIDE:
            for path in left:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    return removed


def _remove(entry: Entry) -> bool:
    with file_lock(lock_of(entry.path), wait=False) as held, contextlib.suppress(OSError):
        if held and entry.path.stat().st_mtime == entry.used:  # not loaded meanwhile
            entry.path.unlink()
            return True
    return False


def keep(root: Path) -> None:
    """Disable automatic removal in this root: kernels compiled ahead of time wait for their first use."""
    (root / _KEPT).touch()


def is_kept(root: Path) -> bool:
    return (root / _KEPT).exists()


def prune_daily(root: Path) -> None:
    """Prune a root to the limits of the environment, once a day, by one process. For an invalid limit, warn once and
    remove nothing."""
    try:
        age, size = limits()
    except ValueError as error:
        _warn_once(f"fa4 removes no compiled kernels from {root}: {error}")
        return
    mark = root / _TENDED
    with contextlib.suppress(OSError):
        if is_kept(root) or (mark.exists() and time.time() - mark.stat().st_mtime < _DAY):
            return
        with file_lock(mark, wait=False) as held:
            if held:
                os.utime(mark)
                prune(root, age, size)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
