"""The repository of warpcheck: some commands use its tests, which no wheel contains."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]
_CASES = ROOT / "warpcheck" / "tests"


def is_here() -> bool:
    """Whether this package lies in a checkout."""
    return (_CASES / "warpcheck_cases").is_dir()


def module(name: str) -> ModuleType:
    """Import a module of `warpcheck_cases` or of `tests`.

    Raises:
        ImportError: this package is an installed wheel.
    """
    if not is_here():
        raise ImportError(f"{name} is in warpcheck's repository and in no wheel: pip install -e ./warpcheck there")
    for folder in (str(ROOT), str(_CASES)):
        if folder not in sys.path:
            sys.path.append(folder)
    return importlib.import_module(name)
