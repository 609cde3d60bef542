"""The benchmark harness on a CPU: checked before timed, rows that carry their machine, comparison, plot."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import fa4
from bench import (
    check,
    compare,
    flex,
    lines,
    mods,
    overhead_page,
    plot,
    providers,
    run,
    stalls_page,
    suites,
    summary,
    timing,
    tune,
)
from bench import sparse as bench_sparse
from bench.suites import BenchCase, square
from fa4.oracle.cases import in_blocks
from fa4.runtime import jit

TINY = (
    BenchCase("fwd", 1, 40, 40, 2, 2, 16, 16, True, "float32"),
    BenchCase("bwd", 2, 33, 33, 4, 2, 16, 16, False, "float32"),
)


def invoke(command, *arguments, code=0):
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(suites.SUITES, "smoke", TINY)
    monkeypatch.setattr(run.machine, "gemm_tflops", lambda device: 1.0)


def measured(path, *, names="fa4,sdpa", code=0):
    invoke(run.main, "--providers", names, "--seconds", 0.001, "--device", "cpu", "--output", path, code=code)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_carry_check_time_and_machine(tiny, tmp_path):
    rows = measured(tmp_path / "rows.jsonl")
    assert len(rows) == 4
    for row in rows:
        assert row["median_ms"] > 0 and row["q25_ms"] <= row["median_ms"] <= row["q75_ms"]
        assert set(row["checked"]) == ({"out"} if row["direction"] == "fwd" else {"dq", "dk", "dv"})
        assert row["machine"]["versions"]["torch"] == torch.__version__


def test_a_wrong_result_is_not_timed(tiny, tmp_path, monkeypatch):
    wrong = providers.Provider("fa4", lambda case: lambda q, k, v: q * 1.001, lambda device: "")
    monkeypatch.setitem(providers.PROVIDERS, "fa4", wrong)
    row = measured(tmp_path / "rows.jsonl", names="fa4", code=1)[0]
    assert "wrong result: out: error" in row["error"] and "median_ms" not in row


def test_what_a_provider_does_not_have_is_skipped_with_the_reason(tmp_path, monkeypatch):
    """Also what does not fit the memory: neither is a failure of the run."""
    cases = (dataclasses.replace(TINY[0], window=9), dataclasses.replace(TINY[0], head_dim=32, dtype=suites.MXFP8))
    monkeypatch.setitem(suites.SUITES, "smoke", cases)
    monkeypatch.setattr(run.machine, "gemm_tflops", lambda device: 1.0)

    def too_large(case):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setitem(providers.PROVIDERS, "fa4-torch", providers.Provider("fa4-torch", too_large, lambda device: ""))
    rows = measured(tmp_path / "rows.jsonl", names="fa4,sdpa,fa4-torch")
    memory = "does not fit the memory of the GPU: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"
    reasons = [row.get("skipped") for row in rows]
    assert reasons == [None, "has no windows", memory, None, "has no mxfp8", memory]
    assert all("checked" in row for row in rows if row["provider"] == "fa4")


@pytest.mark.parametrize("window", [None, 30])
def test_as_many_queries_are_checked_as_the_memory_holds(monkeypatch, window):
    """The last ones, which are a call of their own; an error there is found, and one of others is not."""
    case = BenchCase("fwd", 2, 200, 200, 4, 2, 16, 16, True, "float32", window=window)
    tensors = suites.made_tensors(case, torch.device("cpu"), 0)
    out = providers.PROVIDERS["fa4"].build(case)(*tensors[:3])
    monkeypatch.setattr(check, "_free_bytes", lambda device: 200 * 2 * 64 * 50)
    judge = check.Judge(case, tensors)
    assert judge.queries == 37  # three quarters of the memory
    for row, is_right in ((200 - 38, True), (200 - 37, False), (199, False)):
        wrong = out.clone()
        wrong[0, row, 0] += 0.1
        assert [j.right for j in judge.judgements({"out": wrong})] == [is_right]


@pytest.mark.parametrize("dtype", suites.IN_BLOCKS)
def test_results_of_few_bits_are_compared_with_the_numbers_of_these(dtype):
    case = BenchCase("fwd", 1, 70, 130, 4, 2, 64, 64, False, dtype)
    tensors = suites.made_tensors(case, torch.device("cpu"), 0)
    for x, (data, scales) in zip(tensors, in_blocks(dtype, *tensors[:3])):
        assert x.dtype == torch.bfloat16
        again = fa4.dequantize(data, scales, torch.bfloat16).float()
        # A scale of e4m3 is not that of its own numbers.
        assert (again - x.float()).norm() <= (0 if dtype == suites.MXFP8 else 0.02) * x.float().norm()
    out = providers.PROVIDERS["fa4"].build(case)(*tensors[:3])
    judge = check.Judge(case, tensors)
    assert [j.right for j in judge.judgements({"out": out})] == [True]
    wrong = (1.1 if dtype == suites.MXFP8 else 1.5) * out
    assert [j.right for j in judge.judgements({"out": wrong})] == [False]


def test_a_provider_that_is_not_here_is_skipped_by_name(tiny, tmp_path):
    rows = measured(tmp_path / "rows.jsonl", names="cudnn")
    assert all(row["skipped"] == "needs a CUDA device" for row in rows)


class PagedAttention:
    """FlashInfer's wrapper by its documentation: sequences are pages indices[indptr[b]:indptr[b + 1]], of the last of
    which last_page_len[b] rows are in use."""

    def __init__(self, workspace, layout):
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, head_dim_vo, causal, q_data_type,
    ):  # fmt: skip
        self.queries, self.pages, self.indices = qo_indptr, paged_kv_indptr, paged_kv_indices
        self.last, self.size, self.causal = paged_kv_last_page_len, page_size, causal

    def run(self, q, cache):
        parts = []
        for b, last in enumerate(self.last):
            of_b = self.indices[self.pages[b] : self.pages[b + 1]].long()
            rows = (len(of_b) - 1) * self.size + last
            k, v = (x[of_b].flatten(0, 1)[None, :rows] for x in cache)
            parts.append(
                fa4.flash_attn_func(q[None, self.queries[b] : self.queries[b + 1]], k, v, causal=self.causal)[0]
            )
        return torch.cat(parts)


@pytest.mark.parametrize("page_size", [None, 7])
def test_flashinfer_is_planned_in_its_terms(page_size, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PagedAttention))
    case = BenchCase("fwd", 2, 3, 40, 4, 2, 16, 8, True, "float32", page_size)
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 8)
    attend = providers.PROVIDERS["flashinfer"].build(case)
    torch.testing.assert_close(attend(q, k, v), fa4.flash_attn_func(q, k, v, causal=True))


def test_unknown_provider_and_empty_filter_are_refused(tiny):
    assert "expected some of fa4" in " ".join(invoke(run.main, "--providers", "fa5", code=2).split())
    assert "matches no case" in invoke(run.main, "--filter", "nothing", code=2)


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("is no regular expression", ["--filter", "["]),
        ("'nope' is not a device of this machine", ["--device", "nope"]),
        ("chip number 77 is not known", ["--dry-run", 77]),
        ("--seconds", ["--seconds", -1]),
        ("suite sm100 is timed on a GPU", ["--suite", "sm100", "--device", "cpu"]),
        ("`--dry-run 90` compiles its kernels", ["--suite", "hopper", "--device", "cpu"]),
        ("`--dry-run 120` compiles its kernels", ["--suite", "consumer", "--device", "cpu"]),
        ("--gpu is given without --predict", ["--gpu", "GB10"]),
        ("'GTX 1080': expected one of B200, B300, H100, H200, RTX 5090", ["--predict", "--gpu", "GTX 1080"]),
    ],
)
def test_bad_options_are_usage_errors(tiny, message, arguments):
    assert message in " ".join(invoke(run.main, *arguments, code=2).replace("│", "").split())


@pytest.mark.parametrize("command", [compare.main, plot.main, summary.main])
@pytest.mark.parametrize("text", ["# not JSON\n", '{"other": 1}\n', "[1]\n"])
def test_a_file_that_holds_no_rows_is_refused(command, text, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    files = [path] * (2 if command is compare.main else 1)
    assert "is not a result file of bench.run" in invoke(command, *files, code=1)


@contextlib.contextmanager
def handling(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_background_job_goes_on_at_ctrl_c(tiny, tmp_path, monkeypatch):
    """Shells start it with SIGINT ignored: the interrupt of a terminal is for what runs in front."""

    def build(case):
        signal.raise_signal(signal.SIGINT)
        return functools.partial(fa4.flash_attn_func, causal=case.causal)

    monkeypatch.setitem(providers.PROVIDERS, "fa4", providers.Provider("fa4", build, lambda device: ""))
    with handling(signal.SIGINT, signal.SIG_IGN):
        rows = measured(tmp_path / "rows.jsonl", names="fa4-torch,fa4")
    assert len(rows) == 4 and all("median_ms" in row for row in rows)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, None], ids=["interrupt", "time_limit", "broken_device"])
def test_rows_measured_before_the_end_of_a_run_are_kept(tiny, tmp_path, monkeypatch, end):
    """Ctrl-C in a run of hours, its time limit, or a kernel that breaks the device: the file has what was measured."""
    rates = iter([1.0])

    def gemm(device):
        for rate in rates:
            return rate
        raise RuntimeError("illegal memory access")

    def build(case):
        if end is not None and case.direction == "bwd":
            signal.raise_signal(end)
        return functools.partial(fa4.flash_attn_func, causal=case.causal)

    if end is None:
        monkeypatch.setattr(run.machine, "gemm_tflops", gemm)
    monkeypatch.setitem(providers.PROVIDERS, "fa4", providers.Provider("fa4", build, lambda device: ""))
    with handling(signal.SIGINT, signal.default_int_handler):  # a background job starts with Ctrl-C ignored
        rows = measured(tmp_path / "rows.jsonl", names="fa4-torch,fa4")  # a case's are measured together
    assert [row["provider"] for row in rows] == ["fa4-torch", "fa4", "fa4-torch", "fa4"][: 4 if end is None else 2]
    assert len(rows[0]["gemm_tflops"]) == (1 if end is None else 2) and rows[0]["median_ms"] > 0


def test_compare_finds_a_regression_and_a_failure(tiny, tmp_path):
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    rows = measured(before)
    after.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "0 regressions" in invoke(compare.main, before, after)
    rows[0]["median_ms"] *= 2
    after.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "1 regressions" in invoke(compare.main, before, after, code=1)
    del rows[0]["median_ms"]
    after.write_text("".join(json.dumps({**row, "error": "boom"}) + "\n" for row in rows))
    assert "boom" in invoke(compare.main, before, after, code=1)
    after.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert "no row" in invoke(compare.main, before, after, code=1)


def test_plot_draws_a_file(tiny, tmp_path):
    measured(tmp_path / "rows.jsonl")
    invoke(plot.main, tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.png").stat().st_size > 10_000


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", [overhead_page, stalls_page])
def test_a_page_is_that_of_the_committed_rows(module, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert module.PAGE.read_text() == module.page(module.files())


def test_summary_tells_rates_and_their_ratio(tiny, tmp_path):
    rows = measured(tmp_path / "rows.jsonl")
    for row in rows:
        row["tflops"] = {"fa4": 3.0, "sdpa": 2.0}[row["provider"]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = invoke(summary.main, tmp_path / "rows.jsonl")
    assert f"| {rows[0]['label']} | 3 | 2 |" in text
    assert "fwd: fa4 / sdpa = 1.500 (geometric mean of 1)" in text
    assert "'fa5' has no rows" in invoke(summary.main, "--of", "fa5", tmp_path / "rows.jsonl", code=2)


def test_summary_tells_how_it_stands_to_the_best_of_the_others(tmp_path):
    rates = {"fa4": 4.0, "fa4-deterministic": 3.0, "cudnn": 2.0, "flash-attn-4": 5.0}
    cases = (square("bwd", 1024, 128, True), square("bwd", 4096, 256, False), square("fwd", 1024, 64, True))
    rows = [
        {"suite": "hopper", "machine": {}, "provider": name, "label": case.label, "tflops": rate}
        | dataclasses.asdict(case)
        for case in cases
        for name, rate in rates.items()
        if not (case.head_dim == 256 and name == "flash-attn-4")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = invoke(summary.main, tmp_path / "rows.jsonl")
    assert f"| forward, d64 causal 1k | 1 | 0.800 | 0.800 | {cases[2].label} |" in text
    assert f"| backward to d128 | 1 | 0.800 | 0.800 | {cases[0].label} |" in text
    assert f"| backward, d256 | 1 | 2.000 | 2.000 | {cases[1].label} |" in text
    assert f"| deterministic backward, causal | 1 | 0.750 | 0.750 | {cases[0].label} |" in text
    assert "decode" not in text


def test_the_readmes_headline_is_computed_from_the_rows_of_one_run():
    """Mean, range, and in how many shapes another is faster; by the command that the README names."""
    readme = (ROOT / "README.md").read_text()
    (file,) = re.findall(r"python -m bench\.summary (\S+) --headline", readme)
    told = invoke(summary.main, "--headline", ROOT / file).splitlines()
    assert len(told) == 2 and all(sentence in readme for sentence in told), told


def test_a_headline_counts_the_shapes_where_another_is_faster(tmp_path):
    rates = {"a": (110, 100), "b": (90, 100), "c": (100, 50)}
    common = dict(direction="fwd", seqlen_q=8, seqlen_k=8, head_dim=64)
    runs = [
        [dict(label=f"fwd {case}", provider=name, tflops=rate, **common)
         for case, of in rates.items() if case in cases for name, rate in zip(("fa4", "peer"), of)]
        for cases in ("ab", "bc")
    ]  # fmt: skip
    runs[1][0]["tflops"] = 1  # of a shape that the first run has
    expected = "forward: geometric mean 1.26x the fastest peer over 3 shapes (0.90x to 2.00x, slower in 1)"
    assert lines.headline(runs, "fa4") == [expected]


def test_flops_follow_the_fields_convention():
    full = square("fwd", 1024, 128, False)
    assert full.flops == 4 * full.batch * full.heads_q * 1024 * 1024 * 128
    assert square("bwd", 1024, 128, False).flops == 2.5 * full.flops
    assert square("fwd", 1024, 128, True).flops == pytest.approx(full.flops / 2, rel=2e-3)


def test_every_suite_has_distinct_labels():
    for name, cases in suites.SUITES.items():
        labels = [case.label for case in cases]
        assert len(set(labels)) == len(labels), name


def test_the_suite_of_consumer_gpus_fits_8_gb():
    """With q, k, v, out and their gradients in 16 bits, and three providers' results."""
    for case in suites.SUITES["consumer"]:
        assert 3 * 2 * case.nbytes < 3e9, case.label
        pairs = case.heads_q // case.heads_kv * case.seqlen_q * case.seqlen_k
        assert case.direction == "fwd" or 64 * pairs < 2e9, case.label  # all queries of a backward are checked


def test_dry_run_compiles_for_a_chip_that_is_not_here(monkeypatch):
    """What it compiles is as in tests of kernels, which take the time for it."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    asked = []
    monkeypatch.setattr(jit, "compile_kernel", lambda *args, chip: asked.append(chip.target))
    case = BenchCase("bwd", 2, 64, 64, 1, 1, 64, 64, True)
    monkeypatch.setitem(suites.SUITES, "smoke", (case,))
    text = invoke(run.main, "--dry-run", 80)
    kernels = re.search(r"1 cases, 0 failed; (\d+) kernels compiled for sm_80", text)
    assert kernels is not None and int(kernels[1]) == len(asked) >= 2 and set(asked) == {"sm_80"}


def test_extra_memory_is_seen_again_after_it_was_freed():
    """An allocator keeps what is freed; the second measurement must not find it there."""
    count = random.randrange(4, 32)

    def work():
        return torch.ones(count * 2**18).sum()  # count MiB

    work()  # the first call also brings in code
    for _ in range(3):
        extra = timing.peak_extra_bytes(work, torch.device("cpu"))
        if extra is None:
            pytest.skip("this system does not tell how much memory a process had at its peak")
        assert 0.95 * count <= extra / 2**20 <= count + 2


def test_a_sweep_times_rows_that_differ_in_one_column_in_turns(monkeypatch):
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    from fa4.runtime.device import chip_by_number
    from fa4.runtime.spec import AttentionSpec, ProblemSize

    for number, make in tune.SWEEPS.items():
        spec = AttentionSpec(torch.bfloat16, 128, 128, 8, 8, 0.1)
        for rows in (make().forward, make().backward):
            table, *others = rows(spec, ProblemSize(1, 4096, 4096), chip_by_number(number)).values()
            fields = [field.name for field in dataclasses.fields(table)]
            assert others and all(row != table for row in others)
            assert number != 90 or all(sum(getattr(row, f) != getattr(table, f) for f in fields) == 1 for row in others)
    calls = []
    works = {name: functools.partial(calls.append, name) for name in "ab"}
    timings = timing.measure_in_turns(works, torch.device("cpu"), seconds=0.0, rounds=2)
    assert timings.keys() == works.keys() and [name for name, _ in itertools.groupby(calls)] == list("ababa")


@pytest.mark.parametrize("n", range(1, 9))
def test_in_turns_everybody_follows_everybody_equally_often(n):
    every = timing.orders(n)
    assert all(sorted(order) == list(range(n)) for order in every)
    firsts = collections.Counter(order[0] for order in every)
    pairs = collections.Counter(pair for order in every for pair in itertools.pairwise(order))
    assert len(firsts) == n and len(set(firsts.values())) == 1
    assert len(pairs) == n * (n - 1) and len(set(pairs.values())) <= 1


def test_a_sweep_needs_its_chip():
    assert "needs an sm_90" in invoke(tune.main, "--chip", 90, "--filter", "fwd d64 full b4 ", code=1)


@pytest.mark.parametrize("table, file", [(flex.table, "nvidia-h100-80gb-hbm3_flex"), (mods.table, "emulated_mods")])
def test_tables_of_functions_are_those_of_the_rows(table, file):
    root = Path(__file__).parents[1]
    rows = (root / f"bench/results/2026-11-22_{file}.jsonl").read_text().splitlines()
    assert table(list(map(json.loads, rows))) in (root / "docs/mods.md").read_text()


def test_the_page_of_sparse_attention_has_the_rows():
    root = Path(__file__).parents[1]
    page = (root / "docs" / "sparse.md").read_text()
    files = re.findall(r"<!-- `python -m bench.sparse --show (\S+)`; a test compares -->", page)
    assert len(files) > 1
    for file in files:
        rows = [json.loads(line) for line in (root / file).read_text().splitlines()]
        assert bench_sparse.table(rows) in page


def test_sparse_attention_is_measured_and_checked_without_a_gpu():
    case = bench_sparse.SparseCase("small", 32, 96, 4, 2, 16, 16)
    row = bench_sparse.fields(bench_sparse.measure(case, 0.001, False, False, torch.device("cpu")))
    assert row["error"] < 0.02 and set(row["share"]) == {"fa4 forward", "fa4 backward", "deterministic backward"}


def test_lists_of_latents_are_measured_and_checked_without_a_gpu(monkeypatch):
    monkeypatch.setattr(bench_sparse, "_RESTS", dict(rest=0.0, runs=1, rounds=2))
    case = bench_sparse.SparseCase("small", 32, 96, 4, 1, 32, 16, latent=16)
    row = bench_sparse.fields(bench_sparse.measure_latents(case, 0.001, False, torch.device("cpu"), 16))
    assert row["error"] < 0.02 and set(row["ms"]) == set(row["tflops"]) and "fa4 rested" in row["ms"]
    assert case.flops == 2 * 32 * 16 * 4 * (32 + 16)
    lists = bench_sparse.SparseCase("small", 32, 96, 4, 2, 16, 16)
    other = bench_sparse.fields(bench_sparse.measure(lists, 0.001, False, False, torch.device("cpu")))
    assert bench_sparse.table([row, other]) == "\n\n".join(bench_sparse.table([x]) for x in (other, row))
