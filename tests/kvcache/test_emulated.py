"""Caches in the kernels of three chips, each on the emulated one: right, and free of races and stray reads,
whatever is in pages that no sequence has."""

import random

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from warpcheck.machine import SCHEDULES

import fa4
from fa4.core.cache import CacheTensors
from fa4.emulator import emulate
from fa4.kvcache import values
from fa4.runtime.spec import BYTES, CacheSpec

from .named import CASES
from .problem import CacheCase, build, serves, shared_front

pytestmark = pytest.mark.rotates(8)

CHIPS = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100a"}


def judge(backend: str, name: str, seed: int, interleavings, **changes) -> None:
    """Right, and with equal bits under all interleavings."""
    built, first = build(CASES[name], seed), None
    if built.case.shared:
        shared_front(built)
    for schedule, emulator_seed in interleavings:
        with emulate(CHIPS[backend], seed=emulator_seed, schedule=schedule):
            result = built.call(backend=backend, **changes)
        where = f"seed {seed}, {schedule}"
        if first is None:
            first = result
            built.assert_right(result, where)
        assert all(torch.equal(a, b) for a, b in zip(result, first)), f"{name} differs, {where}"


# Compiling takes most of a case's time; these show each part of the kernel once.
SM80 = (
    "pages_of_1",
    "pages_of_128",
    "batch_idx",
    "leftpad_in_pages",
    "packed_append",
    "append_and_rotate_in_pages",
    "int8_append_and_rotate",
    "fp8_float16",
    "fp8_softcap",
    "rows_of_656_bytes",
    "nvfp4_append_and_rotate",
    "nvfp4_float16",
)


# Pages that hold whole blocks of keys, and others.
SM90 = (
    "chunk_in_large_pages",
    "leftpad_and_batch_idx",
    "packed_queries_dense_cache",
    "chunked_prefill",
    "pages_of_16",
    "int8_float16_chunk",
    "fp8_softcap",
    "fp8_chunk",
    "fp8_chunk_in_pages_of_5",
    "fp8_float16",
    "fp8_append_and_rotate",
    "pages_of_1",
    "leftpad_in_pages",
    "chunk_in_pages_of_5",
    "fp8_pages_of_1",
    "fp8_leftpad_in_large_pages",
    "nvfp4_in_pages",
    "nvfp4_chunk",
    "nvfp4_wide",
    "nvfp4_packed_append",
)


# Blocks in pieces and whole, by one Q tile and by two; wide heads.
SM100 = (
    "pages_of_16",
    "pages_of_128",
    "chunked_prefill",
    "leftpad_and_batch_idx",
    "packed_append",
    "softcap_and_sink_in_pages",
    "head_dim_256",
    "int8_heads_in_pages",
    "fp8_chunk",
    "pages_of_1",
    "leftpad_in_pages",
    "fp8_pages_of_1",
    "nvfp4_in_pages",
    "nvfp4_leftpad",
    "nvfp4_append",
)
SOME = {"sm80": SM80, "sm90": SM90, "sm100": SM100}


@pytest.mark.parametrize("backend, name", [(backend, name) for backend, names in SOME.items() for name in names])
def test_named_case(backend, name, seed):
    judge(backend, name, seed, [(schedule, seed) for schedule in random.Random(seed).sample(SCHEDULES, 2)])


@pytest.mark.parametrize(
    "backend, page_size, num_splits", [("sm80", 44, 0), ("sm90", 40, 0), ("sm100", 40, 0), ("sm90", 40, 3)]
)
def test_a_sequence_alone_gives_the_same_bits(backend, page_size, num_splits, seed):
    """batch_invariant, with keys in parts: where parts begin must not follow from what is in the batch, nor tiles from
    how many queries others have. A number of parts that is given is that of the cache's rows."""
    options = dict(backend=backend, batch_invariant=True, num_splits=num_splits)
    capacity = 28 * page_size
    case = CacheCase(
        "invariant", (700, 40, 1100), capacity=capacity, page_size=page_size, heads_q=4, queries=(1, 40, 2)
    )
    built = build(case, seed)
    with emulate(CHIPS[backend], seed=seed, schedule="random"):
        out, lse = built.call(**options)
    built.assert_right((out, lse), f"seed {seed}")
    one = {name: built.arguments[name][:1] for name in ("q", "cache_seqlens", "page_table")}
    one |= dict(cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32), max_seqlen_q=1)
    with emulate(CHIPS[backend], seed=seed + 1, sms=3):
        alone = built.call(**options, **one)
    assert torch.equal(alone[0], out[:1]) and torch.equal(alone[1], lse[:, :1]), f"seed {seed}"


@pytest.mark.parametrize(
    "backend, name",
    [("sm80", "dense_ragged"), ("sm80", "pages_of_128"), ("sm90", "pages_of_128"), ("sm100", "pages_of_16")],
)
def test_unchecked_lengths_beyond_the_cache_are_cut_to_it(backend, name, seed, monkeypatch):
    """Nothing outside of it is read: the emulated chip would say so. Entries of the table that are no page's are now in
    use, and are cut to the pages there are."""
    monkeypatch.setattr(values, "checks_lengths", lambda device: False)
    built = build(CASES[name], seed)
    size, before = built.case.page_size, built.arguments["k_cache"]
    capacity = before.shape[1] if size is None else size * built.arguments["page_table"].shape[1]
    wild, cut = (torch.full_like(built.arguments["cache_seqlens"], n) for n in (1 << 30, capacity))
    wild[0], cut[0] = -5, 0
    held = {name: built.arguments[name].nan_to_num(0.5) for name in ("k_cache", "v_cache")}
    results = []
    for lengths in (wild, cut):
        with emulate(CHIPS[backend], seed=seed, schedule="random"):
            results.append(built.call(backend=backend, **held, cache_seqlens=lengths))
    (out, lse), same = results
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1]), f"seed {seed}"
    assert not out[0].any() and (lse[:, 0] == -torch.inf).all(), f"seed {seed}"
    assert out.isfinite().all() and lse[:, 1:].isfinite().all(), f"seed {seed}"


@pytest.mark.parametrize("page_size", [None, 16])
def test_unchecked_rows_beyond_the_cache_are_not_appended(page_size, seed, monkeypatch):
    """Of new rows at a negative place, at the last one and far beyond it, one is written and all else is as it was."""
    monkeypatch.setattr(values, "checks_lengths", lambda device: False)
    # Groups as in other cases without pages, and with pages of 16 rows, whose kernels serve here too.
    heads = 4 if page_size is None else 2
    case = CacheCase("full", (20, 28, 0), capacity=32, new=4, queries=4, page_size=page_size, heads_q=heads)
    built = build(case, seed)
    before = built.arguments["k_cache"].nan_to_num(0.5)
    held = {"k_cache": before.clone(), "v_cache": before.clone()}
    lengths = torch.tensor([-9, 31, 1 << 30], dtype=torch.int32)
    with emulate("sm_80", seed=seed, schedule="random"):
        built.call(backend="sm80", **held, cache_seqlens=lengths)
    changed = (before != held["k_cache"]).flatten(2).any(-1)
    place = (1, 31) if page_size is None else (int(built.arguments["page_table"][1, 1]), 15)
    assert changed[place] and changed.sum() == 1, f"seed {seed}"


# On sm_90 and newer V becomes float16 in any case, so that one kernel shows both ways to convert.
NUMBERS = [(backend, torch.bfloat16, kind) for backend in CHIPS for kind in BYTES]


@pytest.mark.parametrize("backend, dtype, kind", [*NUMBERS, ("sm80", torch.float16, torch.float8_e4m3fn)], ids=str)
def test_every_number_of_8_bits_is_taken_exactly(backend, dtype, kind, seed):
    """One key a sequence, of all codes in two heads: of V as weights of 1 give them, of K as logits."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 2, 128).view(kind)
    ones = torch.eye(128, dtype=dtype).view(1, 2, 64, 128).repeat(1, 1, 2, 1)  # query i, head h: column 64 i + h % 64
    without_nan = torch.where(codes.float().isnan(), 0.0, codes.float()).to(kind)  # it spoils any sum
    descale = torch.tensor([1.0, 0.5])
    with emulate(CHIPS[backend], seed=seed, schedule="random"):
        out, lse = fa4.flash_attn_with_kvcache(
            ones, without_nan, codes, cache_seqlens=torch.ones(1, dtype=torch.int32), k_descale=descale,
            v_descale=descale, softmax_scale=1.0, return_lse=True, backend=backend,
        )  # fmt: skip
    values = codes.float()[0, 0] * descale[:, None]
    for head in range(2):
        of_rows = lse[0, 64 * head : 64 * head + 64].T.flatten()
        assert torch.allclose(of_rows, values[head].nan_to_num(0.0), rtol=1e-6, atol=0)
        numbers = values[head].isfinite()
        got = out[0, 0, 64 * head + 1].float()  # (row 1 of the lot: code 1 or 129, finite)
        assert torch.equal(got[numbers], values[head][numbers].to(dtype).float()) and got[~numbers].isnan().all()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "backend, name", [(backend, name) for backend in CHIPS for name, case in CASES.items() if serves(backend, case)]
)
def test_named_case_under_many_interleavings(backend, name, seed):
    judge(backend, name, seed, [(schedule, seed + i) for i in range(4) for schedule in SCHEDULES])
    judge(backend, name, seed, [("random", seed)], num_splits=3)


@pytest.mark.parametrize("cache", [CacheSpec(), CacheSpec(page_size=16), CacheSpec(has_leftpad=True)], ids=repr)
def test_a_record_without_tensors_is_no_argument(cache):
    """The compiler warns of one, at the first call on a cache whose rows lie one after the other."""
    stand_ins = CacheTensors.fake(cache)
    assert (stand_ins is not None) is (cache != CacheSpec())
    assert stand_ins is None or any(x is not None for x in stand_ins)
