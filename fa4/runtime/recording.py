"""FA4_RECORD: write each problem that runs on a chip as a line of JSON, which `fa4.api.ahead` reads and compiles.

A line holds the chip, its number of multiprocessors (some kernels depend on it), and either spec and extent of a
problem or the configuration of an append to a cache. Processes may share the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from typing import Any

import torch

from ..mods.ir.graph import Graph
from . import env
from .device import Chip
from .spec import AttentionSpec, ProblemSize

_added: set[tuple[str, str]] = set()


def problem(spec: AttentionSpec, extent: ProblemSize, chip: Chip, backend: str) -> None:
    """Record an attention problem."""
    _add(chip, {"backend": backend, "extent": extent, "spec": _plain(spec)})


def append(config: Any, chip: Chip) -> None:
    """Record an append to a cache, a `fwd.launchers.AppendConfig`."""
    _add(chip, {"append": _plain(config)})


def _plain(x: Any) -> Any:
    """Return x for JSON: the fields of a dataclass that are not None, the name of a dtype, the text of a graph."""
    if dataclasses.is_dataclass(x):
        values = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
        return {name: _plain(value) for name, value in values.items() if value is not None}
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    return x.text if isinstance(x, Graph) else x


def _add(chip: Chip, request: dict[str, Any]) -> None:
    file = env.RECORD.get()
    if not file or chip.dry_run is not None:
        return
    line = json.dumps({"chip": chip.number, "sms": chip.sms} | request) + "\n"
    if (file, line) in _added:
        return
    _added.add((file, line))
    try:
        _add_line(file, line.encode())
    except OSError as error:
        warnings.warn(f"FA4_RECORD: nothing can be added to {file}: {error}", stacklevel=2)


def _add_line(file: str, line: bytes) -> None:
    """Write a whole line, with concurrent writers: a buffered file would split long lines."""
    import fcntl

    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: O_APPEND still writes at the end
            fcntl.flock(fd, fcntl.LOCK_EX)
        while line:
            line = line[os.write(fd, line) :]
    finally:
        os.close(fd)
