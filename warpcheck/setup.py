"""The compiled parts. Without a C++17 compiler the build fails: nothing runs without them.

Sources are compiled in groups, about one for each core, because half of what the compiler does for a file of the engine
are the headers that all of them have. NPY_NUM_BUILD_JOBS sets the number of jobs [default: the number of cores];
`pip install -v` shows each group when it is compiled.
"""

import itertools
import os
import sys
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

JOBS = "NPY_NUM_BUILD_JOBS"
WARNINGS = ["-Wall", "-Wextra"]  # `make sanitize` fails where the compiler has one
FLAGS = ["-O3", *WARNINGS, "-fno-math-errno", "-ffp-contract=off"]
MACHINE, TIMING = "src/warpcheck/machine/core", "src/warpcheck/timing/core"
HEADERS = sorted(glob(f"{MACHINE}/*.hpp"))

ParallelCompile(JOBS).install()


def extension(name: str, sources: list[str], flags: list[str]) -> Pybind11Extension:
    return Pybind11Extension(
        name, sources, depends=[*HEADERS, *sorted(glob(f"{TIMING}/*.hpp"))], cxx_std=17, extra_compile_args=flags
    )


engine = sorted(set(glob(f"{MACHINE}/*.cpp")) - {f"{MACHINE}/units_bindings.cpp"})
extensions = [
    extension("warpcheck.machine._core", engine, FLAGS),
    # The clock of warpcheck.timing: it replays what the machine recorded.
    extension("warpcheck.timing._replay", sorted(glob(f"{TIMING}/*.cpp")), ["-O2", *WARNINGS]),
    # The CUDA runtime symbols that compiled host functions call, answered in Python.
    Extension("warpcheck.host._intercept", ["src/warpcheck/host/intercept.c"], extra_compile_args=WARNINGS),
]
if "bdist_wheel" not in sys.argv:
    # What the engine calculates with, for tests of it alone: in a checkout, and in no wheel.
    units = [f"{MACHINE}/units_bindings.cpp", f"{MACHINE}/matmul.cpp"]
    extensions.append(extension("warpcheck.machine._units", units, ["-O1", *WARNINGS, "-ffp-contract=off"]))


def grouped(sources: list[str], groups: int, folder: Path) -> list[str]:
    """Files of about equal size that include the sources, the largest source first into the smallest file."""
    sizes, members = [0] * groups, [[] for _ in range(groups)]
    for source in sorted(sources, key=os.path.getsize, reverse=True):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += os.path.getsize(source)
        members[smallest].append(source)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, of_one in enumerate(filter(None, members)):
        files.append(folder / f"group_{number}.cpp")
        files[-1].write_text("".join(f'#include "{Path(source).absolute().as_posix()}"\n' for source in of_one))
    return list(map(str, files))


class Build(build_ext):
    """Groups the engine's sources, and tells what was compiled."""

    def build_extensions(self) -> None:
        engine = next(found for found in self.extensions if found.name.endswith("._core"))
        jobs = int(os.environ.get(JOBS) or os.cpu_count() or 1)
        engine.sources = grouped(engine.sources, min(max(jobs, 2), len(engine.sources)), Path(self.build_temp, "core"))
        compile_one = getattr(self.compiler, "_compile", None)  # which Microsoft's compiler does not have
        if compile_one is not None:
            total, done = sum(len(found.sources) for found in self.extensions), itertools.count(1)

            def compile_and_tell(obj, src, *rest):
                compile_one(obj, src, *rest)
                print(f"compiled {next(done)} of {total}: {src}", flush=True)

            self.compiler._compile = compile_and_tell
        super().build_extensions()


setup(ext_modules=extensions, cmdclass={"build_ext": Build})
