"""Predicted backwards of lists of latents: their arithmetic by hand, and the row of our kernel."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from warpcheck.timing.chips import chip_table

from fa4.emulator.latent_gradients import _auxiliary, _Launches, predict_latent_gradients
from fa4.emulator.latents import Latents

ROWS = Path(__file__).parents[2] / "bench/results/2026-11-28_predicted_sm_100a_sparse.jsonl"


def launch(cycles, clusters, nbytes=0, ctas=2):
    record = SimpleNamespace(launch=SimpleNamespace(grid=(clusters * ctas, 1, 1), cluster=(ctas, 1, 1)))
    return SimpleNamespace(cycles=cycles, record=record, sms=2, global_bytes=nbytes)


def test_lists_of_a_pair_follow_each_other():
    """100 cycles before the first list, 1000 for one of 512 keys, 1500 for one of 1024."""
    kernel = _Launches(launch(1100, 1), launch(1600, 1), launch(3100, 3))
    assert not kernel.owns_keys
    problem = Latents(1, 148, 2048, causal=False, cached=4096)
    assert kernel.cycles(problem, 148, 148) == 100 + 2 * (1000 + 1500)  # 74 pairs


def test_lists_of_single_ctas_run_at_a_time_on_two_multiprocessors():
    """The third list follows the first one: the same times as of a pair."""
    kernel = _Launches(launch(1100, 1, ctas=1), launch(1600, 1, ctas=1), launch(2100, 3, ctas=1))
    problem = Latents(1, 148, 2048, causal=False, cached=4096)
    assert kernel.cycles(problem, 148, 148) == 100 + 1000 + 1500


def test_tiles_of_keys_fill_the_chip():
    """A cluster has 128 keys of a list, 200 cycles each."""
    kernel = _Launches(launch(900, 4), launch(1700, 8), launch(2500, 12))
    assert kernel.owns_keys
    problem = Latents(1, 10, 2048, causal=False, cached=4096)
    assert kernel.cycles(problem, 10, 148) == 100 + math.ceil(10 * 16 / 74) * 200


def test_a_kernel_without_products_grows_with_the_lists_and_with_the_keys():
    """Of 10000 cycles, 4000 are those of a list."""
    table = chip_table("sm_100a")
    kernel = _Launches(launch(10000, 1), launch(10000, 1), launch(18000, 1))
    found = _auxiliary(kernel, Latents(1, 1000, 2048, causal=False, cached=4 * 2048), table)
    assert found == table.numbers["launch"].value + (1000 * 4000 + 4 * 6000) * 2 / table.sms


@pytest.mark.parametrize(
    ("package", "chip", "changes"),
    [("torch", "sm_100a", {}), ("fa4", "sm_90a", {}), ("fa4", "sm_100a", dict(cached=0))],
)
def test_what_is_not_predicted_is_refused(package, chip, changes):
    problem = Latents(**dict(batch=1, rows=4, keys=2048, causal=False, cached=4096) | changes)
    with pytest.raises(ValueError, match="predicted"):
        predict_latent_gradients(problem, package, chip)


@pytest.mark.soak
def test_the_row_of_our_kernel_is_predicted_again():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    (row,) = (r for r in rows if (r["direction"], r["provider"], r["problem"]["heads"]) == ("bwd", "fa4", 128))
    found = predict_latent_gradients(Latents(**row["problem"]))
    assert found.tflops == pytest.approx(row["tflops"], rel=0.03)
