"""A report that a stranger can act on: where, in what, and by which command again."""

import re
import shlex

import numpy as np
import pytest
from click.testing import CliRunner
from warpcheck.cli import main
from warpcheck.errors import Misaligned, OutOfBounds
from warpcheck.findings import Finding, Severity
from warpcheck.machine.names import plain
from warpcheck.telling import repeated
from warpcheck_cases.handwritten import entry, launch

from warpcheck import Emulated

# A store in a function that another one calls, twice, of which the kernel calls one at line 40 and one at line 50.
INLINED = """.loc 1 40 1
    .loc 2 7 3, function_name $L__info_string0, inlined_at 1 40 1
    .loc 3 9 5, function_name $L__info_string0, inlined_at 2 7 3
    st.shared.b32 [%r2], %r0;
    .loc 1 50 1
    .loc 2 7 3, function_name $L__info_string0, inlined_at 1 50 1
    .loc 3 9 5, function_name $L__info_string0, inlined_at 2 7 3
    st.shared.b32 [%r2+64], %r0;
    .loc 1 60 1
    ld.shared.b32 %r3, [%r2];"""
FILES = '.file 1 "kernel.cu"\n.file 2 "outer.cuh"\n.file 3 "inner.cuh"\n'


def test_inlined_calls_are_a_stack() -> None:
    gpu = Emulated("sm_100a", on_finding="collect")
    gpu.launch(entry(INLINED, 0) + FILES, grid=1, block=64, smem_bytes=256)
    stores = [finding for finding in gpu.findings if finding.location.line == 9]
    assert {finding.location.calls for finding in stores} == {
        (("outer.cuh", 7), ("kernel.cu", 40)), (("outer.cuh", 7), ("kernel.cu", 50)),
    }, "findings of the two calls are two"  # fmt: skip
    stores.sort(key=lambda finding: finding.location.calls)
    text = str(stores[0])
    assert "inner.cuh:9, inlined at outer.cuh:7, inlined at kernel.cu:40" in text
    others = [finding.others[0][1] for finding in gpu.findings] + [finding.location for finding in gpu.findings]
    assert all(place.calls == () for place in others if place.line == 60)
    assert stores[0].as_dict()["place"]["calls"] == [("outer.cuh", 7), ("kernel.cu", 40)]


# The compiler adds the lines before an instruction within its statement to the line of the statement.
ASSEMBLY = """.loc 1 30 12
    // begin inline asm
    {
    .loc 1 31 12
    st.shared.b32 [%r2], %r0;
    }
    // end inline asm
    bar.sync 0;
    .loc 1 40 12
    // begin inline asm
    .loc 1 41 12
    // end inline asm
    .loc 1 42 12
    ld.shared.b32 %r3, [%r2+128];
    st.shared.b32 [%r2], %r0;"""


def test_inline_assembly_is_at_the_line_of_its_statement() -> None:
    gpu = Emulated("sm_100a", on_finding="collect")
    gpu.launch(entry(ASSEMBLY, 0) + FILES, grid=1, block=64, smem_bytes=256)
    places = [
        place for finding in gpu.findings for place in (finding.location, *(place for _, place in finding.others))
    ]
    assert {place.line for place in places if place} == {30, 42}


def test_a_wait_of_cute_dsl_is_at_its_line() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    import inspect

    import torch
    from cutlass.cute.runtime import from_dlpack
    from warpcheck_cases import planted

    from warpcheck import emulate

    with emulate("sm_90a", on_finding="collect") as gpu:
        tensors = [from_dlpack(torch.zeros(planted.ROWS, planted.COLUMNS)) for _ in range(2)]
        planted.run_pipeline(*tensors, "deadlock")
    source = inspect.getsource(planted).splitlines()
    waits = [place for finding in gpu.findings for _, place in finding.others if place and "wait" in place.ptx_text]
    assert waits and all("mbarrier_wait" in source[place.line - 1] for place in waits)


def test_nvrtc_names_inlined_calls(nvrtc) -> None:
    source = """__device__ __forceinline__ void put(int* p, int v) {
        *p = v;
    }
    extern "C" __global__ void k(int* x) {
        __shared__ int s[64];
        put(s + threadIdx.x, 1);
        x[threadIdx.x] = s[threadIdx.x ^ 32];
    }"""
    gpu = Emulated("sm_90a", on_finding="collect")
    gpu.launch(nvrtc.compile_cuda(source, "sm_90a"), grid=1, block=64, args=[np.zeros(64, np.int32)])
    (race,) = (finding for finding in gpu.findings if finding.kind == "race")
    (store,) = (place for place in (race.location, race.others[0][1]) if "st.shared" in place.ptx_text)
    assert store.line == 2 and [line for _, line in store.calls] == [6]


# Warp 1 writes behind warp 0 in some orders only: where it is late, warp 0 reads zeros.
SHIFTED = """shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; st.shared.b32 [%r4], %r0; xor.b32 %r5, %r4, 128;
    ld.shared.b32 %r6, [%r5]; mul.wide.u32 %d0, %r0, 4; add.s64 %d1, %a0, %d0; ld.global.b32 %r7, [%d1];
    add.u32 %r6, %r6, %r7; st.global.b32 [%d1], %r6;"""


@pytest.fixture
def kernel(tmp_path):
    path = tmp_path / "a kernel.ptx"
    path.write_text(entry(SHIFTED, 1))
    return str(path)


@pytest.mark.parametrize("seeds", ["--seeds=5", "--seeds 5"])
def test_the_printed_command_repeats_the_order_on_the_same_data(kernel: str, seeds: str) -> None:
    words = ["ptx", kernel, "--block", "64", "--smem", "256", "--arg", "u32[64]", *seeds.split(), "--seed", "7"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1 and "5 orders" in done.output, done.output
    (command,) = re.findall(r"  repeat: (.*)", done.output)
    assert command.startswith("warpcheck ptx --seeds 1 --seed 7 --schedule random ") and command.count("--seed ") == 1
    again = CliRunner().invoke(main, shlex.split(command)[1:])
    assert again.exit_code == 1 and "1 order: found" in again.output, again.output
    assert re.findall(r"^error .*", again.output, re.M) == re.findall(r"^error .*", done.output, re.M)


def test_a_later_order_is_repeated_with_the_arrays_of_the_first() -> None:
    found = Finding("race", Severity.ERROR, "", seed=11, schedule="adversarial")
    words = ["ptx", "k.cu", "--seed=4", "--arg", "f32[8]", "--data-seed", "2"]
    assert repeated(words, found, 2) == (
        "warpcheck ptx --seeds 1 --seed 11 --schedule adversarial --data-seed 2 k.cu --arg 'f32[8]'"
    )
    words = ["run", "--schedule", "random", "--sms", "2", "--", "script.py", "--seed", "5"]
    assert repeated(words, found) == (
        "warpcheck run --seeds 1 --seed 11 --schedule adversarial --sms 2 -- script.py --seed 5"
    )


LETTERS = """setp.ne.u32 %p0, %r0, 0; mbarrier.init.shared.b64 [%r2+512], 1; bar.warp.sync -1;
    mbarrier.init.shared.b64 [%r2+520], 1; bar.warp.sync -1; @%p0 bra DONE; ld.global.b32 %r3, [%a0+512]; DONE:"""


def test_errors_come_first_and_letters_are_counted(tmp_path) -> None:
    (tmp_path / "k.ptx").write_text(entry(LETTERS, 1))
    words = ["ptx", str(tmp_path / "k.ptx"), "--block", "32", "--smem", "1024", "--arg", "u32[128]", "--seeds", "1"]
    text = CliRunner().invoke(main, words).output
    assert text.index("error [out-of-bounds]") < text.index("letter [barrier-init-lanes]")
    assert re.search(
        r"^letter \[barrier-init-lanes\] an mbarrier is initialised by many lanes: 2 places, 62 times; "
        r"first at ptx line \d+\n  --full prints each of them\n", text, re.M,
    ), text  # fmt: skip
    assert text.count("mbarrier.init of a live barrier") == 0 and "found 1 error, 2 letter" in text
    for more in ("--full", "--fail-on=letter"):
        text = CliRunner().invoke(main, [*words, more]).output
        assert text.count("mbarrier.init of a live barrier") == 2 and "prints each" not in text
        assert text.index("error [out-of-bounds]") < text.index("letter [barrier-init-lanes]")


def test_other_bytes_are_named(kernel: str) -> None:
    words = ["ptx", kernel, "--block", "64", "--smem", "256", "--arg", "u32[64]", "--seeds", "6"]
    text = CliRunner().invoke(main, words).output
    assert re.search(
        r"test leaves other bytes in \d of 6 orders; with seed \d, \w+: argument 0, array 64 uint32 \+ \d+\n", text
    ), text


NAMES = {
    "just behind": ("ld.global.b32 %r3, [%a0+512];", OutOfBounds, r"below is array 0, 512 bytes, overrun by 4$"),
    "far away": ("mov.b64 %d0, 4096; ld.global.b32 %r3, [%d0];", OutOfBounds, "at 0x1000, far from all of them$"),
    "misaligned": ("ld.global.b32 %r3, [%a0+6];", Misaligned, r"address array 0 \+ 6 is not a multiple of 4$"),
    "misaligned, shared": ("ld.shared.b32 %r3, [%r2+6];", Misaligned, "address 0x406 is not a multiple of 4$"),
}  # fmt: skip


@pytest.mark.parametrize("body, error, message", NAMES.values(), ids=NAMES)
def test_memory_is_named_by_tensor_and_offset(body: str, error, message: str) -> None:
    with pytest.raises(error) as caught:
        launch(body, [np.zeros(128, np.uint32)])
    assert re.search(message, caught.value.message), caught.value.message


def test_the_nearest_tensor_may_lie_above() -> None:
    memory = np.zeros(4096, np.uint32)
    with pytest.raises(OutOfBounds, match="the nearest above is array 0, which begins 8 bytes later"):
        launch("add.s64 %d0, %a0, -8; ld.global.b32 %r3, [%d0];", [memory[2048:]])


CUDA = """#include "factor.h"
extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR * EXTRA; }
"""


def test_macros_and_headers_go_to_the_compiler(nvrtc, tmp_path) -> None:
    (tmp_path / "k.cu").write_text(CUDA)
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "factor.h").write_text("#define FACTOR 3")
    words = ["ptx", str(tmp_path / "k.cu"), "--block", "4", "--arg", "f32[4]=ones", "--seeds", "1"]
    done = CliRunner().invoke(main, [*words, "-D", "EXTRA=7", "-I", str(tmp_path / "headers")])
    assert done.exit_code == 0 and "f32[4]=ones: 21, 21, 21, 21" in done.output, done.output
    done = CliRunner().invoke(main, [*words, "-DEXTRA=7"])
    assert done.exit_code == 1 and "pip install nvidia-cuda-runtime nvidia-cuda-cccl" in done.output
    (tmp_path / "k.ptx").write_text(entry("", 0))
    done = CliRunner().invoke(main, ["ptx", str(tmp_path / "k.ptx"), "--block", "32", "-D", "A"])
    assert done.exit_code == 1 and "-D and -I are for CUDA C++" in done.output


# Warps 1 to 3 wait for warp 0's arrival, warp 0 for warp 4's second arrival, which never comes. Warps 5 and 6 wait at a
# named barrier that warp 1 should reach.
CHAIN = """setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [%r2+512], 1;
    @!%p0 mbarrier.init.shared.b64 [%r2+520], 32; bar.sync 0;
    shr.u32 %r3, %r0, 5; setp.eq.u32 %p1, %r3, 0; @%p1 bra FIRST; setp.ge.u32 %p1, %r3, 5; @%p1 bra LAST;
    setp.eq.u32 %p1, %r3, 4; @%p1 bra FOURTH;
    W: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+512], 0; @!%p2 bra W; bra DONE;
    FIRST: A: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+520], 0; @!%p2 bra A;
    B: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+520], 1; @!%p2 bra B;
    @!%p0 mbarrier.arrive.shared.b64 _, [%r2+512]; bra DONE;
    FOURTH: mbarrier.arrive.shared.b64 _, [%r2+520]; bra DONE;
    LAST: bar.sync 1, 96; DONE:"""


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_a_deadlock_begins_with_its_root_and_tells_equal_waits_once(schedule: str) -> None:
    (found,) = launch(CHAIN, block=224, grid=2, schedule=schedule, seed=2, on_finding="collect").findings
    assert found.kind == "deadlock" and found.message.endswith("12 warps or parts of warps wait")
    texts = [text for text, _ in found.others]
    waits = [text for text in texts if text.startswith("waits")]
    assert len(waits) == 3, texts
    roots = waits.index(next(text for text in waits if "0x608" in text))
    assert "end of phase 1: 32 of 32 arrivals missing" in waits[roots]
    named = waits.index("waits at barrier 1: 64 of 96 threads have arrived")
    assert named == 2 and roots < named, "others wait elsewhere, so it is no root"
    history = dict(found.others)
    place = history["  its last arrival, in phase 0"]
    assert place.warp == 4 and history["  phase 0 was waited for"].warp == 0
    merged = [text for text in texts if text.startswith("  and so do")]
    assert sorted(text.count("warp ") for text in merged) == [1, 3, 5], texts
    assert all(history[text] is None for text in merged)


STATIC = """.shared .align 8 .b8 _ZZ6kernelPfE4full[16]; .shared .align 8 .b64 other; .shared .align 8 .b8 tile[4096];
    mov.b32 %r3, WHERE; setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [%r3+AT], 2; bar.sync 0;
    W: mbarrier.try_wait.parity.shared.b64 %p1, [%r3+AT], 0; @!%p1 bra W;"""


@pytest.mark.parametrize(
    "where, offset, name",
    [("_ZZ6kernelPfE4full", 0, "full"), ("_ZZ6kernelPfE4full", 8, "full + 8"), ("other", 0, "other"), ("tile", 8, "")],
)
def test_barriers_have_the_names_of_their_variables(where: str, offset: int, name: str) -> None:
    body = STATIC.replace("WHERE", where).replace("AT", str(offset))
    (found,) = launch(body, on_finding="collect").findings
    at = re.search(r"^waits on (.*?) of CTA 0", found.others[0][0])[1]
    assert re.fullmatch(rf"{re.escape(name)} \(mbarrier at 0x\w+\)" if name else r"the mbarrier at 0x\w+", at), at


def test_names_of_variables_of_functions() -> None:
    assert plain("_ZZ1kE4full") == "full" and plain("_ZZN1a3fooEvE5empty_0") == "empty"
    assert plain("_ZZ1kE4ful") == "_ZZ1kE4ful" and plain("tile") == "tile"


def test_many_equal_waits_are_counted() -> None:
    body = """setp.ne.u32 %p0, %r0, 0; @!%p0 mbarrier.init.shared.b64 [%r2], 1; bar.sync 0;
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra W;"""
    (found,) = launch(body, block=512, on_finding="collect").findings
    texts = [text for text, _ in found.others]
    assert len(texts) == 3 and texts[2].endswith("warp 8 of CTA 0, and 7 more"), texts
