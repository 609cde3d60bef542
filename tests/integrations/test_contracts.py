"""The page of what serving engines may ask for, and what finds a method that an engine cannot call."""

from pathlib import Path

import pytest

from tests.integrations import contracts
from tests.integrations.contracts import page
from tests.integrations.contracts.sglang import COLUMNS

ROOT = Path(__file__).parents[2]


def test_the_page_is_written_from_the_contracts():
    assert page.text() == page.PAGE.read_text()


def test_each_reason_is_of_a_refusal():
    """A reason that no refused value of a column has would be a claim without effect."""
    needed = set()
    for kind, verdicts in contracts.load("vllm")["verdicts"].items():
        for column, values in verdicts.items():
            for value in (value for value, refused in values.items() if refused):
                keys = [(key, of) for key in (f"{column}={value}", column) for of in (kind, None)]
                needed.add(next(key for key in keys if key in page.WHY))
    assert needed == set(page.WHY)


@pytest.mark.parametrize("test", [why for _, yes, why in COLUMNS if yes])
def test_a_yes_has_a_test(test):
    path, name = test.split("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def method(*names, kind="method", abstract=False, **defaults):
    listed = [
        {"name": name, "kind": "POSITIONAL_OR_KEYWORD"} | ({"default": defaults[name]} if name in defaults else {})
        for name in ("self", *names)
    ]
    return {"kind": kind, "parameters": listed} | ({"abstract": True} if abstract else {})


def found(contract, **methods):
    for made in methods.values():
        function = getattr(made, "__func__", made)
        function.__module__ = "fa4.test"
    return contracts.differences({"methods": contract}, type("Ours", (), methods))


def test_differences_are_found():
    one = {"run": method("a", "b", b=None)}
    assert found(one, run=lambda self, a, b=1: 0) == []
    assert found(one, run=lambda self, a, b=1, c=2: 0) == []
    assert found(one, run=lambda self, a, **more: 0) == []
    assert found(one, run=lambda self, b, a: 0)[0] == "Ours.run takes ['b', 'a'], expected ['a', 'b']"
    assert found(one, run=lambda self, a: 0) == ["Ours.run takes ['a'], expected ['a', 'b']"]
    assert found(one, run=lambda self, a, b=1, *, c: 0) == ["Ours.run requires c, which the engine does not pass"]
    assert found(one, run=lambda self, a, b: 0) == ["Ours.run requires b, which the engine may leave out"]
    assert found(one, run=staticmethod(lambda a, b=1: 0)) == ["Ours.run is a staticmethod, expected a method"]
    assert found({"run": method(abstract=True)}) == ["Ours has no run"] and found({"run": method()}) == []
