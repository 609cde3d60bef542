"""Predictions of whole grids: a few are held, so that a change that would slow a B200 is seen without one."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from warpcheck.timing.chips import GPUS
from warpcheck.timing.code import assembler
from warpcheck.timing.grid import CtaCost, Sample
from warpcheck.timing.sass.code import nvdisasm

from bench.compare import load, read_rows
from bench.l2_order import tables as l2_order_tables
from bench.predicted import predicted_row, tables
from bench.predicted_consumer import tables as consumer_tables
from bench.run import main as bench
from bench.suites import square
from fa4.emulator.attention import Problem
from fa4.emulator.predict import predict, steady
from fa4.emulator.timing import main
from fa4.sm80.tiles import BackwardTiles, ForwardTiles


def machine_code_is_readable():
    try:
        return assembler() is not None and bool(nvdisasm())
    except FileNotFoundError:
        return False


needs_machine_code = pytest.mark.skipif(
    not machine_code_is_readable(), reason="the numbers held here are from machine code: ptxas and nvdisasm"
)
ROOT = Path(__file__).parents[2]
D64 = Problem("fwd", batch=2, seqlen=16384, heads=32, head_dim=64, head_dim_v=64, causal=False)


HELD = [  # cycles
    (D64, 8.234e6),
    (Problem("fwd", batch=8, seqlen=4096, heads=16, head_dim=128, head_dim_v=128, causal=True), 6.81e5),
    (Problem("bwd", batch=8, seqlen=4096, heads=16, head_dim=128, head_dim_v=128, causal=False), 3.41e6),
]


@needs_machine_code
@pytest.mark.parametrize(("problem", "cycles"), HELD, ids=["fwd d64", "fwd d128 causal", "bwd d128"])
def test_a_predicted_row_stays_what_it_was(problem, cycles):
    found = predict(problem)
    assert found.cycles == pytest.approx(cycles, rel=0.02)
    events, instructions = found.times[0].untied
    # An elected lane's arrivals that the compiler for CUDA 12 moves to where no slot is tied to them.
    assert instructions == 0 and events <= 128


@needs_machine_code
def test_the_rate_of_a_long_sequence_is_that_of_a_short_one():
    short, long = (predict(replace(D64, seqlen=s, batch=32768 // s)) for s in (4096, 32768))
    assert short.tflops < long.tflops < 1.1 * short.tflops
    assert long.clock == short.clock and long.cost == short.cost


@pytest.mark.parametrize(
    ("seqlen", "rows"), [pytest.param(3000, 192, id="three consumers"), pytest.param(200, 128, id="few tiles")]
)
def test_hopper_is_predicted_with_tiles_of_any_number_of_rows(seqlen, rows):
    problem = Problem("fwd", batch=3, seqlen=seqlen, heads=10, head_dim=128, head_dim_v=128, causal=False)
    found = predict(problem, "sm_90a")
    ctas = found.times[0].record.launch.cluster[0]
    assert found.tiles == problem.batch * problem.heads * -(-problem.seqlen // rows)
    assert found.times[0].sms == ctas and 0 < found.tflops < 989


D128 = Problem("fwd", batch=8, seqlen=4096, heads=16, head_dim=128, head_dim_v=128, causal=False)
OF_SLOTS = [  # GPU, problem, tiles of the portable kernels, CTAs of a multiprocessor, cycles
    ("RTX 5090", D128, ForwardTiles(128, 64, 4, 1, 2), 1, 1.443e7),
    ("RTX 5090", replace(D128, causal=True), ForwardTiles(64, 64, 4, 1, 2), 2, 6.65e6),
    ("GB10", D128, ForwardTiles(64, 64, 4, 1, 2), 2, 2.924e7),
    ("GB10", replace(D128, direction="bwd"), BackwardTiles(64, 64, 1, (2, 2), (2, 2), (2, 2)), 1, 1.268e8),
]


@pytest.mark.rotates(2)
@needs_machine_code
@pytest.mark.parametrize(("gpu", "problem", "tiles", "resident", "cycles"), OF_SLOTS)
def test_portable_kernels_on_consumer_blackwell_stay_as_predicted(gpu, problem, tiles, resident, cycles):
    found = predict(problem, GPUS[gpu].chip, table=GPUS[gpu], tiles=tiles, backend="sm80")
    assert found.cycles == pytest.approx(cycles, rel=0.02)
    assert found.resident == resident and found.times[0].source == "machine code"
    assert found.times[0].untied == (0, 0)
    assert found.flops / found.cycles < GPUS[gpu].sms * GPUS[gpu].numbers["mma_flops"].value
    assert (found.auxiliary > 0) == (problem.direction == "bwd")


@needs_machine_code
def test_a_grid_of_fewer_tiles_than_multiprocessors_has_one_cta_on_each():
    options = {"tiles": ForwardTiles(64, 64, 4), "backend": "sm80"}
    small = replace(D128, batch=1, heads=5, seqlen=2048)
    alone, shared = (predict(p, "sm_120a", **options) for p in (small, replace(small, heads=10)))
    assert (alone.resident, shared.resident) == (1, 2)
    assert alone.cycles < shared.cycles


def test_another_number_of_keys_is_predicted_on_consumer_blackwell():
    options = {"tiles": ForwardTiles(128, 64, 4, 1, 2), "backend": "sm80"}
    square, wide = (predict(p, "sm_120a", **options) for p in (D128, replace(D128, keys=8192)))
    assert wide.flops == 2 * square.flops and wide.tiles == square.tiles
    assert 1.9 * square.cycles < wide.cycles < 2 * square.cycles
    with pytest.raises(ValueError, match="sm_120a and sm_121a"):
        predict(replace(D64, keys=8192))


@pytest.mark.rotates(2)
def test_rows_are_marked_and_compared(tmp_path):
    cases = (square("fwd", 16384, 64, False), square("fwd", 16384, 80, False))
    rows = [predicted_row(case, "sm_100a") for case in cases]
    assert all(row["predicted"] and row["tflops"] > 100 for row in rows)
    assert "from_part" not in rows[0] and rows[1]["from_part"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"machine": {"device": "B200, predicted"}, **row}) + "\n" for row in rows))
    assert load(path)["fa4", rows[0]["label"]]["median_ms"] > 0


@pytest.mark.parametrize("package", ["flash-attn-4", "cudnn-frontend"])
def test_another_package_is_predicted_or_says_what_is_missing(package):
    row = predicted_row(square("bwd", 4096, 256, True, heads=8), "sm_100a", package)
    assert row.get("tflops", 0) > 100 or "No module named" in row["skipped"], row


@needs_machine_code
@pytest.mark.parametrize(("seqlen", "ctas"), [(4096, 2), (16384, 4)])
def test_products_of_cudnn_have_the_tiles_of_the_length(seqlen, ctas):
    """Its sources state 465 us on a B200 at 1155 MHz for each product at 2k, 128 heads, and 1735 us at 4k."""
    pytest.importorskip("cudnn")
    found = predict(Problem("bwd", 1, seqlen, 128, 512, 512, False), package="cudnn-frontend")
    first, *products = found.parts
    assert first.times[0].record.launch.cluster == (4, 1, 1)
    for product in products:
        rows, columns = (512, 256) if ctas == 2 else (512, 512)
        assert product.tiles == 128 * (seqlen // rows) * (512 // columns)
        assert product.times[0].record.launch.cluster == (2, ctas // 2, 1)
    if seqlen == 4096:
        assert products[0].cycles == pytest.approx(1735 * 1155, rel=0.03)


def test_packages_that_are_only_predicted_are_not_timed(tmp_path):
    arguments = ["--suite", "wide", "--filter", "576", "--providers", "cudnn-frontend"]
    assert "expected some of" in CliRunner().invoke(bench, arguments).output
    output = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(bench, [*arguments, "--predict", "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert all(json.loads(line)["skipped"] for line in output.read_text().splitlines())


def test_a_unit_is_as_busy_as_between_the_starts_of_tiles():
    """Starts take half of the cycles of a short launch. Between them the unit is busy all the time."""
    launches = [SimpleNamespace(cycles=c, shares=lambda c=c: {"tensor": (c - 100) / c, "idle": 0}) for c in (200, 400)]
    samples = [Sample(1, 1000.0, 200), Sample(1, 3000.0, 400)]
    assert steady(launches, samples, CtaCost.fitted) == pytest.approx({"tensor": 1})


def test_the_suite_can_be_predicted(tmp_path):
    output = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(
        bench, ["--suite", "smoke", "--filter", "fwd d64 full", "--predict", "--output", str(output)]
    )
    assert done.exit_code == 0, done.output
    assert "predicted, not measured" in done.output
    assert all(json.loads(line)["predicted"] for line in output.read_text().splitlines())


@pytest.mark.rotates(2)
def test_the_suite_of_consumer_gpus_is_predicted_for_the_named_one(tmp_path):
    output = tmp_path / "rows.jsonl"
    cases = "fwd d128 full b1 h24 4096x512 bfloat16|window 127 .* 1024"
    arguments = ["--suite", "consumer", "--filter", cases, "--providers", "fa4", "--gpu", "GB10", "--predict"]
    done = CliRunner().invoke(bench, [*arguments, "--output", str(output)])
    assert done.exit_code == 0, done.output
    window, image = map(json.loads, output.read_text().splitlines())
    assert window["machine"] == image["machine"] == {
        "device": "GB10, predicted", "chip": "sm_121a", "clock_ghz": 2.4, "clock_ghz_backward": 2.4
    }  # fmt: skip
    assert window["from_part"] and image["predicted"] and image["tflops"] > 10


def test_the_command_says_predicted_and_draws(tmp_path):
    drawing = tmp_path / "t.json"
    arguments = ["fwd", "--seqlen", "4096", "--head-dim", "64", "--timeline", str(drawing)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "predicted" in done.output and "TFLOP/s at 1.732 GHz" in done.output
    assert json.loads(drawing.read_text())["traceEvents"]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_command_names_a_gpu(direction):
    arguments = [direction, "--gpu", "GB10", "--seqlen", "2048", "--head-dim", "64", "--causal", "--backend", "sm80"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "on GB10, sm_121a, predicted" in done.output and "at 2.4 GHz" in done.output


REFUSED = [
    ["--head-dim", "80"], ["--chip", "sm_90a", "--causal"], ["--backend", "sm80"],
    ["--chip", "sm_120a", "--package", "cudnn-frontend"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_is_not_predicted_is_refused(arguments):
    done = CliRunner().invoke(main, ["fwd", *arguments])
    assert done.exit_code == 2 and "predicted" in done.output


@pytest.mark.parametrize(
    "suite",
    [
        "2026-11-23_predicted_sm_100a_sm100",
        "2026-11-26_predicted_sm_100a_wide",
        "2026-11-26_predicted_sm_100a_latents",
        "2026-11-27_predicted_sm_100a_e4m3",
        "2026-11-28_predicted_sm_103a_sm100",
    ],
)
def test_the_page_shows_the_rows(suite):
    rows = read_rows(ROOT / f"bench/results/{suite}.jsonl")
    page = (ROOT / "docs/results/predicted-times.md").read_text()
    for table in tables(rows).split("\n\n"):
        assert table.strip() in page, "run `python -m bench.predicted` on the rows and paste its tables into the page"


def test_the_page_of_consumer_blackwell_shows_the_rows():
    rows = read_rows(ROOT / "bench/results/2026-11-27_predicted_sm_120a_consumer.jsonl")
    assert all(row["predicted"] and row["issue_model"] == "machine code" for row in rows)
    page = (ROOT / "docs/results/predicted-consumer.md").read_text()
    for table in consumer_tables(rows).split("\n\n"):
        assert table.strip() in page, "run `python -m bench.predicted_consumer` on the rows and paste its tables"
    rows = read_rows(ROOT / "bench/results/2026-11-28_predicted_sm_120a_suite-consumer.jsonl")
    assert tables(rows).strip() in page, "the page has other numbers"
    rows = read_rows(ROOT / "bench/results/2026-11-28_predicted_sm_121a_l2-order.jsonl")
    assert all(row["predicted"] for row in rows)
    assert l2_order_tables(rows) in page, "run `python -m bench.l2_order` on the rows and paste its table"
