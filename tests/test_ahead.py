"""Kernels compiled ahead of time are those that a call asks the cache for, and a recorded run says which calls."""

import json

import pytest
import torch
from click.testing import CliRunner

import fa4
from fa4 import ahead, dispatch, jit
from fa4.cases import Case, make
from fa4.cli import main
from fa4.device import chip_by_number, emulating
from tests.integrations.oracle import leaves

CASE = Case("dense", seqlen_q=64, seqlen_k=64, heads_q=4, causal=True)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The entries that calls ask the disk for, none of which is there: what is launched does nothing."""
    entries = []

    def through_disk(directory, full_key, build):
        entries.append(jit._entry(directory, full_key).name)
        return lambda *arguments: None

    dispatch.plan.cache_clear()
    monkeypatch.setattr(jit, "_through_disk", through_disk)
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    yield entries
    dispatch.plan.cache_clear()


def test_a_recorded_run_compiles_what_it_asked_for(asked, monkeypatch, tmp_path, seed):
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("FA4_RECORD", str(record))
    problem = make(CASE, seed)
    with emulating(chip_by_number(80)):
        tensors = leaves(problem)
        torch.autograd.grad(fa4.flash_attn_func(*tensors, causal=True), tensors, problem.dout)
    monkeypatch.delenv("FA4_RECORD")
    (found,) = ahead.recorded(record)
    assert (found.chip, found.extent, found.backend) == (80, problem.inputs.extent, "auto")
    assert (found.spec.heads_q, found.spec.causal, found.spec.needs_backward) == (4, True, True)
    result = CliRunner().invoke(main, ["compile", "--record", str(record), "--out", str(tmp_path / "cache")])
    assert result.exit_code == 0, result.output
    (directory,) = (tmp_path / "cache").iterdir()
    assert directory.name == jit.fingerprint()
    assert {path.name for path in directory.iterdir()} == set(asked)
    assert f"{len(asked)} kernels for sm_80" in result.output


def test_what_is_not_plain_data_is_not_recorded(asked, monkeypatch, tmp_path):
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("FA4_RECORD", str(record))
    q = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    with emulating(chip_by_number(80)):
        fa4.flash_attn_func(q, q, q, score_mod=lambda score, b, h, i, j: score + 1)
    fa4.flash_attn_func(q, q, q)  # in plain torch, which compiles nothing
    assert not record.exists()


REFUSALS = {
    "chip": (["--chip", "77"], "chip number 77 is not known"),
    "no_kernel": (["--chip", "100", "--dtype", "fp64"], "plain torch serves it"),
    "backend": (["--chip", "90", "--backend", "sm100"], "needs sm_100 or sm_103"),
}


@pytest.mark.parametrize("arguments, message", REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_compiled_is_an_error(arguments, message, tmp_path):
    sizes = ["--seqlen-q", "64", "--heads-q", "1"]
    result = CliRunner().invoke(main, ["compile", *sizes, *arguments, "--out", str(tmp_path)])
    assert result.exit_code != 0 and message in " ".join(result.output.replace("│", "").split())


def test_a_file_that_is_no_record_is_named(tmp_path):
    file = tmp_path / "record.jsonl"
    file.write_text(json.dumps({"chip": 80}) + "\n")
    with pytest.raises(ValueError, match="line 1 is no problem that FA4_RECORD wrote"):
        list(ahead.recorded(file))
