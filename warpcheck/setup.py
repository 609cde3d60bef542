"""The compiled parts. Without a C++17 compiler the build fails: nothing runs without them."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup

ParallelCompile("NPY_NUM_BUILD_JOBS").install()  # default: as many jobs as there are cores

WARNINGS = ["-Wall", "-Wextra"]  # `make sanitize` fails where the compiler has one

core = Pybind11Extension(
    "warpcheck.machine._core",
    sorted(glob("src/warpcheck/machine/core/*.cpp")),
    depends=sorted(glob("src/warpcheck/machine/core/*.hpp")),
    include_dirs=["src/warpcheck/machine/core"],
    cxx_std=17,
    extra_compile_args=["-O2", *WARNINGS, "-fno-math-errno", "-ffp-contract=off"],
)

# The clock of warpcheck.timing: it replays what the machine recorded.
replay = Pybind11Extension(
    "warpcheck.timing._replay",
    sorted(glob("src/warpcheck/timing/core/*.cpp")),
    depends=[
        *sorted(glob("src/warpcheck/timing/core/*.hpp")),
        "src/warpcheck/machine/core/recorder.hpp",
    ],
    cxx_std=17,
    extra_compile_args=["-O2", *WARNINGS],
)

# The CUDA runtime symbols that compiled host functions call, answered in Python.
intercept = Extension(
    "warpcheck.host._intercept",
    ["src/warpcheck/host/intercept.c"],
    extra_compile_args=WARNINGS,
)

setup(ext_modules=[core, replay, intercept])
