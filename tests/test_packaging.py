"""What is installed and what is shipped: one package without compiled parts; a source distribution with everything."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="builds distributions")

ROOT = Path(__file__).parents[1]
SHIPPED = (".ci", "fa4", "warpcheck", "tests", "bench", "docs", "examples", "pyproject.toml", "MANIFEST.in",
           "Makefile", "noxfile.py", "constraints.txt", "README.md", "LICENSE", "mkdocs.yml", "CHANGELOG.md",
           "CONTRIBUTING.md", "SECURITY.md")  # fmt: skip


# A setup.py that says nothing, which ends with every thread's stack after so many seconds.
_WATCHED = """
import faulthandler, sys
faulthandler.dump_traceback_later(240, exit=True)
sys.argv[0] = "setup.py"
sys.path.insert(0, "")
from setuptools import setup
setup()
"""


@pytest.mark.parametrize("folder", [".", "warpcheck"])
def test_no_python_is_promised_that_is_not_required(folder):
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    minors = sorted(int(text.removeprefix(prefix)) for text in project["classifiers"] if text.startswith(prefix))
    assert project["requires-python"] == f">=3.{minors[0]}" and minors == [*range(minors[0], minors[-1] + 1)]


def test_addresses_of_the_project_stand_in_one_place():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    host = urls["Homepage"]
    assert all(url.startswith(host) for url in urls.values())
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.yml"), *ROOT.glob("*/pyproject.toml")]
    assert not [str(path) for path in pages if host in path.read_text()]


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the checkout without what was built in it."""
    root = tmp_path / "checkout"
    root.mkdir()
    built = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=built)
        else:
            shutil.copy(source, root / name)
    return root


def setup(tree: Path, *command: str) -> None:
    """Run a setuptools command offline, with the tools that are installed here. One hung once, nobody saw why: it gets
    nothing to read, and a time after which it tells where it stands."""
    command_line = [sys.executable, "-c", _WATCHED, "-q", *command]
    result = subprocess.run(command_line, cwd=tree, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def python_files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*.py")}


def test_one_package_is_installed(tree, tmp_path):
    """Every module of fa4, and no top-level package `bench`, `tests` or `warpcheck`."""
    setup(tree, "build_py", "--build-lib", str(tmp_path / "lib"))
    installed = tmp_path / "lib"
    assert [path.name for path in installed.iterdir()] == ["fa4"]
    assert python_files(installed / "fa4") == python_files(tree / "fa4")
    assert (installed / "fa4" / "py.typed").exists()


def test_the_source_distribution_is_a_checkout(tree, tmp_path):
    setup(tree, "sdist", "--dist-dir", str(tmp_path / "dist"))
    (archive,) = (tmp_path / "dist").glob("fa4_kernels-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {
        str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file() and ".egg-info" not in str(path)
    }
    assert not wanted - names
    assert not [name for name in names if name.endswith(".so")]


def test_a_wheel_is_built_without_a_compiler(tree, tmp_path):
    """The emulator's compiled parts are warpcheck's: this wheel is for every platform."""
    setup(tree, "bdist_wheel", "--dist-dir", str(tmp_path / "dist"))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"fa4", wheel.name.rsplit("-", 3)[0] + ".dist-info"}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_wheel_works_and_the_source_distributions_tests_run(tree, tmp_path):
    """Tests that are unpacked elsewhere run against the installed package, and warpcheck as it is installed here."""
    setup(tree, "sdist", "--dist-dir", str(tmp_path / "dist"), "bdist_wheel", "--dist-dir", str(tmp_path / "dist"))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    shutil.copytree(tmp_path / "site" / "fa4", source / "fa4", dirs_exist_ok=True)
    tests = ["tests/test_dispatch.py", "tests/test_cli.py", "tests/test_bench.py", "tests/sm80/test_emulated.py"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=source,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:]
