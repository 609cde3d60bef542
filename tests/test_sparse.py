"""`sparse_attention`: its definition, errors, and forms of calls. Pairs of its options: the array "sparse"."""

import random

import pytest
import torch

import fa4
from fa4.sparse.selection import Layout, Places, Rule, in_memory, selected_rows


def _tensors(heads_q=4, heads_kv=2, queries=5, keys=40, dim=16, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, rows, heads, dim, generator=generator, dtype=dtype).requires_grad_()
        for rows, heads in ((queries, heads_q), (keys, heads_kv), (keys, heads_kv))
    )


def _every(blocks, *sizes):
    """Lists of all blocks."""
    return torch.arange(blocks, dtype=torch.int32).expand(*sizes, blocks)


@pytest.mark.parametrize("granularity, per", [(1, "token"), (8, "token"), (1, "block"), (16, "block")])
@pytest.mark.parametrize("causal", [False, True])
def test_lists_of_all_blocks_are_dense_attention(granularity, per, causal, seed):
    q, k, v = _tensors(seed=seed)
    rows = 5 if per == "token" else -(-5 // granularity)
    indices = _every(-(-40 // granularity), 2, rows, 1)
    out, lse = fa4.sparse_attention(q, k, v, indices, granularity=granularity, per=per, causal=causal, return_lse=True)
    exact, exact_lse = fa4.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)
    dout = torch.randn_like(out)
    grads = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, exact))
    for got, expected in zip(*grads):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("granularity, per", [(1, "token"), (16, "block")])
def test_a_window_of_no_lists_is_a_window(granularity, per, seed):
    q, k, v = _tensors(seed=seed)
    rows = 5 if per == "token" else 1
    none = torch.full((2, rows, 1, 1), -1, dtype=torch.int32)
    out = fa4.sparse_attention(q, k, v, none, granularity=granularity, per=per, causal=True, window=7)
    torch.testing.assert_close(out, fa4.flash_attn_func(q, k, v, causal=True, window_size=(7, None)))


def test_a_query_without_keys_has_out_0_and_the_lse_of_the_sink(seed):
    q, k, v = _tensors(seed=seed)
    none, sink = torch.full((2, 5, 1, 3), -1, dtype=torch.int32), torch.randn(4, dtype=torch.float64)
    out, lse = fa4.sparse_attention(q, k, v, none, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    out, lse = fa4.sparse_attention(q, k, v, none, sink=sink, return_lse=True)
    assert not out.any() and torch.equal(lse, sink[None, :, None].expand(2, 4, 5))


def test_second_derivatives_raise(seed):
    q, k, v = _tensors(seed=seed)
    out = fa4.sparse_attention(q, k, v, _every(40, 2, 5, 1))
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        dq.sum().backward()


def test_gradients_of_chunks_are_those_of_the_whole(seed, monkeypatch):
    from fa4.sparse import attend

    q, k, v = _tensors(seed=seed, queries=9)
    indices = torch.stack([torch.randperm(40)[:12] for _ in range(2 * 9 * 2)]).view(2, 9, 2, 12).int()

    def results():
        out = fa4.sparse_attention(q, k, v, indices, causal=True, window=3)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    whole = results()
    monkeypatch.setattr(attend, "LISTED_ROWS", 90)
    monkeypatch.setattr(attend, "GATHERED_NUMBERS", 5000)
    for got, expected in zip(results(), whole):
        torch.testing.assert_close(got, expected)


def test_gradients_of_latents_are_sums_over_both_uses(seed):
    """v is a view of k: its gradients are added to those of k's first columns."""
    q, k, _ = _tensors(heads_kv=1, seed=seed)
    indices = torch.stack([torch.randperm(40)[:12] for _ in range(2 * 5)]).view(2, 5, 1, 12).int()
    out = fa4.sparse_attention(q, k, k[..., :8], indices, causal=True)
    dout = torch.randn_like(out)
    dq, dk = torch.autograd.grad(out, (q, k), dout)
    v = k[..., :8].detach().clone().requires_grad_()
    apart = torch.autograd.grad(fa4.sparse_attention(q, k, v, indices, causal=True), (q, k, v), dout)
    torch.testing.assert_close(dq, apart[0])
    torch.testing.assert_close(dk, apart[1] + torch.nn.functional.pad(apart[2], (0, 8)))


def test_compiled_calls_are_right(seed):
    q, k, v = _tensors(seed=seed, dtype=torch.float32)
    indices = torch.stack([torch.randperm(40)[:12] for _ in range(2 * 5)]).view(2, 5, 1, 12).int()

    def loss(q, k, v):
        return fa4.sparse_attention(q, k, v, indices, causal=True, window=3).square().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(q, k, v), (q, k, v))
    for x, y in zip(got, expected):
        torch.testing.assert_close(x, y)


def test_rows_of_lists_are_ascending_and_each_is_there_once(seed):
    """Torch's rows, against a loop."""
    draw = random.Random(seed)
    layout = Layout(2, 4, 30)
    rule = Rule(3, True, 2)
    indices = torch.tensor([[draw.choices([*range(12), -1], k=6)] for _ in range(8)], dtype=torch.int32)
    rows, count = selected_rows(indices, None, Places.of(layout, 0, 8, indices.device), rule, 30)
    for token in range(8):
        position = token % 4 + 26
        chosen = {b * 3 + i for b in indices[token, 0].tolist() if b >= 0 for i in range(3)}
        expected = sorted({r for r in chosen if r <= position} | {*range(position - 2, position + 1)})
        assert rows[token, 0, : count[token, 0]].tolist() == expected
    in_k = in_memory(rows, Places.of(layout, 0, 8, indices.device), layout)
    assert torch.equal(in_k[4:], rows[4:] + 30)


def test_a_block_that_is_listed_twice_counts_once(seed):
    q, k, v = _tensors(seed=seed)
    once = torch.stack([torch.randperm(40)[:12] for _ in range(2 * 5)]).view(2, 5, 1, 12).int()
    twice = torch.cat((once, once[..., ::3]), -1)
    torch.testing.assert_close(fa4.sparse_attention(q, k, v, twice), fa4.sparse_attention(q, k, v, once))


_INT = torch.zeros(2, 5, 1, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    "changes, error, match",
    [
        (dict(granularity=0), ValueError, "granularity is 0, expected 1 or more"),
        (dict(granularity=1.5), TypeError, "granularity is a float"),
        (dict(per="row"), ValueError, "per is 'row', expected 'token' or 'block'"),
        (dict(window=-1), ValueError, "window is -1"),
        (dict(causal=1), TypeError, "causal is a int, expected a bool"),
        (dict(indices=_INT.long()), TypeError, "indices has dtype torch.int64, expected torch.int32"),
        (dict(indices=_INT[:1]), ValueError, r"indices has shape \(1, 5, 1, 3\), expected \(2, 5, lists, n\)"),
        (dict(indices=_INT.expand(2, 5, 3, 3)), ValueError, "indices has 3 lists, expected 1 or 2 or 4"),
        (dict(indices=_INT[..., :1] - 2), ValueError, "indices has -2, expected 0 or more, or -1 for none"),
        (dict(counts=_INT[..., 0].long()), TypeError, "counts has dtype torch.int64"),
        (dict(counts=_INT), ValueError, r"counts has shape \(2, 5, 1, 3\), expected \(2, 5, 1\)"),
        (dict(counts=_INT[..., 0] + 4), ValueError, "counts has 4, expected 0 to the 3 entries of a list"),
        (dict(sink=torch.zeros(3, dtype=torch.float64)), ValueError, r"sink has shape \(3\), expected \(4,\)"),
        (dict(backend="fast"), ValueError, "backend"),
        (dict(cu_seqlens_q=torch.tensor([0, 5])), ValueError, "cu_seqlens_q is given without cu_seqlens_k"),
        (dict(max_seqlen_q=5), ValueError, "max_seqlen_q is given without cu_seqlens_q"),
        (dict(page_table=_INT[:, 0, 0]), ValueError, "page_table is given without seqused_k"),
        (dict(k=torch.zeros(2, 40, 3, 16, dtype=torch.float64)), ValueError, "q has 4 heads, expected a positive"),
        (dict(v=torch.zeros(2, 41, 2, 16, dtype=torch.float64)), ValueError, r"v has shape \(2, 41, 2, 16\)"),
        (dict(k=torch.zeros(2, 40, 2, 16)), TypeError, "k has dtype torch.float32, expected torch.float64 like q"),
    ],
)
def test_wrong_arguments(changes, error, match):
    q, k, v = _tensors()
    good = dict(q=q, k=k, v=v, indices=torch.arange(3, dtype=torch.int32).expand(2, 5, 1, 3).contiguous())
    with pytest.raises(error, match=match):
        fa4.sparse_attention(**good | changes)


def test_a_cache_refuses_gradients():
    q, k, v = _tensors()
    table, used = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([40, 9], dtype=torch.int32)
    indices = torch.arange(3, dtype=torch.int32).expand(2, 5, 1, 3)
    with pytest.raises(NotImplementedError, match="q requires grad, and with a page_table there are no gradients"):
        fa4.sparse_attention(q, k, v, indices, page_table=table, seqused_k=used)
