"""The microbenchmarks of `bench.calibrate` compute what they say, on the emulated chip, and time what they say."""

import re
from collections import Counter

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.host.modules import fatbins_in
from warpcheck.timing.sass import code
from warpcheck_cases.requirements import needs_nvdisasm

from bench.calibrate import issue, launch, run, skeletons
from bench.calibrate.frame import compile_bench
from fa4.emulator import emulate
from fa4.runtime import jit
from fa4.runtime.device import chip_by_number

# One of each kind; the soak runs the others.
FAST = {
    "issue ex2", "issue shfl", "mbarrier", "named barrier", "registers, shared memory, registers, 1 KiB",
    "bulk load, one at a time", "bulk stores", "atomic adds", "barrier of a cluster of 2",
    "loads of a cluster's shared memory", "bulk copies to the other CTA and back",
    "wgmma m64n8k16, A from shared memory", "wgmma m64n8k16, A from registers", "launch of one CTA for each SM",
}  # fmt: skip
CASES = [
    pytest.param(number, bench, id=f"{number}-{bench.name}", marks=() if is_fast else pytest.mark.soak)
    for number in (90, 100)
    for bench in run.offered(chip_by_number(number))
    for is_fast in [(number == 90 and bench.name in FAST) or bench.name == "issue fma2"]
]


@pytest.mark.parametrize(("number", "bench"), CASES)
def test_data_are_right_and_every_section_is_timed(number, bench):
    chip = chip_by_number(number)
    sms = max(2, bench.cluster)
    with emulate(chip.target, sms=sms):
        outcome = run.launch_bench(bench, chip, torch.device("cpu"), sms)
    rows = list(run.rows(bench, outcome))
    assert len(rows) == len(bench.sections) * (1 + bench.notes.get("first", False)) or bench in launch.BENCHES
    if bench not in launch.BENCHES:
        assert (outcome.times[:, 0] > 0).all(), "a section wrote no clocks"
        assert all(row.q25 <= row.median <= row.q75 for row in rows)


def test_kernels_that_were_compiled_in_emulation_are_kept_as_such(tmp_path, monkeypatch):
    """A benchmark names the chip of a GPU: its kernel was linked for one, and the next process could not load it."""
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    bench, chip = next(bench for bench in run.BENCHES if bench.name == "issue ex2"), chip_by_number(90)
    for _ in range(2):
        monkeypatch.setattr(jit, "_launchers", {})
        with emulate(chip.target, sms=2):
            run.launch_bench(bench, chip, torch.device("cpu"), 2)
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix in (".o", ".so")] == [".o"]


def test_names_are_different():
    assert [name for name, n in Counter(bench.name for bench in run.BENCHES).items() if n > 1] == []


def test_times_of_grids_by_hand():
    # Two SMs, two CTAs each: SM 5 has the first and the third.
    sms = torch.tensor([5, 6, 5, 6]).reshape(1, 4, 1, 1)
    ends = torch.tensor([[[0, 100, 0, 200], [0, 130, 0, 210], [0, 240, 0, 300], [0, 260, 0, 300]]])
    assert launch.nanoseconds(launch.REPLACE, sms, ends) == {"from an SM's CTA to its next": [40.0, 50.0]}
    # Two grids of two CTAs: the second begins 30 after the first has ended.
    ends = torch.tensor([[[0, 100, 0, 200], [0, 130, 0, 210]], [[0, 240, 0, 300], [0, 250, 0, 300]]])
    found = launch.nanoseconds(launch.PLAIN, sms.reshape(2, 2, 1, 1), ends)
    assert found["from the first CTA's start to the last's"] == [30.0, 10.0]
    assert found["from a grid's end to the next's start"] == [30.0]


def test_skeletons_are_not_taken_from_the_whole_kernels_cache(tmp_path, monkeypatch):
    """Where a process kept its kernels was asked once, and the whole kernel, which has the same key, ran instead."""
    monkeypatch.setattr(skeletons.tempfile, "gettempdir", lambda: str(tmp_path))
    whole = jit.cache_directory()
    with skeletons.without((skeletons.SOFTMAX,)):
        lacking = jit.cache_directory()
        assert lacking != whole and tmp_path in lacking.parents
    assert jit.cache_directory() == whole


@needs_nvdisasm
@pytest.mark.parametrize("name", ["ex2", "shfl", *(pytest.param(n, marks=pytest.mark.soak) for n in issue.OPERATIONS)])
def test_between_two_clocks_stand_the_instructions_that_are_counted(name, tmp_path, monkeypatch):
    """Equal chains would become one, and unused ones none: the compiler is good at this."""
    monkeypatch.setattr(jit, "cache_directory", lambda: None)  # what comes from a disk has no machine code to show
    monkeypatch.setattr(jit, "_launchers", {})
    operation = issue.OPERATIONS[name]
    chip = chip_by_number(100 if operation.chips == ("sm_100a",) else 90)
    (bench,) = [bench for bench in issue.BENCHES if bench.name == f"issue {name}"]
    launcher, _ = compile_bench(bench, chip, 2)
    launcher.export_to_c(str(tmp_path / "kernel.o"), "kernel")
    (binary,) = fatbins_in((tmp_path / "kernel.o").read_bytes())
    (function,) = code.functions(code.cubin_in(binary)).values()
    listing = "\n".join(f"{i.opcode} {i.operands}" for i in function.instructions)
    stretches = re.split(r"SR_CLOCK\w+", listing)
    # A few make addresses.
    counts = [n for stretch in stretches if (n := stretch.count(f"\n{operation.machine}")) > issue.CHAIN // 8]
    assert counts == [issue.CHAIN] + [2 * issue.CHAINS * issue.STEPS] * len(issue.WARPS)  # twice, unrolled
