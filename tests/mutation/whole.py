"""Which tests of the whole suite run which lines of device code: measured once, kept in build/mutation/whole.

python -m tests.mutation.whole --workers 2     runs the tests of `make test` once, traced, with an empty kernel cache
python -m tests.mutation.whole --report        lines of device code that no test runs

Device code is Python that CuTe DSL runs once, while it compiles. A test that finds its kernel compiled runs none of it,
so a test's lines are those of the kernels that it was the first to ask for.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.reach import Tracer, digest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutation" / "whole"
DEVICE = ("core", "fwd", "bwd", "pipeline", "sm80", "sm90", "sm100", "sm120")


def is_device(path: str) -> bool:
    """Whether a file of the package is in a folder of device code."""
    parts = path.split("/")
    return parts[0] == "fa4" and parts[1] in DEVICE


class Plugin:
    """Notes for each test its seconds and the lines of device code that it is first to run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        tracer, begin = Tracer(ROOT), time.process_time()
        tracer.start()
        try:
            return (yield)
        finally:
            lines = {path: rows for path, rows in tracer.stop().items() if is_device(path)}
            if lines:
                row = {"test": item.nodeid, "seconds": time.process_time() - begin, "lines": lines}
                with self.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Plugin(FOLDER / f"{worker or 'main'}.jsonl"))


class Whole:
    """The notes of the last run. Those of a file that has changed since do not hold."""

    def __init__(self, root: Path = ROOT) -> None:
        found = [json.loads(line) for file in sorted(FOLDER.glob("*.jsonl")) for line in file.read_text().splitlines()]
        digests = FOLDER / "digests.json"
        self._digests = json.loads(digests.read_text()) if digests.exists() else {}
        self._root, self._rows = root, found

    def holds(self, path: str) -> bool:
        return self._digests.get(path) == digest(self._root / path)

    def tests(self, path: str, lines: range) -> list[tuple[str, float]]:
        """Tests that run one of the lines, and the processor seconds of each, the quickest first."""
        wanted = set(lines)
        found = [(row["test"], row["seconds"]) for row in self._rows if wanted & set(row["lines"].get(path, ()))]
        return sorted(found, key=lambda one: one[1])

    def lines(self, path: str) -> set[int]:
        return {line for row in self._rows for line in row["lines"].get(path, ())}


def device_files() -> list[str]:
    found = (path.relative_to(ROOT).as_posix() for path in (ROOT / "fa4").rglob("*.py"))
    return sorted(path for path in found if is_device(path))


def statements(source: bytes) -> Iterator[tuple[str, ast.stmt]]:
    """Statements in the bodies of functions, each with its function's name, but docstrings and what only raises."""

    def of(body: list[ast.stmt], name: str, is_class: bool = False) -> Iterator[tuple[str, ast.stmt]]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                inner_name = f"{name}.{node.name}" if name else node.name
                yield from of(node.body, inner_name, isinstance(node, ast.ClassDef))
            elif name and not is_class and not _says_nothing(node):  # fields run when a module is imported
                yield name, node
                for inner in (getattr(node, part, []) for part in ("body", "orelse", "finalbody")):
                    yield from of(inner, name)

    tree = ast.parse(source)
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for function in functions:
        yield from of(function.body, function.name, isinstance(function, ast.ClassDef))


def _says_nothing(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, `...`, or a type without a value; or raises NotImplementedError."""
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return True  # Python runs nothing for the type of a local variable
    if isinstance(node, ast.Raise):
        return isinstance(node.exc, ast.Name) and node.exc.id == "NotImplementedError"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def unreached(whole: Whole) -> list[str]:
    """Statements of functions of device code that no test runs."""
    missed = []
    for path in device_files():
        source, lines = (ROOT / path).read_bytes(), whole.lines(path)
        text = source.decode().splitlines()
        for name, node in statements(source):
            stop = node.body[0].lineno if getattr(node, "body", None) else (node.end_lineno or node.lineno) + 1
            if lines.isdisjoint(range(node.lineno, max(stop, node.lineno + 1))):
                missed.append(f"{path}:{node.lineno} {name}: {text[node.lineno - 1].strip()}")
    return missed


def run(workers: int, arguments: list[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in FOLDER.glob("*.json*"):
        file.unlink()
    digests = {path: digest(ROOT / path) for path in device_files()}
    with tempfile.TemporaryDirectory(prefix="fa4-reach-") as cache:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutation.whole", "-m", "not soak and not gpu"]
        command += ["-n", str(workers), "--dist", "worksteal", "--timeout", "1800", *arguments]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "FA4_CACHE_DIR": cache}).returncode
    (FOLDER / "digests.json").write_text(json.dumps(digests))
    return code


def main() -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.whole", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="of the last run")
    parser.add_argument("tests", nargs="*", help="for pytest, in place of all tests")
    args = parser.parse_args()
    if not args.report:
        return run(args.workers, args.tests)
    missed = unreached(Whole())
    total = sum(1 for path in device_files() for _ in statements((ROOT / path).read_bytes()))
    print("\n".join(missed))
    print(f"{total} statements of device code in {len(device_files())} files, {len(missed)} that no test runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
