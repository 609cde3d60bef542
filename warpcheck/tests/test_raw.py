"""PTX and CUDA C++ on an emulated chip with NumPy alone: arguments, refusals, the command, what is not imported."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from warpcheck.cli import main
from warpcheck.errors import DataRace, LaunchRefused, OutOfBounds
from warpcheck.machine.arguments import written

from warpcheck import Emulated

# y[i] = x[i] * factor + offset for i < n; warps read what others wrote to shared memory, reversed.
SCALE = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 .ptr .global .align 4 px, .param .u64 py, .param .f32 pfactor, .param .u16 poffset)
.reqntid 64
{
    .shared .align 4 .b8 tile[256];
    .reg .b64 %d<8>; .reg .b32 %r<8>; .reg .f32 %f<8>; .reg .b16 %h<2>;
    ld.param.u64 %d0, [px]; ld.param.u64 %d1, [py]; ld.param.f32 %f0, [pfactor]; ld.param.u16 %h0, [poffset];
    cvt.rn.f32.u16 %f3, %h0;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.s32 %r2, %r1, 64, %r0;
    mul.wide.u32 %d2, %r2, 4; add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2;
    ld.global.f32 %f1, [%d3]; fma.rn.f32 %f2, %f1, %f0, %f3;
    mov.b32 %r3, tile; shl.b32 %r4, %r0, 2; add.s32 %r5, %r3, %r4; sub.s32 %r6, %r3, %r4;
    st.shared.f32 [%r5], %f2;
    BARRIER
    ld.shared.f32 %f4, [%r6+252];
    st.global.f32 [%d4], %f4;
    ret;
}
"""
RIGHT, WRONG = SCALE.replace("BARRIER", "bar.sync 0;"), SCALE.replace("BARRIER", "")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def reversed_scale(x: np.ndarray) -> np.ndarray:
    once_rounded = (x.astype(np.float64) * 2.5 + 7).astype(np.float32)  # as fma does
    return once_rounded.reshape(-1, 64)[:, ::-1].reshape(-1)


def test_arrays_and_numbers_are_arguments(rng):
    x, y = rng.normal(size=128).astype(np.float32), np.zeros(128, np.float32)
    report = Emulated("sm_90a", seeds=3).launch(RIGHT, "scale", grid=2, args=[x, y, 2.5, 7])
    np.testing.assert_array_equal(y, reversed_scale(x))
    assert report.block == (64, 1, 1), "the entry's own .reqntid"
    assert not report.differs


def test_torch_tensors_and_views_are_arguments(rng):
    x, y = torch.from_numpy(rng.normal(size=192).astype(np.float32)), torch.zeros(192)
    Emulated("sm_90a").launch(RIGHT, grid=2, args=[x[64:], y[64:], np.float32(2.5), np.uint16(7)])
    np.testing.assert_array_equal(y[64:].numpy(), reversed_scale(x[64:].numpy()))
    assert not y[:64].any()


def test_findings_are_collected_in_all_orders(rng):
    emulated = Emulated("sm_90a", seeds=6, on_finding="collect")
    x = rng.normal(size=64).astype(np.float32)
    emulated.launch(WRONG, grid=1, args=[x, np.zeros_like(x), 1.0, 0])
    assert {finding.kind for finding in emulated.findings} >= {"race"}
    with pytest.raises(DataRace):
        Emulated("sm_90a").launch(WRONG, grid=1, args=[x, np.zeros_like(x), 1.0, 0])


def test_an_array_ends_where_it_ends():
    short = np.zeros(64, np.float32)
    with pytest.raises(OutOfBounds, match="argument 1, array 64 float32"):
        Emulated("sm_90a").launch(RIGHT, grid=2, args=[np.zeros(128, np.float32), short, 1.0, 0])


ARRAY = np.zeros(64, np.float32)
REFUSALS = {
    "count": (TypeError, r"3 arguments, expected 4: px \(\.u64\), py", [ARRAY, ARRAY, 1.0], {}),
    "array_for_number": (TypeError, "pfactor is a .f32 and no pointer", [ARRAY, ARRAY, ARRAY, 0], {}),
    "too_large": (TypeError, "65536, which does not fit the 16 bits of poffset", [ARRAY, ARRAY, 1.0, 65536], {}),
    "fraction": (TypeError, "argument 3 is 0.5", [ARRAY, ARRAY, 1.0, 0.5], {}),
    "bytes": (TypeError, "has 3 bytes, expected the 4 of pfactor", [ARRAY, ARRAY, bytes(3), 0], {}),
    "kind": (TypeError, "is a str", ["x", ARRAY, 1.0, 0], {}),
    "grid": (ValueError, "grid is 0", [ARRAY, ARRAY, 1.0, 0], {"grid": 0}),
    "entry": (ValueError, "expected one of scale", [ARRAY, ARRAY, 1.0, 0], {"entry": "other"}),
    "block": (LaunchRefused, r"says .reqntid \(64, 1, 1\), and is launched with \(32, 1, 1\)",
              [ARRAY, ARRAY, 1.0, 0], {"block": 32}),
}  # fmt: skip


@pytest.mark.parametrize("error, message, args, change", REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_argument(error, message, args, change):
    with pytest.raises(error, match=message):
        Emulated("sm_90a").launch(RIGHT, args=args, **{"grid": 1, **change})


def test_more_threads_than_maxntid_are_refused():
    with pytest.raises(LaunchRefused, match="maxntid"):
        Emulated("sm_90a").launch(
            RIGHT.replace(".reqntid", ".maxntid"), grid=1, block=(32, 3), args=[ARRAY, ARRAY, 1.0, 0]
        )


WRITTEN = {
    "i32[2x3]=arange": np.arange(6, dtype=np.int32).reshape(2, 3),
    "bf16[2]=ones": np.full(2, 0x3F80, np.uint16),
    "f64[3]=zeros": np.zeros(3),
    "0x10": 16,
    "u64=7": np.uint64(7),
    "-0.5": -0.5,
}


@pytest.mark.parametrize("text", WRITTEN)
def test_arguments_of_a_command_line(text, rng):
    got, want = written(text, rng), WRITTEN[text]
    assert np.array_equal(got, want) and np.asarray(got).dtype == np.asarray(want).dtype


@pytest.mark.parametrize("text", ["f32[", "q8[3]", "q8=3", "f32[3]=some", "three"])
def test_arguments_that_mean_nothing_are_refused(text, rng):
    with pytest.raises(ValueError, match="expected"):
        written(text, rng)


def test_the_command_tells_what_it_found(tmp_path):
    arguments = ["--grid", "2", *(f"--arg={arg}" for arg in ("f32[128]", "f32[128]=zeros", "2.5", "7"))]
    for name, text, code, told in (("right", RIGHT, 0, "no finding"), ("wrong", WRONG, 1, "error [race]")):
        (tmp_path / f"{name}.ptx").write_text(text)
        result = CliRunner().invoke(main, ["ptx", str(tmp_path / f"{name}.ptx"), *arguments, "--save", str(tmp_path)])
        assert result.exit_code == code, result.output
        assert told in result.output
    assert np.load(tmp_path / "1.npy").shape == (128,)


def test_neither_torch_nor_cute_dsl_is_needed(tmp_path):
    """As in an environment that has NumPy and click only."""
    (tmp_path / "right.ptx").write_text(RIGHT)
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "cutlass", "cuda", "tvm_ffi"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else found(name, package)
import warpcheck
from warpcheck.cli import main
main(sys.argv[1:])
"""
    words = ["ptx", str(tmp_path / "right.ptx"), "--arg=f32[64]", "--arg=f32[64]", "--arg=1.0", "--arg=0"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0 and "no finding" in done.stdout, done.stderr


CUDA = """extern "C" __global__ void reverse(const float* x, float* y, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    BARRIER
    y[threadIdx.x] = tile[63 - threadIdx.x];
}
"""


def test_cuda_runs_and_findings_name_its_lines(nvrtc, rng):
    x, y = rng.normal(size=64).astype(np.float32), np.zeros(64, np.float32)
    ptx = nvrtc.compile_cuda(CUDA.replace("BARRIER", "__syncthreads();"), "sm_90a")
    Emulated("sm_90a", seeds=3).launch(ptx, "reverse", grid=1, block=64, args=[x, y, 64])
    np.testing.assert_array_equal(y, x[::-1])
    emulated = Emulated("sm_90a", seeds=3, on_finding="collect")
    emulated.launch(nvrtc.compile_cuda(CUDA.replace("BARRIER", ""), "sm_90a"), grid=1, block=64, args=[x, y, 64])
    (race,) = (finding for finding in emulated.findings if finding.kind == "race")
    assert {race.location.line, race.others[0][1].line} == {3, 5}
    assert race.location.file.endswith("kernel.cu")


def test_the_log_of_nvrtc_is_the_error(nvrtc):
    with pytest.raises(nvrtc.CompilationError, match=r'kernel.cu\(1\): error: identifier "nothing"'):
        nvrtc.compile_cuda("__global__ void f() { nothing(); }", "sm_90a")
