"""What is installed and what is shipped."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="builds distributions")
pytest.importorskip("pybind11", reason="builds the tests of single units")

PROJECT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the project without what was built in it."""
    built = shutil.ignore_patterns("*.so", "__pycache__", ".pytest_cache", "build", "*.egg-info")
    return shutil.copytree(PROJECT, tmp_path / "project", ignore=built)


def setup(tree: Path, *command: str) -> None:
    """Run a setuptools command offline, with the tools that are installed here."""
    words = [sys.executable, "setup.py", "-q", *command]
    done = subprocess.run(words, cwd=tree, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def python_files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*.py")}


def test_the_package_and_its_plug_in_are_installed_and_nothing_else(tree, tmp_path):
    setup(tree, "build_py", "--build-lib", str(tmp_path / "lib"))
    assert python_files(tmp_path / "lib") == python_files(tree / "src")
    others = {path.name for path in (tmp_path / "lib").rglob("*") if path.is_file() and path.suffix != ".py"}
    assert others == {"py.typed", "intercept.c"}


def test_the_source_distribution_has_everything(tree, tmp_path):
    setup(tree, "sdist", "--dist-dir", str(tmp_path / "dist"))
    (archive,) = (tmp_path / "dist").glob("warpcheck-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert not {name for name in wanted - names if ".egg-info" not in name}


@pytest.mark.soak
def test_a_wheel_has_the_compiled_parts_and_no_tests(tree, tmp_path):
    setup(tree, "bdist_wheel", "--dist-dir", str(tmp_path / "dist"))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        compiled = {name.split(".")[0] for name in archive.namelist() if name.endswith((".so", ".pyd"))}
        archive.extractall(tmp_path / "site")
    assert compiled == {"warpcheck/machine/_core", "warpcheck/timing/_replay", "warpcheck/host/_intercept"}
    program = "import warpcheck.repository, warpcheck.timing._replay; print(warpcheck.repository.is_here())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path / "site",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert done.stdout.strip() == "False", done.stderr
