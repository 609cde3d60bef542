"""`fa4.compile_ahead`: every kernel that calls of a range can meet, once, wherever they are asked for."""

import math
import random

import pytest
import torch
from click.testing import CliRunner

import fa4
from fa4.api import ahead, call_ranges
from fa4.cli.main import main
from fa4.runtime import dispatch, jit, workers
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import ProblemSize
from tests.building import Kernel

RANGES = {
    "trained": dict(
        head_dim=128, heads_q=32, heads_kv=8, causal=True, backward=True, batch=(1, 32), seqlen_q=(1, 16384)
    ),
    "full": dict(head_dim=64, heads_q=16, backward=True, batch=(1, 32), seqlen_q=(1, 16384)),
    "cross": dict(head_dim=128, heads_q=8, batch=(1, 8), seqlen_q=(1, 4096), seqlen_k=(1, 16384)),
    "packed": dict(head_dim=128, heads_q=8, varlen=True, batch=(1, 32), seqlen_q=(1, 8192)),
}


@pytest.mark.parametrize("name", RANGES)
def test_no_call_of_a_range_needs_another_kernel(seed, name):
    calls = fa4.CallRange(**RANGES[name], chip="sm_90a")
    spec, chip, rng = calls.spec(), chip_by_number(90), random.Random(seed)
    row = dispatch.select(spec, chip)

    def kernels(extent):
        return call_ranges._kernels(row.plan(spec.with_positive_scale(), extent.planned(spec), chip))

    def length(bounds):
        return round(math.exp(rng.uniform(*map(math.log, bounds))))

    found = {kernels(problem.extent) for problem in calls.problems()}
    for _ in range(150):
        rows = length(calls.seqlen_q)
        keys = rows if calls.seqlen_k is None else length(calls.seqlen_k)
        extent = ProblemSize(rng.randint(*calls.batch), rows, keys)
        assert kernels(extent) in found, f"{extent}, seed {seed}"


@pytest.fixture
def compiled(monkeypatch):
    """Names of compiled programs; kernels are empty files."""
    programs = []

    def keep(requests, folder, jobs, done):
        for request in requests:
            programs.append(request.key[0])
            jit._export(Kernel(), folder, request.full_key)
            done(request, None)

    monkeypatch.setattr(workers, "compile_all", keep)
    return programs


def test_what_is_there_is_not_compiled_again(compiled, tmp_path, capsys):
    calls = [fa4.CallRange(**RANGES[name], chip="sm_90a") for name in ("trained", "full")]
    count = fa4.compile_ahead(*calls, directory=tmp_path)
    assert count == len(compiled) and {"sm90.forward", "sm90.backward"} <= set(compiled)
    assert f"{count} of {count}" in capsys.readouterr().err
    compiled.clear()
    assert fa4.compile_ahead(calls[0], directory=tmp_path, progress=False) < count and compiled == []
    assert capsys.readouterr().err == ""


def test_the_command_takes_ranges(compiled, tmp_path):
    options = [
        "compile",
        "--chip",
        "sm_90a",
        "--head-dim",
        "64",
        "--backward",
        "--out",
        str(tmp_path),
        "--seqlen",
        "64",
    ]
    done = CliRunner().invoke(main, [*options, "--seqlen-to", "8192", "--batch-to", "16"])
    calls = fa4.CallRange(head_dim=64, heads_q=16, backward=True, batch=(1, 16), seqlen_q=(64, 8192), chip="sm_90a")
    wanted = {key for problem in calls.problems() for key in ahead.requests_of(problem)}
    assert done.exit_code == 0 and f"{len(wanted)} kernels" in done.output and len(compiled) == len(wanted)
    (tmp_path / "record").touch()
    wrong = CliRunner().invoke(main, [*options, "--batch-to", "16", "--record", str(tmp_path / "record")])
    assert wrong.exit_code == 2 and "expected one of both" in wrong.output


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(batch=0), "batch is 0"),
        (dict(seqlen_q=(8, 4)), "seqlen_q is \\(8, 4\\), expected an int of at least 1, or the first and the last"),
        (dict(seqlen_k=(1, 2, 3)), "seqlen_k is"),
        (dict(heads_kv=3), "heads_kv is 3, which does not divide"),
        (dict(head_dim=True), "head_dim is True"),
        (dict(backend="sm91"), "backend is 'sm91'"),
        (dict(chip="sm_1"), "chip is 'sm_1'"),
        (dict(dtype=torch.float64, backend="sm90"), "no backend can run this"),
    ],
    ids=str,
)
def test_wrong_ranges_name_the_argument(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fa4.compile_ahead(fa4.CallRange(**RANGES["full"] | dict(chip="sm_90a") | changes), directory=tmp_path)


def test_wrong_arguments(monkeypatch, tmp_path):
    with pytest.raises(TypeError, match=r"ranges has 3, expected fa4.CallRange"):
        fa4.compile_ahead(3)
    with pytest.raises(ValueError, match="jobs is 0"):
        fa4.compile_ahead(jobs=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="chip is None, and there is no GPU"):
            fa4.compile_ahead(fa4.CallRange(**RANGES["full"]))
    monkeypatch.setattr(jit, "cache_directory", lambda: None)
    with pytest.raises(ValueError, match="directory is None, and there is no disk cache"):
        fa4.compile_ahead(fa4.CallRange(**RANGES["full"], chip="sm_90a"))


def test_what_cannot_be_compiled_is_an_error(monkeypatch, tmp_path):
    def fail(requests, folder, jobs, done):
        for request in requests:
            done(request, "ValueError: no such tile" if request.key[0] == "sm90.backward" else None)

    monkeypatch.setattr(workers, "compile_all", fail)
    with pytest.raises(workers.WorkerFailed, match=r"sm90\.backward: ValueError: no such tile"):
        fa4.compile_ahead(fa4.CallRange(**RANGES["full"], chip="sm_90a"), directory=tmp_path)
