"""docs/emulator-quickstart.md: what it shows is what its commands print, and the repair that it shows repairs."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from warpcheck.cli import main
from warpcheck_cases.printed import command_of, comparable, shown

pytestmark = pytest.mark.usefixtures("nvrtc")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "emulator-quickstart.md").read_text()
FOLDER = "examples/emulator/"
EXAMPLE = ROOT / FOLDER / "scale.cu"


def test_the_kernel_of_the_page_is_the_example():
    assert EXAMPLE.read_text().endswith(shown(PAGE, "kernel", "cuda"))


@pytest.mark.parametrize("state", ["mistake", "repaired"])
def test_the_road(state: str, tmp_path, monkeypatch):
    text = EXAMPLE.read_text()
    lines = shown(PAGE, "repair", "diff").splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    assert text.count(before) == 1
    if state == "repaired":
        text = text.replace(before, "\n".join(line[1:] for line in lines))
    script = tmp_path / "examples" / "emulator" / "scale.cu"
    script.parent.mkdir(parents=True)
    script.write_text(text)
    monkeypatch.chdir(tmp_path)
    words, told = command_of(shown(PAGE, f"road: {state}", "text"))
    result = CliRunner().invoke(main, words)
    print(result.output)
    assert comparable(result.output, FOLDER, "cu") == comparable(told, FOLDER, "cu")
    assert result.exit_code == (state == "mistake")


def test_the_program_of_the_page(monkeypatch):
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], names)
    assert [finding.kind for finding in names["gpu"].findings] == ["proxy-fence"]
    assert (names["y"] == 3 * names["x"]).all()
