"""Calls whose sizes change with each: decode steps of a cache that grows, packed batches that all differ."""

import random
import statistics
import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch

import fa4
from fa4.kvcache import api as cache_api
from fa4.kvcache import calls as cache_calls
from fa4.oracle.cases import Case, make
from fa4.runtime import dispatch, jit
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import ProblemSize, rounded, rounded_keys
from fa4.torch_ops import calls, checks
from fa4.torch_ops.signature import routes

CHIPS = (80, 90, 100)


def test_a_size_is_rounded_up_by_an_eighth_at_most():
    for n in range(1, 20_000):
        assert n <= rounded(n) <= n + n // 8 and rounded(rounded(n)) == rounded(n)
        assert (rounded(n) == n or n > 64) and rounded_keys(n) == rounded(max(n, 128))
    assert len({rounded_keys(n) for n in range(1 << 17)}) < 90 and rounded_keys(0) == 0 == rounded(0)


@pytest.fixture
def host_only(asked, monkeypatch):
    """Nothing is launched, and no values are looked at, as on a GPU. The kernels that calls ask for."""
    monkeypatch.setattr(checks, "checks_lengths", lambda device: False)
    monkeypatch.setattr(cache_api, "check_values", lambda *_: None)
    for known in (routes, calls._dense, calls._packed, cache_calls.plain_calls):
        known.clear()
    return asked


def decode(**changes):
    """A step of four sequences on pages of a cache with room for 4096 rows each."""
    zeros = {"q": (4, 1, 8, 128), "k_cache": (8, 16, 2, 128), "v_cache": (8, 16, 2, 128)}
    given = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in zeros.items()}
    given |= dict(cache_seqlens=torch.ones(4, dtype=torch.int32), page_table=torch.zeros(4, 256, dtype=torch.int32))
    given |= dict(causal=True) | changes
    return lambda max_seqlen_k: fa4.flash_attn_with_kvcache(max_seqlen_k=max_seqlen_k, **given)


def packed_batches(seed, count, differ=True, **options):
    """Calls on fresh tensors: batches of other numbers of other lengths, or of the same."""
    draw = random.Random(seed)
    for i in range(count):
        if i == 0 or differ:
            lengths = [draw.randrange(200, 300), *(draw.randrange(1, 300) for _ in range(draw.randrange(1, 12)))]
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        q, k, v = (torch.zeros(sum(lengths), 2, 64, dtype=torch.bfloat16) for _ in range(3))
        sizes = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
        yield lambda q=q, k=k, v=v, sizes=sizes: fa4.flash_attn_varlen_func(q, k, v, **sizes, causal=True, **options)


@pytest.mark.parametrize("number", CHIPS)
@pytest.mark.parametrize("shape", [(4, 1, 8, 128), (4, 5, 8, 128)], ids=["one_query", "five_queries"])
def test_a_cache_that_grows_compiles_nothing_after_the_first_step(host_only, number, shape):
    """Parts of keys, which longer sequences are cut into, and what joins them are other kernels."""
    with emulating(chip_by_number(number)):
        step = decode(q=torch.zeros(shape, dtype=torch.bfloat16))
        step(100)
        kernels = len(host_only)
        for length in range(101, 4097, 9):
            step(length)
        kinds = Counter(known.kind for known in routes._values)
    assert kernels > 1 and len(host_only) == kernels
    assert dispatch.planned.cache_info().currsize < 60 and kinds == {"cache": 1}


def test_a_cache_of_one_size_compiles_for_that_one(host_only):
    with emulating(chip_by_number(90)):
        for _ in range(3):
            decode()(None)
        whole = len(host_only)
        decode(num_splits=1)(100)
    assert whole == 2  # the kernel and what joins its parts
    assert len(host_only) == whole + 1


@pytest.mark.parametrize("number", CHIPS)
def test_packed_batches_that_differ_share_plans_and_kernels(host_only, number, seed):
    with emulating(chip_by_number(number)):
        batches = [*packed_batches(seed, 200)]
        kernels = 0
        for i, batch in enumerate(batches):
            batch()
            kernels = len(host_only) if i == 100 else kernels
        assert len(host_only) == kernels
    kinds = Counter(known.kind for known in routes._values)
    assert kinds["packed"] == 1 and kinds["operator"] < 150 and len(calls._packed.last._calls) == 1


def test_packed_batches_that_differ_are_right(seed):
    """On the path in torch, by the oracle's case: plans of rounded sizes, results of the batch's own."""
    draw = random.Random(seed)
    for i in range(6):
        lengths = tuple((draw.randrange(0, 90), draw.randrange(1, 90)) for _ in range(draw.randrange(1, 5)))
        inputs = make(Case(f"batch{i}", lengths=lengths, head_dim=8, causal=True, dtype=torch.float32), seed + i).inputs
        tensors = [x.detach() for x in inputs[:3]]
        bounds = dict(cu_seqlens_q=inputs.cu_seqlens_q, cu_seqlens_k=inputs.cu_seqlens_k)
        out = fa4.flash_attn_varlen_func(*tensors, **bounds, causal=True)
        ends = [*zip(inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist())]
        for (q0, k0), (q1, k1) in pairwise(ends):
            alone = fa4.flash_attn_func(tensors[0][None, q0:q1], *(x[None, k0:k1] for x in tensors[1:]), causal=True)
            torch.testing.assert_close(out[q0:q1], alone[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(max_seqlen_k=-1), "max_seqlen_k is -1"),
        (dict(max_seqlen_q=True), "max_seqlen_q is a bool"),
        (dict(v=torch.zeros(9, 2, 8)), "v has shape"),
        (dict(cu_seqlens_k=torch.zeros(5, dtype=torch.int32)), "cu_seqlens_k has shape"),
        (dict(seqused_k=torch.zeros(4, dtype=torch.int32)), "seqused_k has shape"),
        (dict(cu_seqlens_q=torch.zeros((3, 1), dtype=torch.int32)), "cu_seqlens_q has shape"),
        (dict(cu_seqlens_q=None), "cu_seqlens_q is a NoneType"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_one_another_are_refused_at_each_call(wrong, message):
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    right = dict(q=torch.zeros(8, 2, 8), k=torch.zeros(8, 2, 8), v=torch.zeros(8, 2, 8))
    right |= dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, seqused_k=torch.ones(2, dtype=torch.int32))
    for _ in range(4):
        fa4.flash_attn_varlen_func(**right)
    with pytest.raises((TypeError, ValueError), match=message):
        fa4.flash_attn_varlen_func(**right | wrong)
    fa4.flash_attn_varlen_func(**right)


def test_rows_of_which_there_is_one_have_any_stride(seed):
    """Those of more rows must be whole vectors: what is known of one row says nothing of them."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(400, generator=generator).bfloat16()

    def rows(count):
        return memory.as_strided((count, 2, 8), (19, 8, 1))

    for count in (1, 1, 1, 5, 5, 5, 1):
        bounds = torch.tensor([0, count], dtype=torch.int32)
        x = rows(count)
        out = fa4.flash_attn_varlen_func(x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        dense = x.contiguous()[None]
        torch.testing.assert_close(out, fa4.flash_attn_func(dense, dense, dense)[0])


def test_bounds_of_a_cache_are_checked_at_each_call():
    step = decode()
    for _ in range(3):
        step(9)
    for wrong in (-1, True, 2.5):
        with pytest.raises((TypeError, ValueError), match="max_seqlen_k is"):
            step(wrong)


def _functions_entered(function, numbers):
    """Of Python and of C, by each of the calls; the median."""
    counts = []
    for i in numbers:
        entered = 0

        def note(frame, event, argument):
            nonlocal entered
            entered += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            function(i)
        finally:
            sys.setprofile(None)
        counts.append(entered)
    return statistics.median(counts)


_slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.5, 0.25, 0.125, 0.0625])


def _sloped(score, b, h, q_idx, kv_idx):
    return score - _slopes[h] * (q_idx - kv_idx)


def _even_rows(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) | (kv_idx % 2 == 0)


OPTIONS = {
    "plain": {},
    "score_mod": dict(score_mod=_sloped),
    "mask_mod": dict(mask_mod=_even_rows),
    "ready_made": dict(score_mod=fa4.scores.softcap(20.0)),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["cache", "packed"])
def test_changing_sizes_take_the_host_no_other_way_than_the_same_again(host_only, kind, options, seed):
    """Packed batches that never came before, beside fresh tensors of the sizes that came last. Counted, not timed."""
    count, options = 200, OPTIONS[options]
    with emulating(chip_by_number(90)):
        if kind == "cache":
            step = decode(**options)
            again, changing = (lambda i: step(1500)), (lambda i: step(1000 + 3 * (i % 1000)))
        else:
            alike = [*packed_batches(seed, count, differ=False, **options)]
            different = [*packed_batches(seed + 1, 3 * count, **options)]
            again, changing = (lambda i: alike[i]()), (lambda i: different[i]())
        for i in range(20):
            again(i)
        for i in range(count, 3 * count if kind == "packed" else 2 * count):
            changing(i)
        kernels = len(host_only)
        same, others = _functions_entered(again, range(count)), _functions_entered(changing, range(count))
    assert len(host_only) == kernels
    assert 20 < same < 250 and others <= same + 15, (same, others)


def test_a_launch_of_packed_sequences_has_their_own_sizes(monkeypatch, asked):
    """A plan is made for rounded ones; grids are as large as they must be."""
    launched = []
    monkeypatch.setattr(jit, "_through_disk", lambda *_: lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(checks, "checks_lengths", lambda device: False)
    bounds = torch.tensor([0, 1001, 1203], dtype=torch.int32)
    x = torch.zeros(1203, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    for number in CHIPS:
        launched.clear()
        with emulating(chip_by_number(number)):
            sizes = dict(max_seqlen_q=1001, max_seqlen_k=1001)
            out = fa4.flash_attn_varlen_func(x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **sizes)
            torch.autograd.grad(out.sum(), x)
        numbers = [x for call in launched for x in call if isinstance(x, tuple) and isinstance(x[0], int)]
        assert numbers.count(ProblemSize(2, 1001, 1001)) == 1, number
        assert [x[:2] for x in numbers].count((1001, 2)) == 1, number
