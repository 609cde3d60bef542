"""The kernel of the exact top-k on emulated chips: the indices that sorting gives, whatever the scores are."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from warpcheck.machine import SCHEDULES

import fa4
from fa4.emulator import emulate
from fa4.indexer import radix, run
from fa4.oracle import indexer as oracle
from fa4.oracle.indexer import E4M3, Case
from fa4.runtime.device import chip_by_number, chip_of
from tests.indexer.test_torch import SPECIAL


def padded(scores):
    """The scores in rows of a multiple of 16 bytes; what follows is NaN."""
    memory = torch.full((scores.shape[0], -(-scores.shape[1] // 4) * 4), torch.nan)
    memory[:, : scores.shape[1]] = scores
    return memory[:, : scores.shape[1]]


def selected(scores, counts, topk, seed, chip="sm_80", schedule="round_robin", cfg=None):
    indices = torch.full((scores.shape[0], topk), 1 << 20, dtype=torch.int32)
    with emulate(chip, sms=2, seed=seed, schedule=schedule):
        cfg = cfg or radix.RadixConfig.of(scores.shape[1], topk)
        radix.launcher(cfg, chip_of(scores.device))(padded(scores), counts, indices)
    return indices


def check(scores, counts, topk, seed, **options):
    result = selected(scores, counts, topk, seed, **options)
    for t, count in enumerate(counts.tolist()):
        assert result[t].tolist() == oracle.topk(scores[t], count, topk), f"row {t}, topk {topk}, seed {seed}"


def scores_of(kind, rows, columns, generator):
    normal = torch.randn(rows, columns, generator=generator)
    if kind == "normal":
        return normal
    if kind == "equal":
        return torch.zeros_like(normal)
    if kind == "mostly_zero":  # as after ReLU, with zeros of both signs
        return torch.where(normal.abs() > 2.2, normal.abs(), normal.sign() * 0.0)
    if kind == "few_values":
        return (2 * normal).round()
    if kind == "rising":  # a sample of equal steps is no surprise; the largest come last
        return torch.arange(columns).float().expand(rows, -1) + 0.0
    if kind == "period":  # the steps of the sample meet the smallest scores alone: there are too many candidates
        return normal + 100.0 * (torch.arange(columns) % 8 > 0)
    values = torch.tensor(SPECIAL, dtype=torch.float32)
    return values[torch.randint(len(values), (rows, columns), generator=generator)]


KINDS = ["normal", "equal", "mostly_zero", "few_values", "rising", "period", "special"]
# (columns, counts, topk): all scores are candidates; a sample; more than fit; an odd length; fewer scores than topk.
SHAPES = [
    (300, (300, 41, 7), 40),
    (9001, (9001, 8193, 2049, 2048), 500),
    (20000, (20000, 3), 3000),
    (1, (1, 0), 1),
    (16384, (16384,), 1),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns, counts, topk", SHAPES)
def test_selection(kind, columns, counts, topk, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = scores_of(kind, len(counts), columns, generator)
    check(scores, torch.tensor(counts, dtype=torch.int32), topk, seed)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_chips_and_interleavings(chip, seed):
    generator = torch.Generator().manual_seed(seed)
    scores, counts = scores_of("mostly_zero", 3, 5000, generator), torch.tensor([5000, 2500, 100], dtype=torch.int32)
    for schedule in SCHEDULES:
        check(scores, counts, 200, seed, chip=chip, schedule=schedule)


def test_both_sources_of_the_radix_select(seed):
    """With room for candidates and without, the indices are the same."""
    generator = torch.Generator().manual_seed(seed)
    scores, counts = scores_of("few_values", 2, 6000, generator), torch.tensor([6000, 4097], dtype=torch.int32)
    results = [
        selected(scores, counts, 1000, seed, cfg=radix.RadixConfig(8192, candidates, candidates // 2))
        for candidates in (8192, 2048, 512)
    ]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]), f"seed {seed}"


@pytest.mark.parametrize(
    "chip, backend", [("sm_80", "sm80"), ("sm_80", "auto"), ("sm_90a", "sm90"), ("sm_120a", "auto")]
)
def test_topk_by_the_kernel(chip, backend, seed, monkeypatch):
    """Rows of exact scores in several chunks: the kernel chooses what sorting does."""
    monkeypatch.setattr(run, "CHUNK_BYTES", 4 * 4 * 304)
    case = Case("exact", (5, 9), (301, 77), 16, 64, E4M3, "packed", causal=True, integers=True)
    problem, launched = oracle.make(case, seed), []
    launcher = radix.launcher
    monkeypatch.setattr(radix, "launcher", lambda *arguments: launched.append(arguments) or launcher(*arguments))
    with emulate(chip, sms=2, seed=seed):
        call = dict(backend=backend, **problem.options)
        indices = fa4.indexer_topk(problem.q, problem.k, problem.weights, 24, **call)
    scores = oracle.scores(problem)
    for t, (_, count) in enumerate(problem.rows):
        assert indices[t].tolist() == oracle.topk(scores[t], count, 24), f"row {t}, seed {seed}"
    assert launched


def test_what_the_kernel_lacks(seed):
    q, k, w = torch.zeros(1, 1, 8, 16), torch.zeros(1, 5, 16), torch.zeros(1, 1, 8)
    with pytest.raises(fa4.NoBackend, match="cannot select keys: needs an NVIDIA GPU of compute capability 8"):
        fa4.indexer_topk(q, k, w, 2, backend="sm80")
    with emulate("sm_80", sms=2, seed=seed):
        with pytest.raises(fa4.NoBackend, match="cannot select keys: lacks scores of float64"):
            fa4.indexer_topk(q.double(), k.double(), w.double(), 2, backend="sm80")
        with pytest.raises(fa4.NoBackend, match="backend 'sm80' lacks scores of the indexer"):
            fa4.indexer_scores(q, k, w, backend="sm80")
        with pytest.raises(fa4.NoBackend, match="'sm90' cannot compute scores of the indexer: needs sm_90"):
            fa4.indexer_topk(q, k, w, 2, backend="sm90")


@pytest.mark.parametrize("topk", [64, 100, 341, 512, 682, 683, 1000, 1365, 1366, 2048, 2730])
def test_scores_above_the_bound_of_a_small_sample_fit(topk):
    """Where the sample is smaller than possible: random scores that reach its bound fit in nearly all rows."""
    for keys in (1 << 13, 1 << 14, 1 << 16, 1 << 17):
        cfg = radix.RadixConfig.of(keys, topk)
        for count in (keys // 2 + 1, keys):
            share, step = topk * cfg.sample / count, count / cfg.sample
            rank = int(share + 4 * share**0.5) + 2  # as `select_row` has it
            if cfg.candidates < count and rank < cfg.sample < cfg.candidates // 2:
                assert step * (rank + 3 * rank**0.5) <= cfg.candidates, f"{cfg}, {count} scores"


@pytest.mark.parametrize("number", [80, 86, 90, 100, 120])
def test_long_rows_fit(number):
    """128k keys fit on every chip, 512k on those with 227 KB of shared memory."""
    chip = chip_by_number(number)
    for keys, fits in ((1 << 17, True), (1 << 19, number in (90, 100))):
        cfg = radix.RadixConfig.of(keys, 2048)
        assert (cfg.smem.nbytes <= chip.smem_per_block) == fits
    radix._PROGRAM.compile(radix.RadixConfig.of(1 << 17, 2048), chip)
