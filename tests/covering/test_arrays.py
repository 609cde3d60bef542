"""The committed arrays: they hold every allowed combination, and nothing else; for each chip every combination that its
own kernels take is in a row that they take."""

import itertools
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.covering import caches, calls, stamp
from tests.covering.arrays import ARRAYS, PAIRS
from tests.covering.landing import NUMBERS, landing
from tests.covering.model import CALLS, MODELS, Exclusion, Model, Row
from tests.covering.run import CHIPS, OWN, Outcome, Where


@pytest.mark.parametrize("name", ARRAYS)
def test_rows_are_of_the_model(name):
    array = ARRAYS[name]
    for number, row in enumerate(array.rows()):
        assert list(row) == list(array.model.factors), f"row {number}"
        assert all(level in array.model.factors[factor] for factor, level in row.items()), f"row {number}"
        assert array.model.allows(row), f"row {number} has an excluded combination"


@pytest.mark.parametrize("name", ARRAYS)
def test_every_allowed_combination_has_a_row(name):
    array = ARRAYS[name]
    assert not array.missing([*array.rows_beside(), *array.rows()])


@pytest.mark.parametrize("name", ARRAYS)
def test_regressions_have_a_row(name):
    array = ARRAYS[name]
    assert all(any(preset.items() <= row.items() for row in array.rows()) for preset in array.presets)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_pair_that_a_chips_own_kernels_take_has_such_a_row(chip, name):
    """If this fails after a change of the model, the chip needs a further array like "caches-sm100"."""
    own = replace(ARRAYS[name], model=ARRAYS[name].model.native(OWN[chip]), denser=())
    rows = [row for array in Where(chip).arrays for row in ARRAYS[array].rows()]
    assert not own.missing([row for row in rows if row.keys() == own.model.factors.keys() and own.model.has(row)])


@pytest.fixture
def one_thread():
    """Calls here are too small for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _rows_of(model: Model, draw: random.Random, **chosen: str) -> Iterator[Row]:
    """Random ones that it allows."""
    while True:
        row = {name: draw.choice(levels) for name, levels in model.factors.items()} | chosen
        if model.allows(row):
            yield row


@pytest.mark.rotates(2)
@pytest.mark.parametrize("chip", CHIPS)
def test_rows_get_the_backend_that_the_model_says(chip, seed, one_thread):
    """All rows of a chip's arrays, and random rows, get its own backend, except rows that `foreign` names."""
    draw, backend = random.Random(seed), OWN[chip]
    rows = [(ARRAYS[name].model, row) for name in Where(chip).arrays for row in ARRAYS[name].rows()]
    rows += [(model, row) for model in MODELS.values() for row in itertools.islice(_rows_of(model, draw), 100)]
    for model, row in rows:
        reasons = [exclusion for exclusion in MODELS[model.name].foreign[backend] if exclusion.holds(row)]
        if not reasons or not all(exclusion.by_seed for exclusion in reasons):
            call = draw.randrange(2**31)
            is_own = landing(model.name, row, call, NUMBERS[backend]) == backend
            assert is_own is not bool(reasons), f"seed {call}, {reasons}: {row}"


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("chip", CHIPS)
def test_a_pair_without_a_row_of_a_chips_own_kernels_gets_none(chip, name, seed, one_thread):
    """`foreign` is not too broad: no random row with a pair of levels that it leaves without rows gets the chip's own
    backend."""
    draw, model, backend = random.Random(seed), ARRAYS[name].model, OWN[chip]
    certain = [exclusion for exclusion in model.foreign[backend] if not exclusion.by_seed]
    own = replace(ARRAYS[name], model=replace(model, exclusions=(*model.exclusions, *certain)), denser=())
    rows = [row for row in ARRAYS[name].rows() if own.model.has(row)]
    lacking = replace(own, model=model).missing(rows)
    for pair in (pair for pair in lacking if not own.model.has_some(pair)):
        for row in itertools.islice(_rows_of(model, draw, **pair), 2):
            assert landing(model.name, row, draw.randrange(2**31), NUMBERS[backend]) != backend, row


def test_a_row_less_is_missed():
    """The tests of what is missing can fail."""
    array = ARRAYS["caches"]
    rows = array.rows()
    assert any(array.missing([*rows[:i], *rows[i + 1 :]]) for i in range(len(rows)))


@pytest.mark.parametrize(
    "name", ["caches", *(pytest.param(x, marks=pytest.mark.soak) for x in ARRAYS if x != "caches")]
)
@pytest.mark.timeout(3600)
def test_the_committed_rows_are_those_that_covertable_makes(name):
    pytest.importorskip("covertable", reason="covertable makes the arrays, and is installed with the extra [test]")
    assert ARRAYS[name].made() == ARRAYS[name].rows()


def _refused() -> list:
    named = [(model, exclusion) for model in MODELS.values() for exclusion in model.exclusions if exclusion.refusal]
    return [
        pytest.param(model, exclusion, id=f"{model.name}-{'-'.join(exclusion.levels)}") for model, exclusion in named
    ]


def _rows_with(exclusion: Exclusion, rows: list[Row]) -> list[Row]:
    """Rows that are changed to the excluded levels, and that nothing else excludes."""
    changed = [{**row, **{factor: levels[0] for factor, levels in exclusion.levels.items()}} for row in rows]
    others = [other for other in CALLS.exclusions if other is not exclusion]
    return [row for row in changed if not any(other.holds(row) for other in others)]


@pytest.mark.parametrize("model, exclusion", _refused())
def test_what_is_excluded_because_it_is_refused_is_refused(model, exclusion, seed):
    """By an error that names the arguments, before anything runs."""
    if model is not CALLS:
        rows, build = _caches_with(exclusion), caches.build
    else:
        rows, build = _rows_with(exclusion, ARRAYS["training"].rows()), calls.build
    assert rows
    for row in rows[:5]:
        with pytest.raises((ValueError, TypeError), match=exclusion.refusal):
            build(row, seed).run("torch" if row.get("form") != "compat" else "auto")


def _caches_with(exclusion: Exclusion) -> list[Row]:
    levels = {k: v[0] for k, v in exclusion.levels.items()}
    arrays = (ARRAYS[name] for name in ("caches", "caches-latent"))
    chosen = next(x for x in arrays if all(level in x.model.factors[factor] for factor, level in levels.items()))
    others = [other for other in chosen.model.exclusions if other is not exclusion]
    rows = ({**row, **levels} for row in chosen.rows())
    return [row for row in rows if not any(other.holds(row) for other in others)]


def test_a_note_names_the_commit_and_whether_files_differ_from_it(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        user = "-c", "user.name=x", "-c", "user.email=x@x"
        return subprocess.run(
            ["git", *user, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init")
    (tmp_path / "code.py").write_text("x = 1")
    git("add", ".")
    git("commit", "-m", "x")
    monkeypatch.setattr(stamp, "FILE", tmp_path / "stamp.json")
    commits = []
    for name, text in (("stamp.json", "{}"), ("code.py", "x = 2"), ("code.py", "x = 1"), ("other.py", "")):
        (tmp_path / name).write_text(text)
        rows = [Outcome(f"caches:{i}", 1, "right") for i in range(len(ARRAYS["caches"].rows()))]
        stamp.write("torch", 1, [*rows, Outcome("training:0", 1, "wrong")])
        notes = stamp.read()["torch"]
        assert set(notes) == {"caches"} and notes["caches"]["rows"] == {"right": len(rows)}
        commits.append(notes["caches"]["commit"])
    head = git("rev-parse", "--short=10", "HEAD").strip()
    assert commits == [head, f"{head}-dirty", head, f"{head}-dirty"]


@pytest.mark.parametrize(
    "chip, name", [(chip, name) for chip in ("torch", *CHIPS, "cuda") for name in Where(chip).arrays]
)
def test_the_note_of_the_last_whole_run(chip, name):
    """A note of another version of the array is stale, and is told so, but no failure."""
    note = stamp.read().get(chip, {}).get(name)
    again = f"make soak, or python -m tests.covering --array {name} --stamp"
    if note is None:
        pytest.skip(f"no whole run of {name} on {chip} is noted: {again}")
    assert note["commit"] and note["date"] and isinstance(note["seed"], int)
    assert len(note["wrong"]) == sum(count for status, count in note["rows"].items() if status != "right")
    if note["digest"] != ARRAYS[name].digest():
        pytest.skip(f"the run on {chip} of {note['date']} is of another version of {name}: {again}")
    assert not note["wrong"]
    assert sum(note["rows"].values()) == len(ARRAYS[name].rows())
