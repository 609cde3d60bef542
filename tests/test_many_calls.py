"""Many calls, from threads and from a forked process: what is kept of them does not grow, and none gets another's."""

import gc
import os
import signal
import threading

import pytest
import torch

import fa4
from fa4.kvcache import calls as cache_calls
from fa4.mods.frontend import trace_cache
from fa4.runtime.device import chip_by_number, emulating
from fa4.torch_ops import calls, checks
from fa4.torch_ops.signature import MAX_ENTRIES, MAX_OPTIONS, routes


def problem(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 7, 2, 8, generator=generator) for _ in range(3)]


def packed(q, k, v, bounds, **options):
    rows = [x[0, : bounds[-1]] for x in (q, k, v)]
    lengths = torch.tensor(bounds, dtype=torch.int32)
    return fa4.flash_attn_varlen_func(*rows, cu_seqlens_q=lengths, cu_seqlens_k=lengths, **options)


def shifted(by):
    return lambda score, b, h, q_idx, kv_idx: score + by * (q_idx - kv_idx)


# Calls that share what they can: dense ones of one shape and of others, packed ones of other batches, modes, functions.
CALLS = {
    "causal": lambda q, k, v: fa4.flash_attn_func(q, k, v, causal=True),
    "window": lambda q, k, v: fa4.flash_attn_func(q, k, v, window_size=(2, 0)),
    "scale": lambda q, k, v: fa4.flash_attn_func(q, k, v, softmax_scale=0.25),
    "softcap": lambda q, k, v: fa4.flash_attn_func(q, k, v, softcap=3.0),
    "deterministic": lambda q, k, v: fa4.flash_attn_func(q, k, v, deterministic=True, causal=True),
    "fewer_rows": lambda q, k, v: fa4.flash_attn_func(q[:, :4], k, v, causal=True),
    "two_sequences": lambda q, k, v: packed(q, k, v, (0, 3, 7), causal=True),
    "other_two": lambda q, k, v: packed(q, k, v, (0, 2, 5), causal=True),
    "three_sequences": lambda q, k, v: packed(q, k, v, (0, 2, 3, 6), causal=True),
    "one_row": lambda q, k, v: packed(q, k, v, (0, 1), causal=True),
    "score_mod": lambda q, k, v: fa4.flash_attn_func(q, k, v, score_mod=shifted(0.1)),
    "other_score_mod": lambda q, k, v: fa4.flash_attn_func(q, k, v, score_mod=shifted(-0.2)),
    "cache": lambda q, k, v: fa4.flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), causal=True),
}


def run(call, seed, trains):
    """out, and gradients if the call has any."""
    tensors = [x.requires_grad_(trains) for x in problem(seed)]
    with torch.set_grad_enabled(trains):
        out = call(*tensors)
    if not out.requires_grad:
        return [out]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


def test_threads_with_other_options_get_their_own_results(seed):
    expected = {(name, trains): run(call, seed, trains) for name, call in CALLS.items() for trains in (False, True)}
    wrong = []
    begin = threading.Barrier(len(expected))

    def work(name, trains):
        begin.wait()
        for _ in range(30):
            try:
                got = run(CALLS[name], seed, trains)
                if not all(map(torch.equal, got, expected[name, trains])):
                    wrong.append((name, trains))
            except Exception as error:
                wrong.append((name, trains, error))

    threads = [threading.Thread(target=work, args=key) for key in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_goes_on(seed):
    """With what its parent found, and finds more."""
    expected = {name: run(call, seed, False) for name, call in CALLS.items()}
    known = [name for i, name in enumerate(CALLS) if i % 2]
    routes.clear()
    for name in known * 4:
        run(CALLS[name], seed, False)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        right = all(all(map(torch.equal, run(call, seed, False), expected[name])) for name, call in CALLS.items())
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert all(all(map(torch.equal, run(CALLS[name], seed, False), expected[name])) for name in CALLS)


def _many(count):
    """As many calls as asked for, of changing sizes, options and functions, none of them launched."""
    q, k, v = (torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    pages, table = torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 512, dtype=torch.int32)
    used = torch.ones(1, dtype=torch.int32)
    bounds = {rows: torch.tensor([0, rows // 2, rows], dtype=torch.int32) for rows in range(2, 65)}
    window = fa4.masks.sliding_window(3)
    blocks = fa4.create_block_mask(fa4.masks.causal, None, None, 64, 64, device="cpu")
    kinds = (
        lambda i: fa4.flash_attn_func(q, k, v, causal=True),
        lambda i: fa4.flash_attn_func(q, k, v, softmax_scale=1 / (1 + i // 20 % 10_000)),
        lambda i: fa4.flash_attn_func(q[:, : 1 + i % 64], k, v),
        lambda i: fa4.flash_attn_varlen_func(
            q[0, : (n := 2 + i % 63)], k[0, :n], v[0, :n], cu_seqlens_q=bounds[n], cu_seqlens_k=bounds[n],
            max_seqlen_q=64 + i % 500, max_seqlen_k=64 + i % 700,
        ),
        lambda i: fa4.flash_attn_with_kvcache(
            q[:, :1], pages, pages, cache_seqlens=used, page_table=table, max_seqlen_k=1 + i % 8192
        ),
        lambda i: fa4.flash_attn_func(q, k, v, score_mod=shifted(1 + i)),  # another function in each call
        lambda i: fa4.flash_attn_func(q[:, : 1 + i % 64], k, v, mask_mod=window),
        lambda i: fa4.flash_attn_func(q, k, v, block_mask=blocks),
    )  # fmt: skip
    for i in range(count):
        kinds[i % len(kinds)](i // len(kinds))


def _kept():
    guards = (calls._dense.last, calls._packed.last, cache_calls.plain_calls.last)
    assert len(routes) <= MAX_ENTRIES and all(len(guard._calls) <= MAX_OPTIONS for guard in guards)
    assert len(trace_cache._traces) <= trace_cache._MOST_TRACES
    return len(trace_cache._cached_mods) + sum(
        len(x._routes) for _, x in routes._values.values() if isinstance(x, calls.CachedCall)
    )


def _resident_bytes():
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def unlaunched(asked, monkeypatch):
    monkeypatch.setattr(checks, "checks_lengths", lambda device: False)


def test_what_is_kept_of_calls_is_bounded(unlaunched):
    with emulating(chip_by_number(90)):
        _many(5_000)
        gc.collect()
        kept, objects = _kept(), len(gc.get_objects())
        _many(5_000)
        gc.collect()
    assert _kept() <= kept + MAX_ENTRIES and len(gc.get_objects()) < 1.2 * objects


@pytest.mark.soak
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is told by /proc")
def test_a_million_calls_take_no_more_memory(unlaunched):
    with emulating(chip_by_number(90)):
        _many(200_000)
        gc.collect()
        before = _resident_bytes()
        _many(1_000_000)
        gc.collect()
    assert _resident_bytes() - before < 32 << 20
    _kept()
