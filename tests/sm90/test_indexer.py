"""Hopper's kernel of the indexer's scores on the emulated chip, against the formula in float64."""

import functools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from warpcheck.machine import SCHEDULES

import fa4
from fa4.emulator import emulate
from fa4.indexer import run
from fa4.oracle import indexer as oracle
from fa4.oracle import reference
from fa4.oracle.indexer import E4M3, Case
from fa4.runtime.device import chip_by_number
from fa4.sm90.indexer import plan
from fa4.sm90.indexer.config import ScoresConfig
from fa4.sm90.indexer.kernel import KERNEL, channels, smem_map
from tests.machine_code import machine_code

# A CTA has 8 rows of 64 heads, 32 of 16. Blocks have 128 keys.
CASES = (
    Case("e4m3", (11, 11), (300, 300), 64, 128, E4M3, causal=True, scales=True),
    Case("one_key", (1, 1), (1, 1), 64, 128, E4M3),
    Case("bf16_packed", (7, 0, 30, 1), (200, 9, 130, 0), 16, 64, torch.bfloat16, "packed", causal=True),
    Case("short_sequences", (2, 1, 3, 1, 2), (40, 257, 3, 128, 129), 64, 128, torch.float16, "packed"),
    Case("fewer_keys", (40, 40), (30, 30), 8, 128, torch.bfloat16, causal=True),
    Case("used", (17, 17, 17), (140, 140, 140), 32, 64, E4M3, used=(140, 0, 17), causal=True, scales=True),
    Case("odd_rows", (5, 5), (150, 150), 40, 32, E4M3),
    Case("one_row_each", (4, 4), (150, 150), 128, 128, E4M3, scales=True),
    Case("pages", (3, 3), (300, 129), 64, 128, E4M3, "pages", True, 64, True),
    Case("small_pages", (3, 9, 1), (300, 129, 5), 64, 64, E4M3, "pages", True, 16, packed_pages=True),
    Case("large_pages", (8, 8), (400, 129), 16, 128, torch.bfloat16, "pages", False, 256),
    Case("few_columns", (6, 6), (131, 131), 24, 16, E4M3, causal=True),
)
named = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
DRAWS = 4


def of_tensor_cores(case):
    """Products as the chip computes them."""
    bits = dict(sum_bits=14) if case.dtype == E4M3 else {}
    return functools.partial(reference.tensor_core_products, operand=case.dtype, **bits)


def error(result, expected):
    """The largest error in units of the largest score."""
    assert torch.equal(result.isinf(), expected.isinf())
    result, expected = (x.double().masked_fill(expected.isinf(), 0.0) for x in (result, expected))
    return float((result - expected).abs().max() / expected.abs().max())


def check(case, result, seed):
    problem = oracle.make(case, seed)
    draws = [oracle.make(case, seed + i) for i in range(DRAWS)]
    allowed = 2 * max(error(oracle.scores(x, torch.float32, of_tensor_cores(case)), oracle.scores(x)) for x in draws)
    assert error(problem.flat(result), oracle.scores(problem)) <= allowed, f"{case}, seed {seed}"


@pytest.mark.rotates(2)
@named
def test_scores(case, seed, monkeypatch):
    """Equal bits under two schedules, with one CTA for a tile's keys and with several."""
    problem, results = oracle.make(case, seed), []
    for schedule, blocks in zip(random.Random(seed).sample(SCHEDULES, 2), (32, 1)):
        monkeypatch.setattr(plan, "LEAST_BLOCKS", blocks)
        with emulate("sm_90a", sms=2, seed=seed, schedule=schedule):
            call = dict(backend="sm90", **problem.options)
            results.append(fa4.indexer_scores(problem.q, problem.k, problem.weights, **call))
    check(case, results[0], seed)
    assert torch.equal(*results), f"{case}, seed {seed}"


@pytest.mark.soak
@named
def test_scores_under_many_interleavings(case, seed, monkeypatch):
    monkeypatch.setattr(plan, "LEAST_BLOCKS", 1)
    problem, first = oracle.make(case, seed), None
    for schedule in SCHEDULES:
        for i in range(4):
            with emulate("sm_90a", sms=2, seed=seed + i, schedule=schedule):
                call = dict(backend="sm90", **problem.options)
                result = fa4.indexer_scores(problem.q, problem.k, problem.weights, **call)
            first = result if first is None else first
            assert torch.equal(result, first), f"{case} under {schedule}, seed {seed}"
    check(case, first, seed)


def test_a_nan_in_a_key_shows_in_its_column_alone(seed):
    """ReLU keeps NaN."""
    problem = oracle.make(replace(CASES[0], causal=False), seed)
    clean, spoilt = problem.k.float(), problem.k.float()
    spoilt[0, 77, 5] = torch.nan
    with emulate("sm_90a", sms=2, seed=seed):
        a, b = (
            fa4.indexer_scores(problem.q, k.to(E4M3), problem.weights, backend="sm90", **problem.options)
            for k in (clean, spoilt)
        )
    others = torch.arange(a.shape[-1]) != 77
    assert torch.equal(a[..., others], b[..., others]) and torch.equal(a[1], b[1])
    assert b[0, :, 77].isnan().all() and not a.isnan().any()


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[9]], ids=lambda case: case.name)
def test_topk_of_chunks(case, seed, monkeypatch):
    """Chunks of rows that are no multiple of a CTA's have the scores of the whole, so the same keys are chosen."""
    problem = oracle.make(case, seed)
    with emulate("sm_90a", sms=2, seed=seed):
        scores = fa4.indexer_scores(problem.q, problem.k, problem.weights, backend="sm90", **problem.options)
        monkeypatch.setattr(run, "CHUNK_BYTES", 5 * 4 * scores.shape[-1])
        call = dict(return_scores=True, **problem.options)
        indices, values = fa4.indexer_topk(problem.q, problem.k, problem.weights, 20, **call)
    flat, scores, values = problem.flat(indices), problem.flat(scores), problem.flat(values)
    for t, (_, count) in enumerate(problem.rows):
        expected = oracle.topk(scores[t], count, 20)
        assert flat[t].tolist() == expected, f"row {t}, seed {seed}"
        assert values[t].tolist() == [scores[t, i].item() if i >= 0 else -torch.inf for i in expected]


def test_strided_and_unaligned_tensors(seed):
    """Queries with other strides are copied; keys with padded rows are read in place."""
    case = replace(CASES[0], scales=False, dtype=torch.bfloat16)
    problem = oracle.make(case, seed)
    q = problem.q.transpose(1, 2).contiguous().transpose(1, 2)
    k = torch.cat((problem.k, problem.k + torch.nan), -1)[..., : case.head_dim]
    with emulate("sm_90a", sms=2, seed=seed):
        call = dict(backend="sm90", **problem.options)
        result = fa4.indexer_scores(q, k, problem.weights, **call)
        assert torch.equal(result, fa4.indexer_scores(problem.q, problem.k, problem.weights, **call))


def call_of(**changes):
    case = Case("", (3, 3), (40, 40), **(dict(heads=16, head_dim=64, dtype=torch.bfloat16) | changes))
    problem = oracle.make(case, 0)
    return dict(q=problem.q, k=problem.k, weights=problem.weights, **problem.options)


REFUSED = {
    "float32": ("lacks dtype float32", call_of(dtype=torch.float32)),
    "heads": ("lacks 12 heads", call_of(heads=12)),
    "many_heads": ("lacks 136 heads", call_of(heads=136)),
    "head_dim": ("lacks head_dim 20", call_of(head_dim=20)),
    "wide": ("lacks head_dim 192", call_of(head_dim=192)),
    "odd_pages": ("lacks pages of 24 rows", call_of(form="pages", page_size=24)),
    "gradients": ("lacks gradients", call_of() | dict(q=call_of()["q"].requires_grad_())),
    "unaligned": ("whose rows do not start at", call_of() | dict(k=torch.zeros(2, 40, 65).bfloat16()[..., :64])),
}


@pytest.mark.parametrize("text, call", REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_lacks(text, call, seed):
    """The named backend says why, and otherwise torch serves."""
    with emulate("sm_90a", sms=2, seed=seed):
        with pytest.raises(fa4.NoBackend, match=f"backend 'sm90' cannot compute scores of the indexer: .*{text}"):
            fa4.indexer_scores(**call, backend="sm90")
        result = fa4.indexer_scores(**call)
    assert torch.equal(result, fa4.indexer_scores(**call, backend="torch"))


def test_other_chips():
    call = call_of()
    with pytest.raises(fa4.NoBackend, match="needs sm_90 \\(this is cpu\\)"):
        fa4.indexer_scores(**call, backend="sm90")
    with pytest.raises(fa4.NoBackend, match="backend 'sm100' lacks scores of the indexer"):
        fa4.indexer_scores(**call, backend="sm100")


CHIP = chip_by_number(90)
# Largest and smallest products, and each kind of page.
CONFIGS = [
    dict(torch_dtype=dtype, head_dim=head_dim, heads=heads, page_size=page_size, has_k_descale=scaled)
    for dtype, head_dim, heads, page_size, scaled in (
        (torch.float8_e4m3fn, 128, 64, 0, True),
        (torch.float8_e4m3fn, 16, 8, 8, False),
        (torch.float8_e4m3fn, 128, 120, 64, True),
        (torch.bfloat16, 128, 64, 0, False),
        (torch.bfloat16, 128, 128, 16, False),
        (torch.float16, 8, 16, 256, False),
    )
]


@pytest.mark.rotates(3)
@pytest.mark.parametrize("options", CONFIGS, ids=lambda options: "-".join(str(x) for x in options.values()))
def test_kernels_compile_and_fit(options):
    tokens = max(plan.COLUMNS // options["heads"], 1)
    shape = dict(tokens=tokens, tile_n=plan.TILE_N, smem_bytes=CHIP.smem_per_block)
    cfg = ScoresConfig(**options, **shape)
    assert smem_map(cfg, channels(cfg)).nbytes <= CHIP.smem_per_block and cfg.stages >= 2
    KERNEL.compile(cfg, CHIP)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=["e4m3", "bf16"])
def test_products_stay_in_flight_and_nothing_spills(dtype, disassembler, tmp_path):
    """ptxas waits after each wgmma of products that it cannot keep in flight; then each has a fence of its own."""
    sizes = dict(head_dim=128, heads=64, tokens=2, tile_n=plan.TILE_N, page_size=0, smem_bytes=CHIP.smem_per_block)
    cfg = ScoresConfig(torch_dtype=dtype, has_k_descale=True, **sizes)
    code, _ = machine_code(SimpleNamespace(kernel=KERNEL, cfg=cfg, chip=CHIP), tmp_path)
    products = cfg.parts
    assert sum("GMMA" in line for line in code) == products * cfg.kq.steps
    assert sum("WARPGROUP.ARRIVE" in line for line in code) == products
    assert not [line for line in code if line.startswith(("STL", "LDL"))]
