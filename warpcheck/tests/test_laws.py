"""Imports: nothing of fa4, no package but NumPy and click at first, and within the package only what lies below."""

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "warpcheck"
FILES = sorted(PACKAGE.rglob("*.py"))
TEXTS = [path for path in sorted(SOURCE.rglob("*")) if path.suffix in (".py", ".c", ".cpp", ".hpp")]

# From the ground up. A module may import from lower lines only; the parts of one line do not know each other.
LAYERS = (
    ("errors", "toolkit"),
    ("findings",),
    ("machine", "repository"),
    ("libraries", "nvrtc", "options", "report"),
    ("host",),
    ("timing", "orders"),
    ("trace", "emulated"),
    ("context",),
    ("__init__",),
    ("scripts", "pytest_plugin", "telling"),
    ("tools",),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
EVERYWHERE = {"numpy", "click", "warpcheck"}
LATER = {"torch", "cutlass", "cuda", "triton", "tvm_ffi", "pytest"}  # imported by what is for their users


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """Full names of what a file imports, anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imported(path) if name.split(".")[0] == "warpcheck")
    return {name[1] if len(name) > 1 and name[1] in RANK else "__init__" for name in names}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_nothing_is_known_of_fa4(path):
    assert "fa4" not in path.read_text().lower()


def test_every_part_has_a_layer():
    assert not {part_of(path) for path in FILES} - RANK.keys()


@pytest.mark.parametrize("part", RANK)
def test_imports_point_down(part):
    """Commands are imported when they are called, so that a command of a part may use what lies above the part."""
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in FILES
        if part_of(path) == part and path.name not in ("command.py", "__main__.py")
        for other in parts_imported(path)
        if other != part and RANK[other] >= RANK[part]
    ]
    assert not wrong


def test_other_packages_are_those_that_the_readme_names():
    for path in FILES:
        others = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names) - EVERYWHERE
        assert others <= LATER, f"{path.relative_to(PACKAGE)} imports {others - LATER}"
