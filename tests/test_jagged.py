"""Nested tensors of torch's jagged layout are packed sequences."""

import pytest
import torch
from torch.nested import narrow, nested_tensor, nested_tensor_from_jagged

import fa4

LENGTHS_Q, LENGTHS_K = (3, 0, 5), (4, 2, 5)


@pytest.fixture
def tensors(seed):
    generator = torch.Generator().manual_seed(seed)

    def rows(n, heads, head_dim):
        return torch.randn(n, heads, head_dim, dtype=torch.float64, generator=generator)

    q = nested_tensor([rows(n, 4, 16) for n in LENGTHS_Q], layout=torch.jagged)
    k = nested_tensor([rows(n, 2, 16) for n in LENGTHS_K], layout=torch.jagged)
    v = nested_tensor_from_jagged(rows(sum(LENGTHS_K), 2, 8), k.offsets())
    return [x.detach().requires_grad_() for x in (q, k, v)]


def _packed(q, k, v, **options):
    lengths = dict(cu_seqlens_q=q.offsets().int(), cu_seqlens_k=k.offsets().int())
    return fa4.flash_attn_varlen_func(q.values(), k.values(), v.values(), **lengths, return_lse=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"learnable_sink": torch.ones(4, dtype=torch.float64), "window_size": (2, 1)},
        {"mask_mod": lambda b, h, q, k: k <= q + b},
        {"dropout_p": 0.5, "dropout_seed": 3},
        {"block_mask": fa4.create_block_mask(lambda b, h, q, k: k <= q + b, 3, None, 5, 6, "cpu", BLOCK_SIZE=2)},
    ],
    ids=lambda x: next(iter(x)),
)
def test_nested_tensors_are_packed_sequences(tensors, options):
    out, lse = fa4.flash_attn_func(*tensors, return_lse=True, **options)
    q = tensors[0]
    assert out.shape == (*q.shape[:3], 8) and lse.shape == (3, 4, q.shape[1])
    expected, expected_lse = _packed(*tensors, **options)
    assert torch.equal(out.values(), expected) and torch.equal(lse.values(), expected_lse)
    got = torch.autograd.grad(out.values().square().sum() + lse.values()[:, :3].sin().sum(), tensors)
    loss = expected.square().sum() + expected_lse[:, :3].sin().sum()
    for a, b, x in zip(got, torch.autograd.grad(loss, tensors), tensors):
        assert a.shape == x.shape and torch.equal(a.values(), b.values())


_BY_BATCH = torch.tensor([0.5, -2.0, 1.0])
_SEEN = fa4.create_block_mask(lambda b, h, q, k: k <= q + b, 3, None, 8, 8, "cpu", BLOCK_SIZE=2)
WITH_ROWS_LEFT_OUT = {
    "causal": {"causal": True},
    "mask_mod": {"mask_mod": lambda b, h, q, k: k <= q + b},
    "score_mod": {"score_mod": lambda score, b, h, q, k: score * _BY_BATCH[b]},
    "block_mask": {"block_mask": _SEEN},
    "block_mask_of_all": {"block_mask": fa4.create_block_mask(fa4.masks.causal, None, None, 8, 8, "cpu")},
}


@pytest.mark.parametrize("name", WITH_ROWS_LEFT_OUT)
def test_sequences_between_which_rows_are_left_out(name, seed):
    options = WITH_ROWS_LEFT_OUT[name]

    def of_one(i):  # sequence i alone: it is number i to the functions
        if name in ("mask_mod", "block_mask"):
            return {"mask_mod": lambda b, h, q, k: k <= q + i}
        if name == "score_mod":
            return {"score_mod": lambda score, b, h, q, k: score * _BY_BATCH[i]}
        return {"causal": True}

    x = torch.randn(3, 8, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    starts, lengths = torch.tensor([1, 0, 2]), torch.tensor([3, 4, 6])
    nested = narrow(x, 1, starts, lengths, layout=torch.jagged)
    out, lse = fa4.flash_attn_func(nested, nested, nested, return_lse=True, **options)
    parts = [x[i : i + 1, s : s + n] for i, (s, n) in enumerate(zip(starts, lengths))]
    for i, (part, o, of_rows) in enumerate(zip(parts, out.unbind(), lse.unbind(), strict=True)):
        expected, expected_lse = fa4.flash_attn_func(part, part, part, return_lse=True, **of_one(i))
        torch.testing.assert_close(o, expected[0])
        torch.testing.assert_close(of_rows, expected_lse[0])
    (got,) = torch.autograd.grad(sum(o.square().sum() for o in out.unbind()), x)
    loss = sum(fa4.flash_attn_func(part, part, part, **of_one(i)).square().sum() for i, part in enumerate(parts))
    torch.testing.assert_close(got, torch.autograd.grad(loss, x)[0])


def test_axes_swapped_and_back(tensors):
    q, k, v = tensors
    swapped = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(fa4.flash_attn_func(swapped, k, v).values(), fa4.flash_attn_func(q, k, v).values())


def test_fullgraph_compile(tensors):
    compiled = torch.compile(lambda *x: fa4.flash_attn_func(*x, causal=True) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors).values(), (fa4.flash_attn_func(*tensors, causal=True) * 2).values())


def test_explained(tensors):
    assert fa4.explain(*tensors, causal=True).chosen == "torch"


REFUSED = {
    "dense_k": (lambda q, k, v: (q, k.values()[None], v), {}, TypeError, "k has layout torch.strided, exp"),
    "dense_k_and_mask": (
        lambda q, k, v: (q, k.values()[None], v),
        {"mask_mod": fa4.masks.causal},
        TypeError,
        "k has layout torch.strided, exp",
    ),
    "no_tensor": (lambda q, k, v: (q, k, 1), {}, TypeError, "v is a int, expected torch.jagged"),
    "heads_first": (lambda q, k, v: (q.transpose(1, 2), k, v), {}, ValueError, "q has shape .*expected .batch, len"),
    "other_lengths": (lambda q, k, v: (q, k, q), {}, ValueError, "v has lengths of its own"),
    "seqused_k": (lambda q, k, v: (q, k, v), {"seqused_k": torch.ones(3, dtype=torch.int32)}, TypeError, "seqused_k"),
    "no_block_mask": (lambda q, k, v: (q, k, v), {"block_mask": 1}, TypeError, "block_mask is a int, expected what"),
}  # fmt: skip


@pytest.mark.parametrize("change, options, error, message", REFUSED.values(), ids=REFUSED)
def test_refused(tensors, change, options, error, message):
    with pytest.raises(error, match=message):
        fa4.flash_attn_func(*change(*tensors), **options)


def test_a_block_mask_for_shorter_sequences_is_refused(seed):
    x = torch.randn(2, 40, 1, 16)
    nested = narrow(x, 1, torch.tensor([1, 0]), torch.tensor([30, 40]), layout=torch.jagged)
    mask = fa4.create_block_mask(fa4.masks.causal, None, None, 32, 32, "cpu")
    with pytest.raises(ValueError, match="block_mask is for 32 rows of q, expected 40"):
        fa4.flash_attn_func(nested, nested, nested, block_mask=mask)
