"""What an H100 counted beside what the clock says: the law of wgmma, profiles as rows, rows as a page."""

import json

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.timing.chips import chip_table

from bench.calibrate import compared, gemm, kernels, replayed, run
from tests.timing.test_predict import needs_machine_code

MICROBENCHMARKS = compared.RESULTS / "2026-11-22_nvidia-h100-80gb-hbm3_calibrate.jsonl"
MIXED = compared.RESULTS / "2026-11-23_nvidia-h100-80gb-hbm3_calibrate-mixed.jsonl"


def replayed_and_measured(name, file, folder):
    """Section -> clocks, as the replay gives them and as an H100 took them."""
    (bench,) = [bench for bench in run.BENCHES if bench.name == name]
    rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    measured = {row["section"]: row["median"] for row in rows if row["bench"] == name}
    return replayed.sections(bench, chip_table("sm_90a"), folder), measured


@needs_machine_code
@pytest.mark.parametrize("name", ["wgmma m64n64k16, A from registers", "wgmma m64n64k16, A from shared memory"])
def test_a_batch_of_wgmma_takes_what_was_measured(name, tmp_path):
    found, measured = replayed_and_measured(name, MICROBENCHMARKS, tmp_path)
    assert found == pytest.approx(measured, rel=0.02)


@needs_machine_code
@pytest.mark.parametrize("name", ["2 max after each 1", "2 fma after each 1", "1 ex2 after each 2"])
def test_arithmetic_between_products_of_mma_sync_comes_on_top(name, tmp_path):
    found, measured = replayed_and_measured(f"mma.sync m16n8k16 of new operands, {name}", MIXED, tmp_path)
    assert found == pytest.approx(measured, rel=0.06)
    assert found["2 warps a scheduler"] == pytest.approx(measured["2 warps a scheduler"], rel=0.03)


def profile(cases):
    """As Nsight Compute writes it around the output of `kernels.launch`. cases: label -> cycles of its launches, and of
    the forward that is there for the backward after it."""
    header = ("ID", "Kernel Name", "Block Size", "Metric Name", "Metric Value")
    lines = [*(f"case {label}" for label in cases), ",".join(f'"{name}"' for name in header)]
    number = 0
    for cycles in cases.values():
        for threads, value in ((32, 0), *((256, value) for value in cycles)):
            for metric in kernels.METRICS.values():
                lines.append(f'"{number}","kernel {value}","({threads}, 1, 1)","{metric}","{value:,}"')
            number += 1
    return "\n".join(lines)


def test_a_profile_becomes_rows_of_each_call():
    forward, backward = (f"sm90 {way} d128 full b4 h16 4096 bfloat16, table" for way in ("fwd", "bwd"))
    rows = list(kernels.read(profile({forward: [1500, 7], backward: [100, 4000, 200]})))
    assert [(row.direction, row.number, row.kernels, row.active) for row in rows] == [
        ("fwd", 0, 1, 1500), ("bwd", 0, 3, 100), ("bwd", 1, 3, 4000), ("bwd", 2, 3, 200),
    ]  # fmt: skip


def test_a_profile_of_other_launches_is_refused():
    text = profile({"sm90 fwd d128 full b4 h16 4096 bfloat16, table": [1500]})
    with pytest.raises(ValueError, match="1 marks in the profile of 2 cases"):
        list(kernels.read("case another\n" + text))


def test_orders_of_variants_by_hand():
    def pair(label, variant, measured, predicted):
        return compared.Pair(("sm90", label, variant), measured, predicted)

    found = [
        pair("a", "x", 100, 90), pair("a", "y", 120, 130), pair("a", "z", 140, 125),  # y and z the wrong way round
        pair("b", "x", 100, 90), pair("b", "y", 102, 80),  # too near to be asked for
    ]  # fmt: skip
    assert [right for _, _, right in compared.orders(found)] == [True, True, False]


@pytest.mark.skipif(not compared.MEASURED.exists(), reason="no rows of kernels here")
def test_the_page_says_what_the_rows_say():
    page = compared.PAGE.read_text()
    held_out = (compared.pairs(*rows) for rows in (compared.HELD_OUT, compared.HELD_OUT_NEXT))
    assert page == compared.on_page(page, compared.text(compared.pairs(), *held_out))


def test_tiles_of_a_gemm_are_shared_by_gpcs():
    assert gemm.sharers(range(16), 8) == 8  # of what nobody shares, one in each GPC
    assert gemm.sharers([i // 8 for i in range(16)], 8) == 8  # neighbours lie in all GPCs
    assert gemm.sharers([i % 8 for i in range(16)], 8) == 16  # and every eighth in one
    assert gemm.sharers([0] * 16, 8) == 16
    # Groups of 8 rows by 32 columns of tiles: 132 CTAs are 8 rows by 16.5 columns, a GPC's all of one row.
    shape = gemm.Shape(8192, 4096, 2048, (128, 128), 1)
    assert gemm.operands(shape, 132, 8) == (132, 8)
