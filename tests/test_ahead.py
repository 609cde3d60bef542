"""Kernels compiled ahead of time are those that a call asks the cache for, and a recorded run says which calls."""

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import fa4
from fa4.api import ahead
from fa4.cli.main import main
from fa4.kvcache import calls
from fa4.oracle.cases import Case, make
from fa4.runtime import disk, jit, linked, recording, workers
from fa4.runtime.device import chip_by_number, emulating
from tests.integrations.oracle import leaves

CASE = Case("dense", seqlen_q=64, seqlen_k=64, heads_q=4, causal=True)


@pytest.fixture(autouse=True)
def without_library(monkeypatch):
    """The runtime library of CuTe DSL is not copied for each case."""
    monkeypatch.setattr(linked, "ship", lambda folder, library: None)


def entries_in(out):
    """Names of the entries below a directory of kernels, as the fixture `asked` has them."""
    return {path.stem for path in (out / jit.fingerprint()).iterdir() if path.suffix in (".o", ".so")}


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
    assert disk.is_kept(tmp_path / "cache")
    assert entries_in(tmp_path / "cache") == set(asked)
    assert f"{len(asked)} kernels for sm_80" in result.output


@pytest.mark.parametrize("options", [["--dropout", "0.25"], ["--score-mod", "tests.test_ahead:by_table"]])
def test_functions_and_dropout_are_compiled_too(asked, kept, monkeypatch, tmp_path, seed, options):
    """From a record and from options, forward and backward; of learned tensors and blocks too. (That what is asked for
    is compiled, the test above shows.)"""

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
        assert entries_in(out) == set(asked)


TABLE = torch.rand(4, 3, requires_grad=True)


def by_table(score, b, h, q_idx, kv_idx):
    return score * TABLE[h, q_idx % 3]


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


BF16 = torch.bfloat16
TABLE_OF_PAGES = torch.arange(8, dtype=torch.int32).view(2, 4)
NEW = dict(k=torch.zeros(2, 1, 2, 64, dtype=BF16), v=torch.zeros(2, 1, 2, 64, dtype=BF16))
ANGLES = dict(rotary_cos=torch.zeros(64, 32), rotary_sin=torch.zeros(64, 32))
ON_CACHES = {
    "dense": dict(cache_seqlens=i32(5, 6), causal=True),
    "pages": dict(page_table=TABLE_OF_PAGES, cache_seqlens=i32(5, 6), window_size=(9, 0)),
    "bytes_and_appends": dict(page_table=TABLE_OF_PAGES, cache_seqlens=i32(5, 6), causal=True, bits=8, **NEW, **ANGLES),
    "nvfp4_and_appends": dict(page_table=TABLE_OF_PAGES, cache_seqlens=i32(5, 6), causal=True, bits=4, **NEW, **ANGLES),
    "rows_and_padding": dict(cache_batch_idx=i32(1, 0), cache_leftpad=i32(1, 0), cache_seqlens=i32(5, 6)),
    "packed_queries": dict(cu_seqlens_q=i32(0, 1, 4), max_seqlen_q=3, cache_seqlens=i32(5, 6), causal=True),
    "a_mask_and_a_sink": dict(cache_seqlens=i32(5, 6), mask_mod=fa4.masks.causal, learnable_sink=torch.zeros(4)),
    "splits": dict(cache_seqlens=i32(5, 6), num_splits=3),
    "invariant": dict(page_table=TABLE_OF_PAGES, cache_seqlens=i32(5, 6), batch_invariant=True),
}


@pytest.fixture
def kept(monkeypatch):
    """What is compiled ahead of time leaves an empty entry, in no time."""

    def keep(requests, folder, jobs, done):
        for request in requests:
            jit._entry(folder, request.full_key).touch()
            done(request, None)

    monkeypatch.setattr(workers, "compile_all", keep)


def of_record(record, out):
    """The entries that a record leads to."""
    result = CliRunner().invoke(main, ["compile", "--from", str(record), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return entries_in(out)


@pytest.mark.parametrize("chip", [80, 90, 100, 120, 121])
@pytest.mark.parametrize("call", ON_CACHES.values(), ids=ON_CACHES)
def test_what_a_decoder_asks_for_is_compiled_ahead(asked, kept, monkeypatch, tmp_path, call, chip):
    """Attention on a cache and appends to it, from a record."""
    calls.plain_calls.clear()
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("FA4_RECORD", str(record))
    monkeypatch.setattr(recording, "_added", set())
    call = dict(call)
    bits, pages = call.pop("bits", 16), (8, 16) if "page_table" in call else (2, 64)
    cache = [torch.zeros(*pages, 2, 64, dtype=BF16) for _ in range(2)]
    if bits == 8:
        cache = [x.to(torch.int8) for x in cache]
    if bits == 4:
        quantised = [fa4.quantize(x, "nvfp4") for x in cache]
        cache = [x.data for x in quantised]
        call |= dict(zip(("k_descale", "v_descale"), (x.scales for x in quantised)))
    q = torch.zeros(*((4,) if "cu_seqlens_q" in call else (2, 1)), 4, 64, dtype=BF16)
    with emulating(chip_by_number(chip)):
        fa4.flash_attn_with_kvcache(q, *cache, **call)
    calls.plain_calls.clear()
    monkeypatch.delenv("FA4_RECORD")
    assert asked and of_record(record, tmp_path / "out") == set(asked)


def in_eight_bits():
    """A call on tensors with scales of blocks, and a training step."""
    x = torch.randn(1, 64, 2, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    given = {}
    for name in "qkv":
        given[name], given[f"{name}_descale"] = fa4.quantize(x, "mxfp8", axis="tokens" if name == "v" else "head_dim")
    fa4.flash_attn_func(**given, causal=True)
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    torch.autograd.grad(fa4.flash_attn_func(*leaves, precision="mxfp8").float().sum(), leaves)


def in_16_bits():
    """Two training steps, the second with wider heads."""
    for head_dim in (128, 256):
        leaves = [torch.zeros(1, 64, 2, head_dim, dtype=BF16, requires_grad=True) for _ in range(3)]
        out = fa4.flash_attn_func(*leaves, causal=True, deterministic=True)
        torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("chip", [120, 121])
@pytest.mark.parametrize("calls", [in_16_bits, in_eight_bits])
def test_a_record_of_consumer_blackwell_is_compiled_for_its_chip(asked, kept, monkeypatch, tmp_path, calls, chip):
    """GB10 has fewer multiprocessors than an RTX 5090, and a target of its own. A backward in 16 bits of a forward in 8
    bits is recorded as a problem, whose forward is compiled, too."""
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("FA4_RECORD", str(record))
    monkeypatch.setattr(recording, "_added", set())
    with emulating(chip_by_number(chip)):
        calls()
    monkeypatch.delenv("FA4_RECORD")
    found = list(ahead.recorded(record))
    assert {(x.chip, x.sms) for x in found} == {(chip, {120: 170, 121: 48}[chip])}
    assert calls is in_16_bits or any(x.spec.operands is not None for x in found)
    assert asked and of_record(record, tmp_path / "out") >= set(asked)


@pytest.mark.parametrize("chip", ["sm_120a", "sm_121a"])
def test_options_compile_for_consumer_blackwell(kept, tmp_path, chip):
    shape = ["--seqlen", "64", "--heads-q", "4", "--heads-kv", "2", "--causal", "--backward"]
    result = CliRunner().invoke(main, ["compile", *shape, "--chip", chip, "--out", str(tmp_path)])
    assert result.exit_code == 0 and f"2 kernels for {chip}" in result.output, result.output


def test_kernels_for_a_chip_with_fewer_multiprocessors(asked, kept, monkeypatch, tmp_path, seed):
    """An H100 PCIe has 114, and may ask for other kernels than the 132 of an SXM: a record and an option say so."""
    problem = make(Case("dense", seqlen_q=64, seqlen_k=64, heads_q=4), seed)
    record, names = tmp_path / "record.jsonl", {}
    for sms in (132, 114):
        monkeypatch.setattr(recording, "_added", set())
        monkeypatch.setenv("FA4_RECORD", str(record))
        asked.clear()
        jit._launchers.clear()
        record.unlink(missing_ok=True)
        with emulating(chip_by_number(90, sms=sms)):
            tensors = leaves(problem)
            torch.autograd.grad(fa4.flash_attn_func(*tensors, deterministic=True), tensors, problem.dout)
        monkeypatch.delenv("FA4_RECORD")
        assert [x.sms for x in ahead.recorded(record)] == [sms]
        names[sms] = set(asked)
        assert of_record(record, tmp_path / str(sms)) == names[sms]
    shape = ["--seqlen", "64", "--heads-q", "4", "--heads-kv", str(problem.inputs.k.shape[2]), "--backward"]
    shape += ["--batch", str(problem.inputs.q.shape[0]), "--head-dim", str(problem.inputs.q.shape[3])]
    out = tmp_path / "by options"
    result = CliRunner().invoke(
        main, ["compile", *shape, "--deterministic", "--chip", "90", "--sms", "114", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert entries_in(out) == names[114]


def test_what_plain_torch_serves_is_not_recorded(monkeypatch, tmp_path):
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("FA4_RECORD", str(record))
    q = torch.zeros(1, 8, 2, 16, dtype=BF16)
    fa4.flash_attn_func(q, q, q)
    fa4.flash_attn_with_kvcache(q, q.clone(), q.clone(), q, q, cache_seqlens=0)
    assert not record.exists()


_WRITER = """
import sys
from fa4.runtime import recording
for i in range(20):
    recording._add_line(sys.argv[1], sys.argv[2].encode() * 30_000 + b"\\n")
"""


def test_long_lines_of_several_processes_stay_whole(tmp_path):
    """Graphs make lines longer than any buffer."""
    record = tmp_path / "record.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(record), letter]) for letter in "abc"]
    assert not any(writer.wait() for writer in writers)
    lines = record.read_text().splitlines()
    assert sorted(lines) == sorted(letter * 30_000 for letter in "abc" for _ in range(20))


def test_a_problem_that_comes_again_is_written_once(monkeypatch, tmp_path):
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("FA4_RECORD", str(record))
    monkeypatch.setattr(recording, "_added", set())
    for _ in range(3):
        recording._add(chip_by_number(90), {"extent": [1, 2, 3]})
    assert len(record.read_text().splitlines()) == 1


REFUSALS = {
    "chip": (["--chip", "77"], "chip number 77 is not known"),
    "no_kernel": (["--chip", "100", "--dtype", "fp64"], "plain torch serves it"),
    "other_backend": (["--chip", "sm_121a", "--backend", "sm100"], "needs sm_100 or sm_103"),
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
