"""The emulator's C and C++ have no warning of the compiler, and none of its sanitizers."""

import shutil
import subprocess
import sys

import pytest
from warpcheck_cases.sanitized import PROJECT, environment


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_no_warning_and_nothing_for_the_sanitizers() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc is installed")
    done = subprocess.run(
        [sys.executable, "-m", "warpcheck_cases.sanitized"], cwd=PROJECT / "tests", capture_output=True, text=True
    )
    print(done.stdout[-8000:], done.stderr[-8000:])
    assert done.returncode == 0
    assert "no warning of the compiler" in done.stdout and " passed" in done.stdout


@pytest.mark.soak
def test_a_fault_would_be_told(tmp_path) -> None:
    """The sanitizers are on in the environment of those tests."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc is installed")
    source, library = tmp_path / "fault.c", tmp_path / "fault.so"
    source.write_text("#include <stdlib.h>\nint past(void) { volatile char *x = malloc(8); return x[8]; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-fsanitize=address", source, "-o", library], check=True)
    script = f"import ctypes; ctypes.CDLL({str(library)!r}).past()"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
