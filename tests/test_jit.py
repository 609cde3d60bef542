"""The compile cache: one build per key, entries that survive a process, refusals that name the culprit."""

import os
import subprocess
import sys

import pytest
import torch

from fa4 import jit
from fa4.device import chip_by_number

pytest.importorskip("cutlass", reason="compiling kernels needs CuTe DSL, which is installed on Linux only")

_CHIP = chip_by_number(80)

# A process that compiles a two-line kernel through the cache and prints whether it had to build it.
_PROCESS = """
from fa4 import jit
from fa4.device import chip_by_number
import cutlass, cutlass.cute as cute

@cute.kernel
def scale(a: cute.Tensor, x: cutlass.Float32):
    i, _, _ = cute.arch.thread_idx()
    if i < a.shape[0]:
        a[i, 0] = a[i, 0] * x

@cute.jit
def host(a: cute.Tensor, x: cutlass.Float32, stream):
    scale(a, x).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

built = []
def build():
    built.append(1)
    a = jit.fake_tensor(cutlass.Float32, 2)
    return jit.compile_kernel(host, a, cutlass.Float32(0), jit.current_stream(), chip=chip)

chip = chip_by_number(80)
first = jit.compiled(("scale",), build, chip)
assert jit.compiled(("scale",), build, chip) is first
print("built" if built else "loaded")
"""


def _run(tmp_path) -> str:
    env = {**os.environ, "FA4_CACHE_DIR": str(tmp_path / "cache"), "FA4_CACHE": "1"}
    file = tmp_path / "process.py"
    file.write_text(_PROCESS)
    return subprocess.run(
        [sys.executable, str(file)], env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_second_process_compiles_nothing_and_a_broken_entry_is_replaced(tmp_path):
    assert _run(tmp_path) == "built"
    assert _run(tmp_path) == "loaded"
    (entry,) = (tmp_path / "cache").rglob("*.o")
    good = entry.read_bytes()
    entry.write_bytes(good[: len(good) // 2])
    assert _run(tmp_path) == "built"
    assert _run(tmp_path) == "loaded"


def test_one_build_per_key(monkeypatch):
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: None)
    built = []

    def build():
        built.append(1)
        return lambda: None

    first = jit.compiled(("k", 1, (torch.float16, None)), build, _CHIP)
    assert jit.compiled(("k", 1, (torch.float16, None)), build, _CHIP) is first
    assert len(built) == 1
    jit.compiled(("k", 2, (torch.float16, None)), build, _CHIP)
    jit.compiled(("k", 2, (torch.float16, None)), build, chip_by_number(90))
    assert len(built) == 3


def test_a_tensor_in_a_key_is_refused():
    with pytest.raises(TypeError, match=r"compile key holds Tensor"):
        jit.compiled(("k", (torch.tensor(3),)), lambda: None, _CHIP)


def test_a_directory_others_may_write_is_not_used(monkeypatch, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("FA4_CACHE_DIR", str(shared))
    jit.cache_directory.cache_clear()
    try:
        with pytest.warns(UserWarning, match="not yours alone"):
            assert jit.cache_directory() is None
    finally:
        jit.cache_directory.cache_clear()
