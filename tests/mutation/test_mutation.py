"""The mutation runner: it tells a mistake that a test sees from one that none sees; a sample of the package's own."""

import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tests.mutation.__main__ import ROOT, in_order, main, package_files
from tests.mutation.areas import AREAS, NO_MISTAKES, area_of
from tests.mutation.plant import mutants, record_fields

SOURCE = b'''
"""Two functions, of which the tests call one."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    width: int
    height: int = 1

    def __repr__(self) -> str:
        return "box" + "es"


def larger(a: int | None, b: int) -> bool:
    return a > b


def smaller(a: int, b: int) -> bool:
    return a < b
'''
TESTS = "from thing import larger\n\n\ndef test_larger():\n    assert larger(2, 1) and not larger(2, 2)\n"
JUDGE = """
import sys
from pathlib import Path
from tests.mutation.plant import mutants
from tests.mutation import workshop
from tests.mutation.workshop import Workshop

workshop._WARM = ()  # what is judged here needs neither torch nor CuTe DSL
root, scratch = map(Path, sys.argv[1:])
source = (root / "thing.py").read_bytes()
workshop = Workshop(root, scratch, seed=0)
usual = workshop.unspoilt(["test_thing.py"])
for mutant in mutants("thing.py", source, {}):
    if "is" in mutant.kind:
        print(mutant.where, mutant.kind, "->", workshop.judge(mutant, ["test_thing.py"], usual).how or "survived")
assert (workshop.tree / "thing.py").read_bytes() == source
"""


def test_one_planted_mistake_is_killed_and_one_survives(tmp_path):
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    root.mkdir(), scratch.mkdir()
    (root / "thing.py").write_bytes(SOURCE)
    (root / "test_thing.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-c", JUDGE, str(root), str(scratch)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        "larger > is >= -> test_thing.py::test_larger",
        "smaller < is <= -> survived",
    ], done.stderr
    assert (root / "thing.py").read_bytes() == SOURCE


def _kinds(source: str, fields=None) -> dict[str, list[str]]:
    """Kind of mistake -> the texts that it makes of `source`."""
    found: dict[str, list[str]] = {}
    for mutant in mutants("x.py", source.encode(), fields or {}):
        found.setdefault(mutant.kind, []).append(mutant.applied(source.encode()).decode())
    return found


@pytest.mark.parametrize(
    ("source", "kind", "spoilt"),
    [
        ("x = (a) + b  # a - b", "+ is -", "x = (a) - b  # a - b"),
        ("x //= 2", "// is *", "x *= 2"),
        ("x = a is not None", "is not is is", "x = a is None"),
        ("x = a < b <= c", "<= is <", "x = a < b < c"),
        ("x = a and b", "and is or", "x = a or b"),
        ("x = not a", "not is missing", "x = (a)"),
        ("x = -a", "minus is missing", "x = (a)"),
        ("x = min(a, b)", "min is max", "x = max(a, b)"),
        ("if a:\n    b()", "condition negated", "if not (a):\n    b()"),
        ("x = [a for a in b if a]", "condition negated", "x = [a for a in b if not (a)]"),
        ("f(a, b)", "arguments swapped", "f(b, a)"),
        ("f(a, b=c, d=e)", "arguments swapped", "f(a, b=e, d=c)"),
        ("f(a, b=c, d=e)", "keyword dropped", "f(a, d=e)"),
        ("f(a)", "statement dropped", "pass"),
        ("x[0] = a", "statement dropped", "pass"),
        ("x = 3", "constant", "x = 2"),
        ("x = True", "constant", "x = False"),
        ("x = 'µ' + a  # bytes, not letters", "+ is -", "x = 'µ' - a  # bytes, not letters"),
    ],
)
def test_mistakes(source, kind, spoilt):
    assert spoilt in _kinds(source)[kind]


@pytest.mark.parametrize(
    "source",
    ["def f(a: int | None = None) -> list[1]: ...", "raise ValueError(1 + 2)", 'x = f"{a + 1}"', '"""1 + 1"""',
     "import a", "@overload\ndef f(x=1): ...",
     "@cache(maxsize=3)\ndef f(): ...", "class A:\n    def __repr__(self):\n        return 'a' * 3"],
)  # fmt: skip
def test_texts_and_types_are_left_alone(source):
    assert not _kinds(source)


def test_arguments_whose_order_means_nothing_keep_it():
    assert "arguments swapped" not in _kinds("x = cutlass.min(a, b)") | _kinds("x = max(a, b)")


def test_another_field_is_one_of_its_type_and_name():
    record = (
        b"@dataclass\nclass Spec:\n    head_dim: int\n    head_dim_v: int\n    heads: int\n    window: int | None\n"
    )
    fields = record_fields({"x.py": record})
    assert fields["head_dim"] == ("head_dim_v",) and not fields["window"]
    assert _kinds("x = spec.head_dim", fields)["another field"] == ["x = spec.head_dim_v"]


def test_each_file_of_the_package_has_tests_that_answer_for_it():
    for path in package_files():
        area_of(path)  # raises where there is none
    for test in {test for area in AREAS for test in (*area.tests, *area.kernels)}:
        files, _, function = test.partition(" -k ")[0].partition("::")
        for path in files.split():
            assert f"def {function.partition('[')[0]}" in (ROOT / path).read_text(), test


@pytest.mark.soak
def test_what_is_called_no_mistake_is_found_in_the_sources():
    unused = {rule for rule in NO_MISTAKES if rule.reason}
    sources = {path: (ROOT / path).read_bytes() for path in package_files()}
    fields = record_fields(sources)
    for path, source in sources.items():
        lines = source.decode().splitlines()
        for mutant in mutants(path, source, fields):
            unused -= {rule for rule in unused if rule.covers(mutant, lines)}
    assert unused == {rule for rule in NO_MISTAKES if not rule.reason} == set()


def test_a_number_means_the_same_mutant_whatever_is_run_before():
    order, again = (in_order(ROOT, 5, ["choice"], []) for _ in range(2))
    assert order == again != in_order(ROOT, 6, ["choice"], [])
    one = CliRunner().invoke(main, ["--seed", "5", "--area", "choice", "--only", "7", "--list"]).output
    assert order[7][1].diff((ROOT / order[7][1].path).read_bytes()) in one
    assert "python -m tests.mutation --seed 5 --area 'choice' --only 7" in one


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_sample_of_mistakes_is_noticed(seed):
    """Of a random 24 about one may live, and a tenth is a gap in the tests."""
    command = [sys.executable, "-m", "tests.mutation", "--seed", str(seed), "--count", "24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout)
    mutants, killed = map(int, re.search(r"\*\*all\*\* \| (\d+) \| (\d+)", done.stdout).groups())
    assert mutants - killed <= max(2, mutants // 10), done.stdout
