"""Imports point down, and what is called shared imports no chip: the layers of the package, held by its source text."""

import ast
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fa4"

# From the ground up. A part may import from lower lines only; the parts of one line do not know each other.
LAYERS = (
    ("mods.ir",),
    ("runtime",),
    ("core", "mods.frontend"),
    ("fallback", "pipeline"),
    ("fwd", "bwd"),
    ("sm80", "sm90", "sm100", "sm120", "torch_ops"),
    ("distributed", "indexer", "kvcache"),
    ("api", "masks", "scores"),
    ("sparse",),
    ("compat", "integrations", "oracle"),
    ("emulator",),
    ("cli",),
    ("__main__",),
)
CHIPS = ("sm80", "sm90", "sm100", "sm120")
SHARED = ("core", "fwd", "bwd", "pipeline")
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}


def part_of(path: Path) -> str:
    """The part that a file belongs to: a module or folder of the package, and of `mods` one of its two halves."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "mods.frontend" if parts[:2] == ("mods", "frontend") else "mods.ir" if parts[0] == "mods" else parts[0]


def imported_files(path: Path, text: str) -> set[Path]:
    """Files of the package that a file imports anywhere in its text, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if node.level else PACKAGE.parent
            base = base.joinpath(*(node.module or "").split("."))
            names = [(base, base / alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(PACKAGE.parent.joinpath(*alias.name.split(".")),) * 2 for alias in node.names]
        for package, module in names:
            # `from package import name`: a module of that name, else something that the package itself defines.
            for candidate in (module, package):
                files = [file for file in (candidate.with_suffix(".py"), candidate / "__init__.py") if file.is_file()]
                if files:
                    found.add(files[0])
                    break
    return {file for file in found if PACKAGE in file.parents} - {PACKAGE / "__init__.py"}


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@functools.cache
def imports() -> dict[Path, set[Path]]:
    """What each file imports; read when a test asks, which is seconds after collection for all other tests."""
    return {path: imported_files(path, path.read_text()) for path in SOURCES}


def test_the_reader_of_imports_sees_every_form():
    text = (
        "from ..core import mask\nfrom . import work\nimport fa4.runtime.jit\n"
        "def f():\n    from fa4.sm80.tiles import padded\n"
    )
    seen = {str(file.relative_to(PACKAGE)) for file in imported_files(PACKAGE / "sm90" / "x.py", text)}
    assert {"core/mask.py", "runtime/jit.py", "sm80/tiles.py"} <= seen
    assert any(part_of(path) == "api" and part_of(file) == "torch_ops" for path in SOURCES for file in imports()[path])


def test_every_part_has_a_layer():
    parts = {part_of(path) for path in SOURCES}
    assert not parts - RANK.keys(), "give the new part a line in LAYERS"


@pytest.mark.parametrize("part", RANK)
def test_imports_point_down(part):
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {file.relative_to(PACKAGE)}"
        for path in SOURCES
        if part_of(path) == part
        for file in imports()[path]
        if part_of(file) != part and RANK[part_of(file)] >= RANK[part]
    ]
    assert not wrong


def test_nothing_imports_a_chip():
    """A chip's folder is known to the dispatcher's table alone, by its name as text, and never to another chip."""
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {file.relative_to(PACKAGE)}"
        for path in SOURCES
        for file in imports()[path]
        if part_of(file) in CHIPS and part_of(file) != part_of(path)
    ]
    assert not wrong


def test_the_two_hopper_backward_kernels_do_not_know_each_other():
    """They share `common`, which imports neither; the plan chooses."""
    room = PACKAGE / "sm90" / "bwd"
    parts = {"bwd": {"bwd", "common"}, "wide": {"wide", "common"}, "common": {"common"}}
    wrong = [
        f"{path.relative_to(room)} imports {file.relative_to(room)}"
        for path in room.rglob("*.py")
        if path != room / "plan.py"
        for file in imports()[path]
        if room in file.parents and file.parent.name not in parts[path.parent.name]
    ]
    assert not wrong


def test_the_page_lists_the_parts_in_the_order_of_their_layers():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = text[text.index("a test holds the order") :]
    rows = [line.split("|")[1] for line in table.splitlines() if "`fa4/" in line]
    lines = [[name.replace("/", ".") for name in re.findall(r"`fa4/(mods/\w+|\w+)[./][^`]*`", row)] for row in rows]
    ranks = [[RANK[part] for part in parts] for parts in lines]
    for above, below in itertools.pairwise(ranks):
        assert min(above) >= max(below), f"{lines[ranks.index(above)]} stands above {lines[ranks.index(below)]}"
    listed = {part for parts in lines for part in parts}
    assert listed == set(map(part_of, SOURCES)) - {"__main__"}


def test_plans_import_no_compiler():
    """All that a launch imports, in a process where CuTe DSL cannot be imported."""
    plans = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("plan.py")]
    modules = ["fa4", "fa4.kvcache.append", "fa4.distributed.ring", "fa4.fwd.launchers", *sorted(plans)]
    assert len(modules) > 15
    program = "import importlib, sys\nsys.modules['cutlass'] = None\nfor x in sys.argv[1:]: importlib.import_module(x)"
    subprocess.run([sys.executable, "-c", program, *modules], cwd=PACKAGE.parent, check=True)


@pytest.mark.parametrize("order", ("fa4, torch.utils.flop_counter", "torch.utils.flop_counter, fa4"))
def test_formulas_wait_for_the_counter_of_flops(order):
    """The counter imports Triton, so fa4 does not import it."""
    program = f"""if True:
        import sys, torch
        first = {order!r}.split(", ")[0]
        __import__(first)
        assert first != "fa4" or not {{"torch.utils.flop_counter", "triton"}} & set(sys.modules)
        import {order}
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            x = torch.randn(1, 4, 2, 8, requires_grad=True)
            fa4.flash_attn_func(x, x, x).sum().backward()
        assert counter.get_total_flops() == 7 * 2 * 2 * 4 * 4 * 8, counter.get_total_flops()
    """
    subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, check=True)
