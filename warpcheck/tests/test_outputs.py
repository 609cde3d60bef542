"""Elements of named outputs that nobody wrote are a finding, whoever should have written them."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from warpcheck.cli import main
from warpcheck.errors import UnwrittenOutput
from warpcheck.machine import Checks
from warpcheck_cases.handwritten import entry

from warpcheck import Emulated


def rows_of(nbytes: int) -> str:
    """CTA c writes 32 words of row c: its 32 threads a word each."""
    return entry(
        f"""mul.wide.u32 %d0, %r1, {nbytes}; mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d1, %d0; add.s64 %d1, %a0, %d1;
        st.global.b32 [%d1], %r0;""", 1,
    )  # fmt: skip


ROWS = rows_of(128)
# Thread 0 writes 512 bytes by a bulk copy from shared memory, or adds to them by a bulk reduction.
BULK = """shl.b32 %r3, %r0, 4; add.u32 %r3, %r2, %r3; mov.b32 %r4, 1; st.shared.v4.b32 [%r3], {{%r4, %r4, %r4, %r4}};
    fence.proxy.async.shared::cta; bar.warp.sync -1; setp.ne.u32 %p0, %r0, 0; @%p0 bra DONE;
    {copy} [%a0], [%r2], {bytes}; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE:"""
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"


def findings(ptx: str, out, *, grid: int = 1, **options):
    gpu = Emulated("sm_100a", on_finding="collect", **options)
    gpu.launch(ptx, grid=grid, block=32, smem_bytes=4096, args=[out], outputs=[0])
    return gpu.findings


def test_rows_that_no_cta_writes() -> None:
    assert not findings(ROWS, np.zeros((4, 32), np.uint32), grid=4, seeds=3)
    (found,) = findings(ROWS, np.zeros((4, 32), np.uint32), grid=3, seeds=3)
    assert found.kind == "unwritten" and found.count == 3 and found.kernel == "test"
    assert found.message == (
        "argument 0, array 4x32 uint32: nobody wrote 32 of 128 elements, in 1 of 4 rows; "
        "the first is [3, 0], the last [3, 31]"
    )
    with pytest.raises(UnwrittenOutput, match="nobody wrote 64 of 128 elements"):
        Emulated("sm_100a").launch(ROWS, grid=2, block=32, args=[np.zeros((4, 32), np.uint32)], outputs=[0])
    assert not findings(ROWS, np.zeros((4, 32), np.uint32), grid=3, checks=Checks(off={"unwritten"}))


def test_several_launches_write_one_output() -> None:
    gpu = Emulated("sm_100a", on_finding="collect", seeds=2)
    out = np.zeros((8, 32), np.uint32)
    with gpu.must_write(out=out):
        gpu.launch(ROWS, grid=4, block=32, args=[out])
        gpu.launch(ROWS, grid=4, block=32, args=[out[4:]])
    assert not gpu.findings
    with gpu.must_write(out=out, first=out[:4]):
        gpu.launch(ROWS, grid=3, block=32, args=[out[4:]])
    assert [found.message.split(":")[0] for found in gpu.findings] == [
        "out, array 8x32 uint32", "first, array 4x32 uint32",
    ]  # fmt: skip
    gpu.take_findings()
    gpu.launch(ROWS, grid=3, block=32, args=[out])
    assert not gpu.findings, "behind the block nothing is asked"


@pytest.mark.parametrize("copy", [STORE, ADD], ids=["store", "reduction"])
def test_bulk_copies_write(copy: str) -> None:
    out = np.zeros(128, np.uint32)
    assert not findings(entry(BULK.format(copy=copy, bytes=512), 1), out)
    (found,) = findings(entry(BULK.format(copy=copy, bytes=496), 1), out)
    assert "nobody wrote 4 of 128 elements; the first is [124], the last [127]" in found.message


def test_what_lies_between_the_elements_is_not_asked_for() -> None:
    padded = np.zeros((3, 64), np.uint32)
    wide = rows_of(256)
    gpu = Emulated("sm_100a", on_finding="collect")
    with gpu.must_write(out=padded[:, :32], tensor=torch.from_numpy(padded.view(np.int32))[:, :32]):
        gpu.launch(wide, grid=3, block=32, args=[padded])
    assert not gpu.findings
    with gpu.must_write(out=padded):
        gpu.launch(wide, grid=3, block=32, args=[padded])
    (found,) = gpu.findings
    assert "nobody wrote 96 of 192 elements, in 3 of 3 rows" in found.message


def test_refusals_name_the_argument() -> None:
    gpu = Emulated("sm_100a")
    for error, message, tensor in (
        (TypeError, "out is a list, expected a NumPy array or a torch tensor", [1, 2]),
        (ValueError, r"out has the strides \(-4,\), expected none below 0", np.zeros(4, np.float32)[::-1]),
    ):
        with pytest.raises(error, match=message), gpu.must_write(out=tensor):
            pass
    with (
        pytest.raises(ValueError, match=r"must_write needs Checks\(races=True\)"),
        Emulated("sm_100a", checks=Checks(races=False)).must_write(out=np.zeros(4)),
    ):
        pass


def test_the_command_takes_outputs(tmp_path) -> None:
    (tmp_path / "rows.ptx").write_text(ROWS)
    words = ["ptx", str(tmp_path / "rows.ptx"), "--grid", "3", "--block", "32", "--arg", "u32[4x32]", "--seeds", "2"]
    assert CliRunner().invoke(main, words).exit_code == 0
    done = CliRunner().invoke(main, [*words, "--output", "0"])
    assert done.exit_code == 1 and "error [unwritten] argument 0, array 4x32 uint32: nobody wrote" in done.output
    done = CliRunner().invoke(main, [*words, "--output", "1"])
    assert done.exit_code == 1 and "--output is 1, and there are 1 --arg" in done.output
