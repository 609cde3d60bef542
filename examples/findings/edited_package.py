"""Import a copy of an installed package with small edits. The installed files stay as they are.

    use_edited("flash_attn.cute", "4.0.0b36", [Edit("interface.py", "old words", "new words")])
    from flash_attn.cute import flash_attn_func  # the copy

An edit replaces words within a line, or whole lines, so that line numbers of the copy are those of the package.
"""

import atexit
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """file: relative to the package. old: words that occur `count` times in the file."""

    file: str
    old: str
    new: str
    count: int = 1

    def apply(self, text: str, version: str) -> str:
        """Return the edited text. version: of the package for which the edit was written."""
        if "\n" in self.old or "\n" in self.new:
            raise ValueError(f"an edit of {self.file} must stay within a line")
        found = text.count(self.old)
        if found != self.count:
            raise ValueError(
                f"{self.file} has {self.old!r} {found} times, expected {self.count}: this edit is for version {version}"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Removal:
    """Statements that are left out. file: relative to the package. lines: first and last of each, from 1, or the line
    of one that has no other. word: it occurs in the first line of each. by: the statement in their place."""

    file: str
    word: str
    lines: tuple[int | tuple[int, int], ...]
    by: str = "pass"

    def apply(self, text: str, version: str) -> str:
        """Return the edited text. version: of the package for which the edit was written."""
        rows = text.splitlines(keepends=True)
        for lines in self.lines:
            first, last = (lines, lines) if isinstance(lines, int) else lines
            row = rows[first - 1] if first <= len(rows) else ""
            if self.word not in row:
                found = f"{self.file}:{first} is {row.strip()!r}, expected {self.word!r}"
                raise ValueError(f"{found}: this edit is for version {version}")
            rows[first - 1 : last] = [row[: len(row) - len(row.lstrip())] + f"{self.by}\n", *["\n"] * (last - first)]
        return "".join(rows)


def use_edited(package: str, version: str, edits: Iterable[Edit | Removal]) -> Path:
    """Copy an installed package to a temporary folder, apply the edits, print the edited lines, and let later imports
    find the copy. Return the folder of the copy. Parents of the package are empty packages there."""
    top = package.partition(".")[0]
    if top in sys.modules:
        raise RuntimeError(f"{top} is imported already; apply the edits before its first import")
    source = _folder_of(package)
    root = Path(tempfile.mkdtemp(prefix="edited-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    copy = root.joinpath(*package.split("."))
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for parent in copy.relative_to(root).parents[:-1]:
        (root / parent / "__init__.py").touch()
    for edit in edits:
        before = (copy / edit.file).read_text()
        after = edit.apply(before, version)
        (copy / edit.file).write_text(after)
        for number, (old, new) in enumerate(zip(before.splitlines(), after.splitlines(), strict=True), 1):
            if old != new:
                print(f"edited {edit.file}:{number}: {new.strip() or '(removed)'}")
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    return copy


def _folder_of(package: str) -> Path:
    """Of an installed package, without importing the package or its parents."""
    for entry in sys.path:
        folder = Path(entry or ".").joinpath(*package.split("."))
        if (folder / "__init__.py").is_file():
            return folder
    raise ModuleNotFoundError(f"{package} is not installed")
