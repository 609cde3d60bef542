"""Which tests run a line of the package. A kernel's test takes seconds: a mutant is shown to those that run it, and a
test is first asked for its lines when a mutant has come so far.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True)
class Reach:
    """What a test (as pytest's arguments) runs, alone and without kernels from a cache: seconds, traced; lines and
    digests of the package's files."""

    cpu_seconds: float
    seconds: float
    lines: Mapping[str, Sequence[int]]
    digests: Mapping[str, str]

    def holds(self, root: Path, files: Callable[[str], bool]) -> bool:
        """Whether those of the files that it runs are what they were."""
        mine = {path: was for path, was in self.digests.items() if files(path)}
        return all((root / path).exists() and digest(root / path) == was for path, was in mine.items())

    def runs(self, path: str, lines: range) -> bool:
        return not set(self.lines.get(path, ())).isdisjoint(lines)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Known:
    """The reaches of tests, kept in a file from run to run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        stored = json.loads(file.read_text()) if file.exists() else {}
        self.reaches = {test: Reach(**fields) for test, fields in stored.items()}

    def get(self, test: str, root: Path, files: Callable[[str], bool]) -> Reach | None:
        reach = self.reaches.get(test)
        return reach if reach is not None and reach.holds(root, files) else None

    def keep(self, test: str, reach: Reach) -> None:
        self.reaches[test] = reach
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({name: asdict(one) for name, one in self.reaches.items()}))


def statement(source: bytes, line: int) -> range:
    """The lines of the innermost statement around a line; of one that holds others, those of its head."""
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    inner = max(around, key=lambda node: (node.lineno, node.col_offset))
    body = getattr(inner, "body", None)
    stop = max(inner.lineno, body[0].lineno - 1) if body else inner.end_lineno or inner.lineno
    return range(inner.lineno, stop + 1)


class Tracer:
    """Notes the lines of the package in `tree` that this process runs: device code's too, which CuTe DSL runs once, as
    Python, to trace it."""

    def __init__(self, tree: Path) -> None:
        self.prefix, self.lines = f"{tree}/fa4/", defaultdict[str, set[int]](set)
        self.left_alone = f"{tree}/fa4/emulator/"

    def start(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self) -> dict[str, list[int]]:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        root = len(self.prefix) - len("fa4/")
        return {name[root:]: sorted(lines) for name, lines in self.lines.items()}

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self.prefix) or name.startswith(self.left_alone):
            return None
        lines = self.lines[name]

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line
