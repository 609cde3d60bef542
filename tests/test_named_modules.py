"""Comments and docstrings of the package name modules and files that exist."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fa4"
SOURCES = sorted(PACKAGE.rglob("*.py"))
_NAME = re.compile(r"`(?:fa4\.)?([a-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(.*?\))?`")
_FILE = re.compile(r"(?<![\w/.])((?:[a-z][\w-]*/)+[\w-]+\.(?:py|cpp|c|md))\b")


def prose(text: str) -> Iterator[str]:
    """The comments and docstrings of a source."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def own_names(text: str) -> set[str]:
    """Variables, arguments and fields of a source, which a name with a dot may begin with too."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | {x.arg for x in nodes if isinstance(x, ast.arg)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def is_module(path: Path) -> bool:
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def is_defined(name: str, source: Path) -> bool:
    text = source.read_text()
    return (
        re.search(rf"^\s*(?:(?:class|def) {name}\b|{name}\b.*[:=]|(?:from|import) .*\b{name}\b)", text, re.M)
        is not None
    )


def exists(base: Path, parts: list[str]) -> bool:
    """Whether `parts`, from a folder on, are a module, or a module and what it defines."""
    while parts and (base / parts[0]).is_dir() and is_module(base / parts[0]):
        base, parts = base / parts[0], parts[1:]
    if parts and is_module(base / parts[0]):
        return len(parts) == 1 or is_defined(parts[1], (base / parts[0]).with_suffix(".py"))
    return not parts or is_defined(parts[0], base / "__init__.py")


def missing(path: Path, text: str) -> list[str]:
    """What a source of this place names and is not there."""
    own, found = own_names(text), []
    bases = [PACKAGE, *(above for above in path.parents if PACKAGE in above.parents)]
    for words in prose(text):
        for name in _NAME.findall(words):
            parts = name.split(".")
            there = [base for base in bases if is_module(base / parts[0])]
            is_field = len(parts) == 2 and parts[0] in own
            if there and not is_field and not any(exists(base, parts) for base in there):
                found.append(name)
        places = (ROOT, PACKAGE, *path.parents)
        found += [file for file in _FILE.findall(words) if not any((place / file).exists() for place in places)]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_comments_and_docstrings_name_exists(path):
    assert not missing(path, path.read_text())


@pytest.mark.parametrize(
    "text, names",
    [
        ("x = 1  # see `core.schedule`", ["core.schedule"]),
        ('"""How `fa4.mods.device.captured` hands it over."""', ["mods.device.captured"]),
        ('class A:\n    """`fwd.plan.Nothing`."""', ["fwd.plan.Nothing"]),
        ("# as core/schedule.py has it", ["core/schedule.py"]),
        ("# `core.order`, `fwd.plan`, `dispatch.BACKENDS`, core/order.py, fa4/runtime/spec.py, `torch.nn`", []),
        ("cache = None  # `cache.dtype`", []),
    ],
)
def test_names_of_what_is_gone_are_found(text, names):
    assert missing(PACKAGE / "sm80" / "tiles.py", text) == names
