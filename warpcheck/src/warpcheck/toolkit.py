"""Programs and headers of the CUDA toolkit from installed PyPI packages, without an installed toolkit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def packages() -> list[Path]:
    """Folders of NVIDIA's installed CUDA packages."""
    spec = find_spec("nvidia")
    roots = (spec.submodule_search_locations if spec else None) or ()
    return [folder for root in roots for folder in Path(root).iterdir()]


def program(name: str) -> str | None:
    """Path of one of the toolkit's programs; None if no package contains it."""
    found = (folder / "bin" / name for folder in packages())
    return next((str(path) for path in found if path.exists()), None)
