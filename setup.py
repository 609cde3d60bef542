"""The compiled core of the emulator. A machine without a C++ compiler still gets everything else."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup

ParallelCompile("NPY_NUM_BUILD_JOBS").install()  # default: as many jobs as there are cores

WARNINGS = ["-Wall", "-Wextra"]  # `make sanitize` fails where the compiler has one

core = Pybind11Extension(
    "fa4.emulator.machine._core",
    sorted(glob("fa4/emulator/machine/core/*.cpp")),
    depends=sorted(glob("fa4/emulator/machine/core/*.hpp")),
    include_dirs=["fa4/emulator/machine/core"],
    cxx_std=17,
    extra_compile_args=["-O2", *WARNINGS, "-fno-math-errno", "-ffp-contract=off"],
    optional=True,
)

# The clock of fa4.emulator.timing: it replays what the machine recorded.
replay = Pybind11Extension(
    "fa4.emulator.timing._replay",
    sorted(glob("fa4/emulator/timing/core/*.cpp")),
    depends=[*sorted(glob("fa4/emulator/timing/core/*.hpp")), "fa4/emulator/machine/core/recorder.hpp"],
    cxx_std=17,
    extra_compile_args=["-O2", *WARNINGS],
    optional=True,
)

# The CUDA runtime symbols that compiled host functions call, answered in Python.
intercept = Extension(
    "fa4.emulator.host._intercept",
    ["fa4/emulator/host/intercept.c"],
    extra_compile_args=WARNINGS,
    optional=True,
)

setup(ext_modules=[core, replay, intercept])
