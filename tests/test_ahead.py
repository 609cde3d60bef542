"""Kernels compiled ahead of time are those that a call asks the cache for, and a recorded run says which calls."""

import json

import pytest
import torch
from click.testing import CliRunner

import fa4
from fa4 import ahead, jit
from fa4.cases import Case, make
from fa4.cli import main
from fa4.device import chip_by_number, emulating
from tests.integrations.oracle import leaves

CASE = Case("dense", seqlen_q=64, seqlen_k=64, heads_q=4, causal=True)


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


@pytest.mark.parametrize("options", [["--dropout", "0.25"], ["--score-mod", "tests.test_ahead:by_table"]])
def test_functions_and_dropout_are_compiled_too(asked, monkeypatch, tmp_path, seed, options):
    """From a record and from options, forward and backward; of learned tensors and blocks too. (That what is asked for
    is compiled, the test above shows.)"""

    def keep(dry_run, full_key, build):
        jit._entry(dry_run._directory, full_key).touch()
        dry_run.seconds[full_key[0], full_key[2]] = 0.0
        return lambda *arguments: None

    monkeypatch.setattr(jit.DryRun, "compile", keep)
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("FA4_RECORD", str(record))
    problem = make(CASE, seed)
    mask = fa4.create_block_mask(fa4.masks.sliding_window(5), None, None, 64, 64, device="cpu")
    call = dict(dropout_p=0.25) if "--dropout" in options else dict(score_mod=by_table, block_mask=mask)
    with emulating(chip_by_number(80)):
        tensors = leaves(problem)
        torch.autograd.grad(fa4.flash_attn_func(*tensors, **call), [*tensors], problem.dout)
    monkeypatch.delenv("FA4_RECORD")
    shape = ["--seqlen", "64", "--heads-q", "4", "--heads-kv", str(problem.inputs.k.shape[2]), "--backward"]
    shape += ["--chip", "80", "--dtype", "bf16", "--batch", str(problem.inputs.q.shape[0])]
    shape += ["--head-dim", str(problem.inputs.q.shape[3])]
    if "--score-mod" in options:
        options = [*options, "--mask-mod", "fa4.masks:sliding_window(9)", "--block-size", "128"]
    for given in (["--record", str(record)], shape + options):
        out = tmp_path / given[0].strip("-")
        result = CliRunner().invoke(main, ["compile", *given, "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert {path.name for path in (out / jit.fingerprint()).iterdir()} == set(asked)


TABLE = torch.rand(4, 3, requires_grad=True)


def by_table(score, b, h, q_idx, kv_idx):
    return score * TABLE[h, q_idx % 3]


def test_caches_are_not_recorded(asked, monkeypatch, tmp_path):
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("FA4_RECORD", str(record))
    q = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    with emulating(chip_by_number(80)):
        fa4.flash_attn_with_kvcache(q, q, q, cache_seqlens=8)
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
