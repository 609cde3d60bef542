"""The first day's steps name tests and commands that exist; nothing else runs them where there is no such chip."""

import importlib.util
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.runtime import dispatch
from tests.gpu import first_day

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("step", first_day.STEPS, ids=lambda step: step.name)
def test_a_step_can_be_run(step):
    module = step.command[step.command.index("-m") + 1]
    assert importlib.util.find_spec(module), module
    assert step.backend in ("", *dispatch.backend_names())
    for word in step.command:
        if word.startswith("tests/"):
            path, _, name = word.partition("::")
            text = (ROOT / path).read_text()
            assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), word


def test_the_list_is_shown_where_there_is_no_chip():
    result = CliRunner().invoke(first_day.main, ["--list"])
    assert result.exit_code == 0 and result.output.index("environment") < result.output.index("times")
