"""Build the emulator's C and C++ with AddressSanitizer and UndefinedBehaviorSanitizer, and test that build:

    PYTHONPATH=warpcheck/tests python -m warpcheck_cases.sanitized [PYTEST ARGUMENTS]

The build lies in build/sanitized, with a copy of the package. A warning of the compiler is an error. Tests of CuTe
DSL's kernels are left out: the compiler is not built for the sanitizers, and takes minutes under them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PROJECT = ROOT / "warpcheck"
BUILD = ROOT / "build" / "sanitized"
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")  # the last one, so that exceptions are caught
# Hand-written PTX and the units by themselves.
TESTS = [
    *(f"machine/test_{name}.py" for name in (
        "engine_async", "engine_control", "findings", "fuzz", "grid_dependency", "hand_overs", "modifiers", "opcodes",
        "races", "residency",
    )),
    "host/test_tensor_map.py", "timing/test_record.py", "timing/test_replay.py", "units",
]  # fmt: skip


def build() -> str:
    """What the compiler printed. Raises CalledProcessError if it fails."""
    folders = ["--build-base", str(BUILD / "temp"), "--build-lib", str(BUILD / "lib")]
    command = [sys.executable, "setup.py", "build", *folders]
    environment = {**os.environ, "CFLAGS": FLAGS, "LDFLAGS": FLAGS}
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        print(done.stdout[-4000:])
    done.check_returncode()
    return done.stdout


def environment() -> dict[str, str]:
    """In which Python loads the build: the sanitizers come first, and Python's own leaks are none of theirs."""
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in LIBRARIES
    ]
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": f"{BUILD / 'lib'}:{PROJECT / 'tests'}",
    }


def test(arguments: list[str]) -> int:
    """The exit code of the tests on the build."""
    options = ["-q", "-n0", "-m", "not soak and not gpu", "-p", "no:cacheprovider", "-p", "warpcheck_cases.sanitized"]
    options += ["-o", f"pythonpath={BUILD / 'lib'} tests"]
    command = [
        str(Path(sys.executable).with_name("pytest")),
        *options,
        *(arguments or [f"tests/{name}" for name in TESTS]),
    ]
    return subprocess.run(command, cwd=PROJECT, env=environment()).returncode


def pytest_sessionfinish(session: Any) -> None:
    """Were the tests those of the build?"""
    if not Path(sys.modules["warpcheck.machine._core"].__file__ or "").is_relative_to(BUILD):
        session.exitstatus = 3


def main() -> int:
    printed = build()
    warnings = re.findall(r"^\S+\.(?:cpp|hpp|c):\d+:.*warning: .*", printed, re.M)
    print("\n".join(warnings) or "no warning of the compiler")
    return test(sys.argv[1:]) or int(bool(warnings))


if __name__ == "__main__":
    sys.exit(main())
