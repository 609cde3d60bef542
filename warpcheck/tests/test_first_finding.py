"""From a PTX text to a finding and its repair, where neither torch nor CuTe DSL is installed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from warpcheck.cli import main
from warpcheck.errors import DataRace
from warpcheck_cases.printed import command_of, comparable, shown

from warpcheck import Emulated

# y[i] = x[63 - i], by way of shared memory. Two warps: each reads what the other one wrote.
REVERSE = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry reverse(.param .u64 x, .param .u64 y)
{
.shared .align 4 .b8 tile[256];
.reg .b32 %r<6>; .reg .b64 %d<5>;
ld.param.u64 %d0, [x]; ld.param.u64 %d1, [y];
mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4;
add.s64 %d3, %d0, %d2; ld.global.b32 %r1, [%d3];
mov.b32 %r2, tile; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3;
st.shared.b32 [%r4], %r1;
BARRIER
sub.u32 %r4, 252, %r3; add.u32 %r4, %r2, %r4; ld.shared.b32 %r5, [%r4];
add.s64 %d4, %d1, %d2; st.global.b32 [%d4], %r5;
ret;
}
"""
WRONG, RIGHT = REVERSE.replace("BARRIER", ""), REVERSE.replace("BARRIER", "bar.sync 0;")


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(64, dtype=np.float32), np.zeros(64, np.float32)


def test_a_race_is_found_and_its_repair_ends_it():
    x, y = arrays()
    gpu = Emulated("sm_90a", seeds=5, on_finding="collect")
    gpu.launch(WRONG, grid=1, block=64, args=[x, y])
    (found,) = (finding for finding in gpu.findings if finding.kind == "race")
    assert {found.location.warp, found.others[0][1].warp} == {0, 1} and "barrier" in found.repair
    gpu = Emulated("sm_90a", seeds=5)
    gpu.launch(RIGHT, grid=1, block=64, args=[x, y])
    assert not gpu.findings
    np.testing.assert_array_equal(y, x[::-1])


def test_the_first_error_is_raised_by_default():
    with pytest.raises(DataRace):
        Emulated("sm_90a", seeds=5).launch(WRONG, grid=1, block=64, args=arrays())


@pytest.mark.parametrize(
    "text, code, told", [(WRONG, 1, "error [race]"), (RIGHT, 0, "no finding")], ids=["wrong", "right"]
)
def test_the_command_tells_it(text, code, told, tmp_path):
    path = tmp_path / "reverse.ptx"
    path.write_text(text)
    done = CliRunner().invoke(main, ["ptx", str(path), "--block", "64", "--arg=f32[64]=arange", "--arg=f32[64]"])
    assert done.exit_code == code and told in done.output, done.output


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "cutlass", "cuda", "tvm_ffi", "triton", "fa4", "rich", "pybind11"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from warpcheck.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["--help", "ptx", "kinds", "timing --help", "mutate --help", "compare --help"])
def test_neither_torch_nor_cute_dsl_is_needed(command, tmp_path):
    path = tmp_path / "reverse.ptx"
    path.write_text(RIGHT)
    words = [str(path), "--block=64", "--arg=f32[64]", "--arg=f32[64]"] if command == "ptx" else []
    program = [sys.executable, "-c", WITHOUT, *command.split(), *words]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert command != "ptx" or "no finding" in done.stdout


@pytest.mark.parametrize("command", ["run", "timing"])
def test_commands_for_scripts_say_that_they_need_torch(command, tmp_path):
    (tmp_path / "script.py").write_text("")
    absent = WITHOUT.replace(
        "from warpcheck.cli",
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name: None if name == 'torch' else found(name)\nfrom warpcheck.cli",
    )
    words = [sys.executable, "-c", absent, command, "--", str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "scripts need torch" in done.stderr, done.stderr


def test_mutants_of_a_recorded_launch_are_judged_with_numpy_alone(tmp_path):
    """The barrier is needed; a mutant of it is killed by a race."""
    from warpcheck.tools.recording import Recording

    x, y = arrays()
    after = x[::-1].tobytes()
    Recording(
        "reverse", "sm_90a", RIGHT, "reverse", (1, 1, 1), (64, 1, 1), (1, 1, 1), 0,
        tuple(base.to_bytes(8, "little") for base in (4096, 8192)), (4096, 8192), ("x", "y"),
        (x.tobytes(), y.tobytes()), (x.tobytes(), after),
    ).save(tmp_path / "reverse.npz")  # fmt: skip
    program = [sys.executable, "-c", WITHOUT, "mutate", str(tmp_path / "reverse.npz"), "--seeds=2"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| CTA barrier | 1 | 1 | DataRace" in done.stdout, done.stdout


README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.fixture
def readme_kernel(nvrtc, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "reverse.cu"
    path.write_text(shown(README, "kernel"))
    return path


def test_the_readme_shows_what_its_command_prints(readme_kernel):
    words, told = command_of(shown(README, "run"))
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1 and comparable(done.output, "reverse.cu", "cu") == comparable(
        told, "reverse.cu", "cu"
    ), done.output
    lines = shown(README, "kernel").splitlines(keepends=True)
    readme_kernel.write_text("".join([*lines[:3], "__syncthreads();\n", *lines[3:]]))
    assert CliRunner().invoke(main, words).exit_code == 0


def test_the_program_of_the_readme(readme_kernel):
    names: dict = {}
    exec(shown(README, "python"), names)
    assert {finding.kind for finding in names["gpu"].findings} == {"uninitialized", "race"}
