"""The Blackwell kernels of head dims above 256 on the emulated chip: pairs with 64 rows in each CTA."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.machine import SCHEDULES

from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, CacheSpec, ProblemSize
from fa4.sm100 import stages, tmem
from fa4.sm100.bwd.plan import Sm100Backward
from fa4.sm100.bwd.wide.kernel import parts
from fa4.sm100.bwd.widest import kernel as backward
from fa4.sm100.fwd.widest import kernel as forward
from fa4.sm100.fwd.widest.plan import WidestForward
from fa4.sm100.plan import Plan
from tests.emulated import Kernels, bits, check_forward, check_gradients, given, judge_gradients
from tests.kvcache.problem import CacheCase, build, build_beyond_float16
from tests.machine_code import machine_code
from tests.poisoned import poison_unused
from tests.widest import NAMED, PACKED

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
KERNELS = Kernels("sm100", "sm_100a", Plan)
CHIP, MANY = chip_by_number(100), ProblemSize(1, 4096, 4096)


@pytest.mark.rotates(7)
@pytest.mark.parametrize("dims", [(512, 512), (320, 264), (576, 520), (64, 328)], ids=str)
def test_sequences_of_any_length(dims, seed):
    """Columns that are whole panels and that are not, in both directions; nothing unused is read."""
    case = replace(PACKED, head_dim=dims[0], head_dim_v=dims[1])
    check_forward(KERNELS, case, seed)
    check_gradients(KERNELS, poison_unused(cases.make(case, seed)), seed, SCHEDULES[seed % len(SCHEDULES)])


@pytest.mark.rotates(14)
@pytest.mark.parametrize("case", NAMED, ids=str)
def test_named_case(case, seed):
    """logits_1e4: row maxima grow, so O is rescaled between products."""
    check_forward(KERNELS, case, seed)
    if case.head_dim_v is None or case.heads_q == case.heads_kv:
        check_gradients(KERNELS, cases.make(case, seed), seed, SCHEDULES[seed % len(SCHEDULES)])


@pytest.mark.rotates(3)
def test_gradients_have_the_same_bits_in_any_order_of_events(seed):
    """No kernel adds across CTAs: also without `deterministic`."""
    case = Case("causal", seqlen_q=150, seqlen_k=280, heads_q=2, heads_kv=1, head_dim=512, causal=True)
    problem = cases.make(case, seed)
    saved = given(problem)
    results = [
        KERNELS.gradients(problem, seed + i, schedule, None, sms, saved)
        for i, (schedule, sms) in enumerate(zip(SCHEDULES, (2, 4, 8)))
    ]
    assert len({bits(grads) for grads in results}) == 1, f"seed {seed}"
    cases.assert_right(judge_gradients(problem, results[0], saved), f"seed {seed}")


LATENT = dict(head_dim=576, head_dim_v=512, in_k=True)
CACHES = (
    CacheCase("pages_within_a_stage", (330, 0, 150), capacity=336, heads_q=8, page_size=16, sink=True, **LATENT),
    CacheCase("many_heads", (70, 600), capacity=640, queries=2, heads_q=128, page_size=64, **LATENT),
    CacheCase(
        "window", (90, 430), capacity=448, queries=(3, 7), heads_q=16, window_size=(250, 0), page_size=8, **LATENT
    ),
    CacheCase("rows_anywhere", (650, 70, 0), capacity=660, queries=3, heads_q=16, page_size=1, sink=True, **LATENT),
    CacheCase("rows_after_padding", (650, 70), capacity=660, leftpad=(9, 70), page_size=1, heads_q=128,
              window_size=(300, 0), **LATENT),
    CacheCase("rows_of_own_values", (290, 40), queries=70, capacity=512, heads_q=6, head_dim=512, head_dim_v=320,
              page_size=1),
    CacheCase("own_values", (290, 40), capacity=512, heads_q=6, head_dim=512, head_dim_v=320, page_size=256),
    # 8-bit rows, which a warpgroup converts: rows of pages of any size. A tile has 128 rows of queries and heads.
    CacheCase("bytes", (20, 300, 1), capacity=300, heads_q=16, fp8="both", **LATENT),
    CacheCase("bytes_of_many_tiles", (65, 530), capacity=576, queries=20, heads_q=16, page_size=64, fp8="tensor",
              sink=True, **LATENT),
    CacheCase("bytes_of_many_heads", (300,), capacity=304, queries=3, heads_q=128, page_size=16, dtype=torch.float16,
              fp8="tensor", **LATENT),
    CacheCase("single_rows", (650, 70), capacity=660, leftpad=(9, 70), page_size=1, heads_q=8, fp8="tensor", int8=True,
              **LATENT),
    CacheCase("bytes_appended", (257, 0), capacity=300, queries=4, new=4, heads_q=16, page_size=5, fp8="tensor",
              **LATENT),
    CacheCase("bytes_no_rope", (90, 540), capacity=540, heads_q=5, softcap=5.0, head_dim=512, head_dim_v=512, in_k=True,
              fp8="tensor"),
    CacheCase("packed_bytes", (90, 430), capacity=448, queries=(30, 7), heads_q=16, window_size=(250, 0), page_size=8,
              fp8="both", int8=True, **LATENT),
    CacheCase("rows_of_656_bytes", (65, 530), capacity=576, queries=20, heads_q=16, page_size=64, fp8="rows", sink=True,
              **LATENT),
    CacheCase("such_rows_appended", (257, 0), capacity=300, queries=4, new=4, heads_q=16, page_size=5, fp8="rows",
              **LATENT),
    CacheCase("bytes_of_own_values", (290, 40), queries=70, capacity=512, heads_q=8, heads_kv=2, head_dim=320,
              page_size=48, fp8="both"),
    CacheCase("narrow_keys", (530,), capacity=530, heads_q=2, head_dim=64, head_dim_v=336, fp8="tensor", int8=True),
    CacheCase("wide_values", (290, 130), capacity=300, leftpad=(3, 0), heads_q=4, heads_kv=2, head_dim=512,
              head_dim_v=528, dtype=torch.float16, page_size=5, fp8="heads"),
)  # fmt: skip


@pytest.mark.rotates(14)
@pytest.mark.parametrize("case", CACHES, ids=str)
def test_cache(case, seed):
    built = build(case, seed)
    with emulate("sm_100a", sms=4, seed=seed, schedule=SCHEDULES[seed % len(SCHEDULES)]):
        result = built.call(backend="sm100")
    built.assert_right(result, f"seed {seed}")


@pytest.mark.rotates(3)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_queries_beyond_float16_beside_8bit_rows(softcap, seed):
    """Rows of Q get scales of their own."""
    built = build_beyond_float16(CacheCase("far", (150,), heads_q=4, fp8="tensor", softcap=softcap, **LATENT), seed)
    with emulate("sm_100a", sms=2, seed=seed):
        result = built.call(backend="sm100")
    built.assert_right(result, f"seed {seed}")


@pytest.mark.rotates(3)
@pytest.mark.parametrize("fp8", [None, "both"])
@pytest.mark.parametrize("splits", [3, pytest.param(7, marks=pytest.mark.soak)])
def test_parts_of_the_keys(splits, fp8, seed):
    """More parts than one sequence has blocks."""
    case = CacheCase("parts", (900, 31, 0), capacity=960, heads_q=16, page_size=64, sink=True, fp8=fp8, **LATENT)
    built = build(case, seed)
    with emulate("sm_100a", sms=8, seed=seed, schedule="adversarial"):
        result = built.call(backend="sm100", num_splits=splits)
    built.assert_right(result, f"seed {seed}")


@pytest.mark.rotates(3)
def test_converted_stages_are_handed_over_without_waiting_for_loads(seed):
    """An arrival with release.cluster and fence.proxy.async.shared::cluster compile to MEMBAR.ALL.GPU, which would wait
    for the loads in flight. P has both, in each of the softmax's three loops; stages have neither."""
    built = build(CacheCase("bytes", (300,), capacity=300, heads_q=16, fp8="tensor", **LATENT), seed)
    with emulate("sm_100a", sms=2, timing=True) as gpu:
        built.call(backend="sm100", num_splits=1)
    opcodes = [instruction.opcode for instruction in gpu.launches[-1].record.kernel.instructions]
    stages = 9 + 8  # of K and V
    assert sum("mbarrier.arrive.relaxed.cluster" in opcode for opcode in opcodes) >= 2 * stages
    for slow in ("mbarrier.arrive.release.cluster", "fence.proxy.async.shared::cluster"):
        assert sum(slow in opcode for opcode in opcodes) <= 3, slow


@pytest.mark.rotates(12)
@pytest.mark.parametrize(
    "changes",
    [
        dict(cache=CacheSpec(page_size=64, dtype=E4M3)),
        dict(cache=CacheSpec(page_size=5, has_leftpad=True, dtype=INT8)),
        dict(cache=CacheSpec(page_size=64, dtype=torch.uint8), v_in_k=True),
        dict(cache=CacheSpec(page_size=1, has_leftpad=True, dtype=torch.uint8), v_in_k=True),
        dict(cache=CacheSpec(dtype=INT8), dtype=torch.float16, head_dim=512),
        dict(cache=CacheSpec(page_size=1, has_leftpad=True, dtype=INT8), head_dim=272, head_dim_v=272, heads_kv=16),
        dict(cache=CacheSpec(page_size=5, dtype=E4M3), head_dim=576, head_dim_v=576, varlen=True, heads_kv=16),
        dict(cache=CacheSpec(page_size=64, dtype=E4M3), head_dim=64, head_dim_v=336, num_splits=1, heads_kv=16),
    ],
    ids=str,
)
def test_converting_spills_nothing(changes, tmp_path, disassembler):
    """Softmax may spill around its loops."""
    spec = AttentionSpec(torch.bfloat16, 576, 512, 128, 1, 0.1, window_right=0, has_seqused_k=True)
    planned = WidestForward(replace(spec, **changes), ProblemSize(4, 1, 1 << 15), CHIP)
    code, _ = machine_code(planned, tmp_path)
    (begin, end) = (i for i, line in enumerate(code) if "USETMAXREG" in line and " 0xf0 " not in f"{line} ")
    assert end - begin > 1000
    assert not [line for line in code[begin:end] if "STL" in line or "LDL" in line]


def test_every_head_dim_fits_the_chip():
    """Shared memory and tensor memory of all kernels; a ring holds at least three stages."""
    for d in (8, *range(264, 584, 8)):
        for dv in (8, 256, 264, 320, 512, 520, 576):
            if max(d, dv) <= 256:
                continue
            spec = AttentionSpec(torch.bfloat16, d, dv, 4, 2, 0.1, needs_backward=True)
            cfg = WidestForward(spec, ProblemSize(1, 512, 4096), CHIP).cfg
            made = [(forward, cfg, cfg.kv_stages)]
            made += [
                (backward, part, part.ring_stages) for part in parts(Sm100Backward(spec, MANY, CHIP).config(False))
            ]
            for kernel, part, in_ring in made:
                assert kernel.smem_map(part, kernel.channels(part)).nbytes <= CHIP.smem_per_block, (d, dv, part)
                assert kernel.tmem_map(part).end <= tmem.COLUMNS and in_ring >= 3, (d, dv, part)


def test_columns_of_products():
    assert [stages.column_parts(columns) for columns in (8, 128, 264, 512, 576)] == [
        [128], [128], [256, 128], [256, 256], [256, 256, 128],
    ]  # fmt: skip
    assert stages.d_columns(320) == 192


@pytest.mark.parametrize(
    "dims, changes, keys",
    [((512, 512), {}, 256), ((512, 520), {}, 128), ((512, 512), dict(cache=CacheSpec(page_size=64)), 256)],
    ids=str,
)
def test_keys_of_a_block(dims, changes, keys):
    spec = AttentionSpec(torch.bfloat16, *dims, 4, 2, 0.1, **changes)
    assert WidestForward(spec, MANY, CHIP).cfg.tile_n == keys


@pytest.mark.parametrize("heads, packed", [((128, 1), 128), ((16, 1), 16), ((6, 2), 3), ((96, 1), 32), ((65, 1), 1)])
def test_heads_of_a_tile(heads, packed):
    """A CTA's 64 rows hold whole queries, or a pair's 128 rows one."""
    spec = AttentionSpec(torch.bfloat16, 576, 512, *heads, 0.1)
    assert WidestForward(spec, ProblemSize(8, 1, 8192), CHIP).cfg.packed_heads == packed
