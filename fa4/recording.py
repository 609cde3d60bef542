"""FA4_RECORD: what was asked of a chip, as lines of JSON that `fa4.ahead` reads, and compiles.

A line holds the chip, its number of multiprocessors, which some kernels depend on, and either the spec and extent of a
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

from . import env
from .device import Chip
from .spec import AttentionSpec, ProblemSize

_added: set[tuple[str, str]] = set()


def is_on(chip: Chip) -> bool:
    """Whether what is asked of a chip is to be written down."""
    return bool(env.RECORD.get()) and chip.dry_run is None


def problem(spec: AttentionSpec, extent: ProblemSize, chip: Chip, backend: str) -> None:
    """Write down a problem of attention."""
    mods = {} if spec.mods is None else {"mods": spec.mods.plain()}
    cache = {} if spec.cache is None else {"cache": _plain(spec.cache)}
    _add(chip, {"backend": backend, "extent": list(extent), "spec": _plain(spec) | mods | cache})


def append(config: Any, chip: Chip) -> None:
    """Write down an append to a cache, a `fwd.append.Config`."""
    if is_on(chip):
        _add(chip, {"append": _plain(config)})


def _plain(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not None; dtypes by their names."""
    given = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    names = {name: str(x).removeprefix("torch.") for name, x in given.items() if isinstance(x, torch.dtype)}
    return {name: x for name, x in (given | names).items() if x is not None}


def _add(chip: Chip, asked: dict[str, Any]) -> None:
    file, line = env.RECORD.get(), json.dumps({"chip": chip.number, "sms": chip.sms} | asked) + "\n"
    if (file, line) in _added:
        return
    _added.add((file, line))
    try:
        _add_line(file, line.encode())
    except OSError as error:
        warnings.warn(f"FA4_RECORD: nothing can be added to {file}: {error}", stacklevel=2)


def _add_line(file: str, line: bytes) -> None:
    """Whole, whatever its length and whoever adds at the same time: a buffered file writes long lines in parts."""
    import fcntl

    place = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        with contextlib.suppress(OSError):  # a disk without locks; the end is found and written at once all the same
            fcntl.flock(place, fcntl.LOCK_EX)
        while line:
            line = line[os.write(place, line) :]
    finally:
        os.close(place)
