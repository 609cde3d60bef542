"""The pytest plug-in costs nothing until --emulate is given."""

import importlib.metadata
import subprocess
import sys

NOTHING = """
import sys

def test_nothing_is_loaded(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("warpcheck_pytest")
    assert not {name.partition(".")[0] for name in sys.modules} & {"warpcheck", "numpy", "torch"}
    rewritten = pytestconfig.pluginmanager.rewrite_hook._must_rewrite
    assert not [name for name in rewritten if name.startswith("warpcheck")], rewritten
"""


def test_the_plug_in_costs_nothing_until_it_is_asked_for(tmp_path):
    (tmp_path / "test_nothing.py").write_text(NOTHING)
    command = [sys.executable, "-m", "pytest", "-p", "warpcheck_pytest", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0 and "1 passed" in done.stdout


def test_the_registered_module_lies_outside_of_the_package():
    """A module of the package would import NumPy."""
    (entry_point,) = importlib.metadata.entry_points(group="pytest11", name="warpcheck_pytest")
    assert entry_point.value == "warpcheck_pytest"
