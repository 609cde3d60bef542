"""Ready-made masks and scores: what they refuse, and that they are values."""

import copy
import io
import multiprocessing
import pickle
import re

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.attention import flex_attention as torchs

import fa4
from fa4 import masks, scores
from fa4.mods.frontend.call import cached_trace
from fa4.mods.frontend.trace import trace_mask, trace_score

SLOPES, TABLE, BIAS = torch.rand(2), torch.randn(2, 7), torch.randn(1, 2, 12, 12)
DOCUMENT, LENGTHS, NODES = torch.arange(12) // 5, torch.tensor([4]), torch.arange(12)
ENDS = torch.full((1, 2, 12), 12)
LEFT, STARTS, DOCUMENTS = NODES + 1, ENDS - 3, DOCUMENT[None]
MADE = {
    "sliding_window": lambda: masks.sliding_window(3),
    "prefix": lambda: masks.prefix(LENGTHS),
    "documents": lambda: masks.documents(DOCUMENT),
    "documents_of_keys": lambda: masks.documents(DOCUMENTS, DOCUMENTS),
    "dilated": lambda: masks.dilated(3, 2),
    "tree": lambda: masks.tree(NODES, LEFT),
    "columns": lambda: masks.columns(STARTS, ENDS),
    "both": lambda: masks.both(masks.causal, masks.documents(DOCUMENT)),
    "either": lambda: masks.either(masks.causal, masks.sliding_window(3)),
    "alibi": lambda: scores.alibi(SLOPES),
    "relative_bias": lambda: scores.relative_bias(TABLE),
    "bias": lambda: scores.bias(BIAS),
    "softcap": lambda: scores.softcap(3.0),
    "temperature": lambda: scores.temperature(SLOPES),
}


def attend(q, function):
    role = "score_mod" if type(function).__module__ == "fa4.scores" else "mask_mod"
    return fa4.flash_attn_func(q, q, q, **{role: function})


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: masks.sliding_window(-1), ValueError, "window is -1, expected at least 0"),
        (lambda: masks.sliding_window("a"), TypeError, "window is 'a', expected an integer"),
        (lambda: masks.sliding_window(True), TypeError, "window is True, expected an integer"),
        (lambda: masks.dilated(3, 0), ValueError, "dilation is 0, expected at least 1"),
        (lambda: masks.dilated(3.5, 1), TypeError, "window is 3.5, expected an integer"),
        (lambda: masks.both(), ValueError, "both() has no masks"),
        (lambda: masks.either(), ValueError, "either() has no masks"),
        (lambda: masks.both(masks.causal, 3), TypeError, "mask 1 of both is a int, expected a function"),
        (lambda: masks.documents([0, 1]), TypeError, "document is a list, expected a tensor (batch, seqlen)"),
        (lambda: masks.documents(torch.ones(1, 1, 3).int()), ValueError, "document has shape (1, 1, 3)"),
        (lambda: masks.documents(DOCUMENT, DOCUMENT[None]), ValueError, "of_keys has shape (1, 12), expected"),
        (lambda: masks.documents(DOCUMENT.float()), TypeError, "document is a tensor of torch.float32"),
        (lambda: masks.prefix(3), TypeError, "lengths is a int"),
        (lambda: masks.tree(NODES, NODES[None]), ValueError, "last has shape (1, 12), expected a tensor (nodes)"),
        (lambda: masks.columns(ENDS[0], ENDS), ValueError, "start has shape (2, 12)"),
        (lambda: scores.alibi(3), TypeError, "slopes is a int, expected a tensor (heads_q) of numbers"),
        (lambda: scores.alibi(TABLE), ValueError, "slopes has shape (2, 7)"),
        (lambda: scores.relative_bias(torch.randn(2, 4)), ValueError, "(2, 4), expected an odd number of columns"),
        (lambda: scores.relative_bias(SLOPES), ValueError, "table has shape (2,)"),
        (lambda: scores.bias(torch.randn(2, 4)), ValueError, "values has shape (2, 4), expected a tensor (batch,"),
        (lambda: scores.bias(torch.randn(1, 1, 1, 2, 4)), ValueError, "values has shape (1, 1, 1, 2, 4)"),
        (lambda: scores.bias(torch.ones(1, 1, 2, 4, dtype=torch.bool)), TypeError, "values is a tensor of torch.bool"),
        (lambda: scores.softcap(0.0), ValueError, "cap is 0.0, expected a positive finite number"),
        (lambda: scores.softcap(-1), ValueError, "cap is -1, expected a positive finite number"),
        (lambda: scores.softcap(float("nan")), ValueError, "cap is nan"),
        (lambda: scores.softcap("a"), TypeError, "cap is 'a', expected a number"),
        (lambda: scores.temperature([1.0]), TypeError, "per_head is a list"),
        (lambda: scores.alibi_slopes(0), ValueError, "heads is 0, expected at least 1"),
        (lambda: scores.alibi_slopes(-1), ValueError, "heads is -1, expected at least 1"),
        (lambda: scores.alibi_slopes(2.0), TypeError, "heads is 2.0, expected an integer"),
    ],
)  # fmt: skip
def test_what_a_function_cannot_be_made_of_is_refused_when_it_is_made(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize("name", MADE)
def test_functions_are_values(name, seed):
    """Equal if made of equal numbers and the same tensors; the same after pickling and copying."""
    function, again = MADE[name](), MADE[name]()
    assert function == again and hash(function) == hash(again) and function is not again
    assert repr(function).startswith(f"{type(function).__name__}(")
    assert all(function != MADE[other]() for other in MADE if other != name)
    q = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(seed))
    expected = attend(q, function)
    for other in (pickle.loads(pickle.dumps(function)), copy.deepcopy(function), copy.copy(function)):
        assert type(other) is type(function) and torch.equal(attend(q, other), expected), f"seed {seed}"
    with pytest.raises(AttributeError, match="never changes"):
        function.window = 3


def test_numbers_tell_functions_apart():
    assert masks.sliding_window(3) != masks.sliding_window(4) and scores.softcap(3.0) != scores.softcap(4.0)
    assert scores.alibi(SLOPES) != scores.alibi(SLOPES.clone()) and scores.alibi(SLOPES) != scores.temperature(SLOPES)
    assert masks.both(masks.causal, masks.sliding_window(3)) != masks.both(masks.sliding_window(3), masks.causal)
    assert len({masks.sliding_window(3), masks.sliding_window(3), masks.sliding_window(5)}) == 2


def test_equal_functions_share_a_trace():
    traces = []

    def count(trace):
        def traced(function):
            traces.append(function)
            return trace(function)

        return traced

    score, mask = count(trace_score), count(trace_mask)
    for _ in range(3):
        cached_trace(score, scores.alibi(torch.rand(2)))
        cached_trace(mask, masks.both(masks.causal, masks.sliding_window(3)))
    assert len(traces) == 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(2))
        self.score_mod = scores.alibi(self.slopes)
        self.block_mask = fa4.create_block_mask(masks.sliding_window(3), None, None, 12, 12, "cpu", BLOCK_SIZE=4)

    def forward(self, q):
        return fa4.flash_attn_func(q, q, q, score_mod=self.score_mod, block_mask=self.block_mask)


def in_another_process(layer, q, results):
    results.put(layer(q).detach().numpy())


def test_a_module_that_holds_them_can_be_saved_copied_and_sent(seed):
    """What is copied or saved with a module's parameters still refers to these."""
    q, layer = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(seed)), Layer()
    expected, file = layer(q), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(layer)):
        assert other.score_mod.slopes is other.slopes and torch.equal(other(q), expected), f"seed {seed}"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=in_another_process, args=(layer, q, results))
    process.start()
    got = torch.from_numpy(results.get(timeout=120))
    process.join()
    assert torch.equal(got, expected.detach()), f"seed {seed}"


@pytest.mark.parametrize("name", ["alibi", "documents", "both"])
def test_torchs_flex_attention_takes_them(name, seed):
    """As it runs without a compiler, and as torch.compile sees it."""
    function = MADE[name]()
    q = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(seed))
    given = dict(score_mod=function)
    if type(function).__module__ == "fa4.masks":
        given = dict(block_mask=torchs.create_block_mask(function, 1, 2, 12, 12, device="cpu"))
    expected = fa4.flex_attention(q, q, q, **given)
    torch._dynamo.reset()
    for attend in (torchs.flex_attention, torch.compile(torchs.flex_attention, backend="eager", fullgraph=True)):
        assert (attend(q, q, q, **given) - expected).abs().max() < 1e-5, f"seed {seed}"


def with_alibi(q, slopes):
    return fa4.flash_attn_func(q, q, q, score_mod=scores.alibi(slopes * 2), mask_mod=masks.both(masks.causal, WINDOW))


def with_table(q, table):
    return fa4.flash_attn_func(q, q, q, score_mod=scores.relative_bias(table), mask_mod=masks.sliding_window(4))


def with_bias(q, values):
    return fa4.flash_attn_func(q, q, q, score_mod=scores.bias(values), mask_mod=masks.documents(DOCUMENT))


def with_cap(q, cap):
    return fa4.flash_attn_func(q, q, q, score_mod=scores.softcap(cap))


WINDOW = masks.sliding_window(5)


@pytest.mark.parametrize(
    "attend, given",
    [
        (with_alibi, (SLOPES, SLOPES + 1)),
        (with_table, (TABLE, TABLE[:, :5], TABLE[:, :3])),
        (with_bias, (BIAS, BIAS[:, :1])),
        (with_cap, (3.0, 5.0, 7.0)),
    ],
)
def test_functions_made_inside_of_what_is_compiled(attend, given, seed):
    """Gradients too; sizes and numbers that change compile again."""
    q = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for x in given:
        leaf = x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x
        leaves = [q, leaf] if isinstance(x, torch.Tensor) else [q]
        outs = [f(q, leaf) for f in (attend, compiled)]
        assert torch.equal(*outs), f"seed {seed}"
        for a, b in zip(*(torch.autograd.grad(out.sum(), leaves) for out in outs)):
            assert torch.equal(a, b), f"seed {seed}"


def test_compiled_code_holds_for_the_functions_it_was_compiled_with():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    def attend(q, mask):
        return fa4.flash_attn_func(q, q, q, mask_mod=masks.both(masks.causal, mask))

    def window(width):
        return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= width

    q = torch.randn(1, 12, 2, 8)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=count)
    for mask, count_then in (
        *((masks.sliding_window(width), i + 1) for i, width in enumerate((2, 5, 3))),
        (masks.sliding_window(5), 3),
        (window(4), 4),
        (window(6), 5),
    ):
        assert torch.equal(compiled(q, mask), attend(q, mask)) and len(graphs) == count_then
