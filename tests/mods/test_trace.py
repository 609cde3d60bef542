"""Tracing: what a graph depends on, what is refused and how, when a function is traced again."""

import gc
import re
import weakref

import pytest
import torch

import fa4
from fa4.mods.frontend.call import cached_trace
from fa4.mods.frontend.trace import ModError, trace_mask, trace_score
from fa4.mods.ir.graph import parse

from .programs import MASKS, SCORES


@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_a_graph_is_its_text(name):
    if name in MASKS:
        graph = trace_mask(MASKS[name]).graph
    else:
        graph = trace_score(SCORES[name].of(torch.float32)[0]).graph
    assert parse(graph.text) == graph and hash(parse(graph.text)) == hash(graph)


def windows(width):
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= width) & (q_idx >= kv_idx)


def test_numbers_and_tensors_are_no_part_of_a_graph():
    """Another window, cap or table: the same kernel."""
    assert trace_mask(windows(7)).graph == trace_mask(windows(1000)).graph
    assert trace_mask(windows(7)).numbers == (7,)
    assert trace_score(fa4.scores.softcap(3.0)).graph == trace_score(fa4.scores.softcap(50.0)).graph
    short, long = (trace_score(fa4.scores.temperature(torch.randn(n))).graph for n in (2, 8))
    assert short == long
    trained = trace_score(fa4.scores.temperature(torch.randn(2, requires_grad=True))).graph
    assert trained != short and trained.scatters and not short.scatters


def test_what_is_special_stays_in_the_code():
    """Comparing with 0 or scaling by 1 costs no input, and a divisor decides how to divide."""
    traced = trace_mask(lambda b, h, q_idx, kv_idx: (kv_idx * 1 + 0 >= 0) & (q_idx // 128 == kv_idx // 128))
    assert not traced.numbers and "mul" not in {node.op for node in traced.graph.nodes}


def branches(score, b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return score
    return score * 2


TABLE, LONG, SQUARE = torch.randn(8), torch.randn(300), torch.randn(3, 3)
NESTED = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged)
SPARSE, COMPLEX = TABLE.to_sparse(), torch.randn(8, dtype=torch.complex64)
REFUSED = {
    "branches on a value": branches,
    "uses erfinv, which has no counterpart": lambda score, b, h, q_idx, kv_idx: torch.erfinv(score),
    r"returned a tensor of shape \(8,\), expected a 0-dim one": lambda score, b, h, q_idx, kv_idx: score * TABLE,
    r"uses a tensor of shape \(300,\) as a whole, expected at most": lambda *_: torch.dot(LONG, LONG),
    r"uses a tensor of shape \(3, 3\) as a whole": lambda score, b, h, q_idx, kv_idx: score * SQUARE.sum(),
    "indexes a computed tensor": lambda score, b, h, q_idx, kv_idx: score + (TABLE * score)[h],
    "as a Python index": lambda score, b, h, q_idx, kv_idx: score + [1, 2, 3][h],
    "indexes a tensor by slice": lambda score, b, h, q_idx, kv_idx: score + TABLE[h : h + 1],
    "indexes an axis of 8 entries by 8": lambda score, b, h, q_idx, kv_idx: score + TABLE[8],
    r"indexes a tensor of shape \(8,\) by 2 indices": lambda score, b, h, q_idx, kv_idx: score + TABLE[h, b],
    "expected 0-dim integers": lambda score, b, h, q_idx, kv_idx: score + TABLE[score],
    "reads a value": lambda score, b, h, q_idx, kv_idx: score + kv_idx.item(),
    r"returned a tensor of shape \(8,\)|as a whole": lambda score, b, h, q_idx, kv_idx: TABLE,
    "returned 3.0, expected a tensor": lambda score, b, h, q_idx, kv_idx: 3.0,
    "returned torch.bool, expected a floating dtype": lambda score, b, h, q_idx, kv_idx: score > 0,
    r"^score_mod .*<lambda>: reads a value": lambda score, b, h, q_idx, kv_idx: score + torch.arange(h)[0],
    "index 9 is out of bounds for dimension 0 with size 8": lambda score, b, h, *_: score + torch.arange(8)[9],
    "uses rand, which has no counterpart": lambda score, b, h, q_idx, kv_idx: score + torch.rand(8)[h],
    "uses normal_, which has no counterpart": lambda score, b, h, *_: score + torch.zeros(8).normal_()[h],
    r"shape \(2097152,\) as a whole": lambda score, b, h, *_: score + (torch.arange(1 << 21) * 2)[h],
    r"writes what it computed into a tensor of shape \(8,\)": lambda score, *_: torch.zeros(8).__setitem__(0, score),
    "uses bucketize, .* counterpart in kernels; .* counts boundaries": lambda score, *_: torch.bucketize(score, TABLE),
    "uses lgamma, which has no counterpart": lambda score, *_: torch.lgamma(score),
    "uses add with out, expected its result": lambda score, *_: torch.add(score, 1, out=score),
    "in place that shares its memory with another": lambda score, *_: score.view(()).add_(1),
    "result type Float can't be cast to the desired output": lambda score, b, h, *_: score + h.add_(0.5),
    "captured a nested tensor, expected a plain one": lambda score, b, h, *_: score + NESTED[0][h],
    "captured a tensor of layout torch.sparse_coo": lambda score, b, h, *_: score + SPARSE[h],
    "captured a tensor of dtype torch.complex64": lambda score, b, h, *_: score + COMPLEX[h].real,
    "uses pow in a form which has no counterpart .*: powers of integers": lambda score, b, h, *_: score + h**5,
    "uses hardshrink_backward, which has no counterpart": lambda score, *_: torch.hardshrink(score),
    "derivative for 'inplace version of asinh' is not": lambda score, *_: score.asinh_(),
    "uses randn, which has no counterpart": lambda score, b, h, q_idx, kv_idx: score + torch.randn(()),
    "uses bernoulli, which has no counterpart": lambda score, b, h, q_idx, kv_idx: score + torch.bernoulli(score),
    "full|reads a value": lambda score, b, h, q_idx, kv_idx: score + torch.full((), h),
    r"changes a captured tensor of shape \(8,\) in place": lambda score, b, h, q_idx, kv_idx: score + TABLE.add_(1)[h],
    r"changes a captured tensor of shape \(3, 3\)": lambda score, b, h, *_: SQUARE.__setitem__((0, 0), score),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_traced_is_refused_with_its_line(message):
    function = REFUSED[message]
    with pytest.raises(ModError, match=message) as error:
        trace_score(function)
    assert str(error.value).startswith(f"score_mod {function.__qualname__}: ")
    line = re.search(r"test_trace\.py:(\d+)[:)]", str(error.value))
    first = function.__code__.co_firstlineno
    assert line and first <= int(line.group(1)) <= first + 3, error.value


@pytest.mark.parametrize(
    "call, message",
    [
        (
            dict(score_mod=lambda score, b, h, q_idx: score),
            r"score_mod .*<lambda> takes \(score, b, h, q_idx\), expected a function of \(score, b, h, q_idx, kv_idx\)"
            r": too many positional arguments \(.*test_trace.py:\d+\)",
        ),
        (
            dict(mask_mod=fa4.scores.softcap(2.0)),
            r"mask_mod softcap takes .*, expected a function of \(b, h, q_idx, kv_idx\): missing .* 'kv_idx'",
        ),
        (dict(mask_mod=lambda *, b: b), r"mask_mod .* takes \(\*, b\), expected a function of \(b, h, q_idx, kv_idx\)"),
    ],
)
def test_a_wrong_number_of_arguments_names_the_function(call, message):
    q = torch.randn(1, 10, 4, 8)
    with pytest.raises(TypeError, match=message):
        fa4.flash_attn_func(q, q, q, **call)


def test_errors_of_the_function_are_its_own():
    def broken(score, b, h, q_idx, kv_idx):
        return score + undefined  # noqa: F821

    def refuses(score, b, h, q_idx, kv_idx):
        raise RuntimeError("none of ours")

    with pytest.raises(NameError, match="undefined"):
        trace_score(broken)
    with pytest.raises(RuntimeError, match="none of ours"):
        trace_score(refuses)


def test_what_has_no_values_is_refused():
    for function in (lambda *_: torch.empty(()), lambda score, *_: torch.empty_like(score)):
        with pytest.raises(ModError, match=r"uses empty.*, which has no counterpart"):
            trace_score(function)


def test_what_has_values_alone_is_taken_in_a_mask():
    """Nobody asks for its derivative."""
    trace_mask(lambda b, h, q_idx, kv_idx: torch.hardshrink(q_idx * 1.0) > kv_idx)
    trace_mask(lambda b, h, q_idx, kv_idx: q_idx.clone().view(()).add_(1) >= kv_idx)


@pytest.mark.parametrize(
    "call, message",
    [
        (dict(score_mod=3), "score_mod is a int, expected a function"),
        (dict(mask_mod=lambda b, h, q_idx, kv_idx: q_idx), "mask_mod .*returned torch.int32, expected torch.bool"),
        (
            dict(score_mod=fa4.scores.temperature(torch.ones(3))),
            r"temperature.*: indexes axis 0 of a captured tensor of shape \(3,\) by h, .*scores.py:\d+",
        ),
        (
            dict(mask_mod=fa4.masks.documents(torch.ones(1, 9).int())),
            r"axis 1 of .* shape \(1, 9\) by q_idx, .* 10 entries",
        ),
        (
            dict(mask_mod=lambda b, h, q_idx, kv_idx: torch.arange(9)[kv_idx] < q_idx),
            r"mask_mod .*: indexes 9 numbers that it makes by kv_idx, expected at least 10 \(.*test_trace.py:\d+\)",
        ),
        (
            dict(score_mod=lambda score, b, h, q_idx, kv_idx: score * torch.ones(3, 10)[h, q_idx]),
            r"score_mod .*: indexes 3 numbers that it makes by h, expected at least 4",
        ),
        (
            dict(mask_mod=lambda b, h, q_idx, kv_idx: torch.tensor([0, 5, 2])[h] < q_idx),
            r"mask_mod .*: indexes axis 0 of a captured tensor of shape \(3,\) by h",
        ),
        (dict(score_mod=fa4.scores.softcap(2.0), softcap=2.0), "softcap and score_mod are both given"),
        (dict(block_mask="causal"), "block_mask is a str, expected what create_block_mask returns"),
    ],
)
def test_arguments_that_do_not_fit(call, message):
    q = torch.randn(1, 10, 4, 8)
    with pytest.raises((TypeError, ValueError), match=message):
        fa4.flash_attn_func(q, q, q, **call)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((3, None, 40, 40), "block_mask is for batch 3, expected 1 or 2"),
        ((None, 3, 40, 40), "block_mask is for query heads 3, expected 1 or 4"),
        ((None, None, 41, 40), "block_mask is for 41 queries and 40 keys, expected 40 and 40"),
    ],
)
def test_block_masks_of_another_shape(sizes, message):
    q = torch.randn(2, 40, 4, 8)
    block_mask = fa4.create_block_mask(fa4.masks.causal, *sizes, device="cpu")
    with pytest.raises(ValueError, match=message):
        fa4.flash_attn_func(q, q, q, block_mask=block_mask)
    fits = fa4.create_block_mask(fa4.masks.causal, None, None, 40, 40, device="cpu")
    for more in (dict(causal=True), dict(window_size=(3, 3)), dict(mask_mod=fa4.masks.causal)):
        with pytest.raises(ValueError, match="block_mask"):
            fa4.flash_attn_func(q, q, q, block_mask=fits, **more)


def test_a_function_is_traced_again_only_when_a_trace_would_differ(monkeypatch):
    traces = []

    def trace(function):
        traces.append(function)
        return trace_score(function)

    def make(cap, table):
        return lambda score, b, h, q_idx, kv_idx: torch.tanh(score / cap) * table[h]

    first = cached_trace(trace, make(3.0, torch.ones(4)))
    other = torch.randn(4)
    again = cached_trace(trace, make(3.0, other))
    assert len(traces) == 1 and again.tensors[0] is other and again.graph == first.graph
    assert cached_trace(trace, make(4.0, other)).numbers[0] == 4.0 and len(traces) == 5  # three are of a template
    del traces[2:]
    assert cached_trace(trace, make(3.0, torch.ones(4, requires_grad=True))).graph != first.graph and len(traces) == 3

    class Holder:
        cap = 3.0

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return torch.tanh(score / self.cap)

    holder = Holder()
    assert cached_trace(trace, holder.score_mod).numbers[0] == 3.0
    holder.cap = 5.0  # seen by nobody: such functions are traced each time
    assert cached_trace(trace, holder.score_mod).numbers[0] == 5.0


def test_a_call_that_comes_again_sees_what_changed_since():
    """The same function, block mask and shapes: what is kept of a call must not outlive a change of what they hold."""
    q = torch.randn(1, 40, 4, 8)
    slopes, caps, global_names = torch.rand(4), [2.0], score_of_a_global.__globals__
    cap = 2.0

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.tanh(score / cap) * caps[0] + slopes[h] * (kv_idx - q_idx)

    block_mask = fa4.create_block_mask(fa4.masks.causal, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    other_mask = fa4.create_block_mask(fa4.masks.sliding_window(3), None, None, 40, 40, device="cpu", BLOCK_SIZE=16)

    def attend(score_mod, block_mask):
        first, again = (fa4.flash_attn_func(q, q, q, score_mod=score_mod, block_mask=block_mask) for _ in range(2))
        assert torch.equal(first, again)
        return again

    seen = [attend(score_mod, block_mask)]
    slopes.mul_(2)  # values
    seen.append(attend(score_mod, block_mask))
    cap = 3.0  # a cell
    seen.append(attend(score_mod, block_mask))
    caps[0] = 0.5  # an element of a list
    seen.append(attend(score_mod, block_mask))
    slopes = torch.rand(4, requires_grad=True)  # another tensor, with a gradient
    seen.append(attend(score_mod, block_mask))
    assert seen[-1].requires_grad
    block_mask.kv_num_blocks, block_mask.kv_indices = other_mask.kv_num_blocks, other_mask.kv_indices
    block_mask.full_kv_num_blocks, block_mask.full_kv_indices = None, None
    block_mask.mask_mod = other_mask.mask_mod
    seen.append(attend(score_mod, block_mask))
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    before = attend(score_of_a_global, None)
    global_names["FACTOR"] = 3.0
    assert not torch.equal(attend(score_of_a_global, None), before)


FACTOR = 2.0


def score_of_a_global(score, b, h, q_idx, kv_idx):
    return score * FACTOR


def test_functions_that_are_gone_leave_nothing():
    q, table = torch.randn(1, 10, 4, 8), torch.rand(4)
    gone = weakref.ref(table)
    fa4.flash_attn_func(q, q, q, score_mod=fa4.scores.temperature(table))
    del table
    gc.collect()
    assert gone() is None
