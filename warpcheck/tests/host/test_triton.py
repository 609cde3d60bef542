"""Triton's kernels: `@triton.jit` functions run unmodified inside `emulate`, and stored PTX of theirs without it."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from warpcheck.machine import interleavings
from warpcheck.scripts import run_script

from warpcheck import Emulated, emulate

FOLDER = Path(__file__).parents[1] / "warpcheck_cases" / "triton_ptx"
CHIPS = ("sm_80", "sm_90a", "sm_100a")
PRODUCT = {"sm_80": "mma.sync", "sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}


def stored(name: str, chip: str) -> tuple[str, int]:
    """The PTX, and the bytes of shared memory that it is launched with."""
    ptx = gzip.decompress((FOLDER / f"{name}_{chip}.ptx.gz").read_bytes()).decode()
    return ptx, int(ptx.split("\n", 1)[0].removeprefix("// shared "))


def reference(q, k, v) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    score = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    power = np.exp(score - score.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True) @ v


def close(got, want, steps: float = 4.0) -> None:
    """Within a few roundings to float16 of the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.abs(got - want).max() <= steps * 2**-11 * np.abs(want).max()


@pytest.mark.parametrize("chip", CHIPS)
def test_matmul_as_triton_compiled_it(chip, seed):
    ptx, shared = stored("matmul", chip)
    assert PRODUCT[chip] in ptx
    rng = np.random.default_rng(seed)
    a, b = (rng.normal(size=shape).astype(np.float16) for shape in ((128, 192), (192, 128)))
    c = np.full((128, 128), np.nan, np.float16)
    gpu = Emulated(chip, seeds=2)
    report = gpu.launch(ptx, grid=(1, 2), args=[a, b, c, 128, 192, None, None], smem_bytes=shared)
    close(c, a.astype(np.float64) @ b.astype(np.float64))
    assert not report.differs


@pytest.mark.parametrize("chip", CHIPS)
def test_attention_as_triton_compiled_it(chip, seed):
    ptx, shared = stored("attention", chip)
    assert PRODUCT[chip] in ptx
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(2, 128, 64)).astype(np.float16) for _ in range(3))
    out = np.full(q.shape, np.nan, np.float16)
    scale = 64**-0.5 * math.log2(math.e)
    gpu = Emulated(chip, seeds=2)
    gpu.launch(ptx, grid=(1, 2), args=[q, k, v, out, scale, 128, None, None], smem_bytes=shared)
    close(out, reference(q, k, v))


def test_a_missing_wait_in_them_is_found(seed):
    ptx, shared = stored("matmul", "sm_90a")
    broken = ptx.replace("cp.async.wait_group", "// cp.async.wait_group")
    assert broken != ptx
    a, b, c = (np.ones(shape, np.float16) for shape in ((128, 192), (192, 128), (128, 128)))
    gpu = Emulated("sm_90a", on_finding="collect", seed=seed)
    gpu.launch(broken, grid=(1, 2), args=[a, b, c, 128, 192, None, None], smem_bytes=shared)
    assert {"race", "cp-async-proxy"} & {finding.kind for finding in gpu.findings}


# With Triton.


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    from warpcheck_cases import triton_kernels

    return triton_kernels


@pytest.mark.parametrize("chip", CHIPS)
def test_jit_functions_run_unmodified(chip, kernels, seed, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with emulate(chip, seeds=2, tells_devices_apart=True) as gpu:
        device = kernels.triton.runtime.driver.active.get_active_torch_device()
        torch.manual_seed(seed)
        x, y = torch.randn(1000, device=device), torch.randn(1000, device=device)
        out = torch.empty_like(x)
        kernels.run_add(x, y, out)
        assert torch.equal(out, x + y)
        x = torch.randn(4, 300, device=device)
        out = torch.empty_like(x)
        kernels.run_softmax(x, out)
        torch.testing.assert_close(out, x.softmax(1))
        a, b = torch.randn(128, 128, device=device).half(), torch.randn(128, 64, device=device).half()
        c = torch.empty(128, 64, device=device, dtype=torch.float16)
        kernels.run_matmul(a, b, c)
        close(c.cpu(), a.cpu().double() @ b.cpu().double())
        q, k, v = (torch.randn(1, 128, 64, device=device).half() for _ in range(3))
        out = torch.empty_like(q)
        kernels.run_attention(q, k, v, out)
        close(out.cpu(), reference(q.cpu(), k.cpu(), v.cpu()))
    assert [launch.entry for launch in gpu.launches] == ["add", "softmax", "matmul", "attention"]
    assert any(PRODUCT[chip] in opcode for opcode in gpu.launches[-1].instructions)


def test_a_gpu_would_not_load_what_was_compiled_here(kernels, tmp_path, monkeypatch):
    """Triton's hook for stages, which the emulator uses, is part of its keys; outside it is as it was."""
    from triton import knobs

    before = knobs.runtime.add_stages_inspection_hook
    with emulate("sm_90a"):
        key, _ = knobs.runtime.add_stages_inspection_hook()
        assert "warpcheck" in key
    assert knobs.runtime.add_stages_inspection_hook is before


GLUON = Path(__file__).parents[1] / "warpcheck_cases" / "pairs" / "gluon_pairs.py"


@pytest.mark.parametrize("name", ["copy_unwaited", "load_unwaited", "load_phase", "store_source_in_use"])
@pytest.mark.parametrize("side", ["right", "wrong"])
def test_pairs_in_gluon(name, side, seed):
    """A kernel and the same one with a fault, which ConSan tells on an H100, too."""
    pytest.importorskip("triton.experimental.gluon")
    outcome = run_script([str(GLUON), name, side], "sm_90a", interleavings(seed, 6))
    assert outcome.launches and not outcome.exit_code
    assert ("race" in {finding.kind for finding in outcome.findings}) is (side == "wrong"), str(outcome.findings)
    assert side == "wrong" or not outcome.findings
