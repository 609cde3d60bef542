"""Reproductions of what a package's comments ask (examples/findings): how they edit the package, and what they show."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warpcheck_cases.printed import shown

from tests.emulator.public.rows import version_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "findings"
VERSION = "4.0.0b36"
CODE = '"""A package."""\nanswer = 1 if False else 2\n# answer = 4\n'


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """The module, with the package `outer.inner` installed; importing `outer` fails."""
    package = tmp_path / "site" / "outer" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise ImportError('the parent of the package was imported')")
    (package / "__init__.py").write_text("from .code import answer")
    (package / "code.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [str(FOLDER), str(tmp_path / "site"), *sys.path])
    yield importlib.import_module("edited_package")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("outer", "edited_package")]:
        del sys.modules[name]


def test_the_copy_is_imported_and_the_package_stays(edited, tmp_path, capsys):
    edits = [edited.Edit("code.py", "# answer = 4", "answer = 4"), edited.Edit("code.py", "if False ", "if True ")]
    copy = edited.use_edited("outer.inner", "1.0", edits)
    assert importlib.import_module("outer.inner").answer == 4
    assert Path(sys.modules["outer.inner.code"].__file__) == copy / "code.py"
    assert (tmp_path / "site" / "outer" / "inner" / "code.py").read_text() == CODE
    assert capsys.readouterr().out.splitlines() == [
        "edited code.py:3: answer = 4",
        "edited code.py:2: answer = 1 if True else 2",
    ]
    with pytest.raises(RuntimeError, match="outer is imported already"):
        edited.use_edited("outer.inner", "1.0", edits)


@pytest.mark.parametrize("old, count, found", [("answer = 5", 1, 0), ("answer = ", 1, 2), ("answer = ", 3, 2)])
def test_an_edit_whose_place_is_not_there_names_the_version(edited, old, count, found):
    expected = re.escape(f"code.py has {old!r} {found} times, expected {count}: this edit is for version 1.0")
    before = list(sys.path)
    with pytest.raises(ValueError, match=expected):
        edited.use_edited("outer.inner", "1.0", [edited.Edit("code.py", old, "", count)])
    assert sys.path == before


def test_edits_keep_line_numbers(edited):
    with pytest.raises(ValueError, match="must stay within a line"):
        edited.Edit("code.py", "answer", "\nanswer").apply(CODE, "1.0")


STATEMENTS = "def f():\n    wait(\n        1,\n    )\n    wait(2)\n    return 3\n"


def test_removed_statements_keep_line_numbers(edited):
    removal = edited.Removal("code.py", "wait", ((2, 4), 5))
    assert removal.apply(STATEMENTS, "1.0") == "def f():\n    pass\n\n\n    pass\n    return 3\n"
    replaced = edited.Removal("code.py", "wait", (5,), "sleep()").apply(STATEMENTS, "1.0")
    assert replaced == STATEMENTS.replace("wait(2)", "sleep()")


@pytest.mark.parametrize("line, row", [(6, "return 3"), (7, "")])
def test_a_removal_whose_word_is_not_there_names_the_version(edited, line, row):
    expected = re.escape(f"code.py:{line} is {row!r}, expected 'wait': this edit is for version 1.0")
    with pytest.raises(ValueError, match=expected):
        edited.Removal("code.py", "wait", (line,)).apply(STATEMENTS, "1.0")


def test_a_package_that_is_not_installed(edited):
    with pytest.raises(ModuleNotFoundError, match=re.escape("outer.none is not installed")):
        edited.use_edited("outer.none", "1.0", [])


RUNS = {
    "tail": (
        1,
        ["s_p_tail.py"],
        ["dV: error", "error [deadlock]", "for the end of phase 1: 16 of 16 arrivals missing"],
    ),
    "tail, 2 tiles": (1, ["s_p_tail.py", "--tiles", "2"], ["for the end of phase 2: 16 of 16 arrivals missing"]),
    "no tail": (0, ["s_p_tail.py", "--tail", "none"], ["dV: error"]),
    "384 rows": (1, ["clc_d256.py", "--rows", "384"], ["error [out-of-bounds]", "coordinate -128", "error [deadlock]"]),
    "256 rows": (0, ["clc_d256.py", "--rows", "256"], ["128 of 256 rows are wrong, in tiles [1]", "no finding"]),
    "repaired": (0, ["clc_d256.py", "--rows", "384", "--repaired"], ["\n0 of 384 rows are wrong\n", "no finding"]),
}


@pytest.mark.skipif(version_of("flash-attn-4") != VERSION, reason=f"flash-attn-4 {VERSION} is not installed")
@pytest.mark.parametrize("name", RUNS)
def test_what_the_pages_say(name):
    exit_code, arguments, texts = RUNS[name]
    options = ["run", "--chip", "sm_100a", "--seeds", "3", "--"]
    script = (FOLDER / arguments[0]).relative_to(ROOT)
    command = [sys.executable, "-m", "warpcheck", *options, str(script), *arguments[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    print(done.stdout, done.stderr)
    assert done.returncode == exit_code
    assert all(text in done.stdout for text in texts)
    if name in PAGES:
        block = shown((ROOT / "docs" / "results" / PAGES[name]).read_text(), f"command: {name}", "text")
        first, *lines = [_comparable(line) for line in block.splitlines()]
        assert first == " ".join(["$ warpcheck", *options, str(script), *arguments[1:]])
        printed = [_comparable(line) for line in done.stdout.splitlines()]
        assert not [line for line in lines if line not in printed]


PAGES = {"tail": "flash-attn-4-s-p-tail.md", "384 rows": "flash-attn-4-clc-d256.md"}


def _comparable(line: str) -> str:
    """Remove what depends on the order or on the compiler: addresses, PTX lines, the warp, and the folder."""
    line = re.sub(r"ptx line \d+: .*?, \S*(?=flash_attn/cute/)", "", line)
    return re.sub(r"0x[0-9a-f]+|\bwarp \d+(, lane \d+)?", "", line)
