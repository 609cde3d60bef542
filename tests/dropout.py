"""Dropout in kernels: each bit held against the definition, and results against the oracle, with one compile key."""

from dataclasses import replace

import torch

import fa4
from fa4.mods.ir.dropout import Rate
from fa4.oracle.cases import Case, assert_right, judge_backward, judge_forward, make

# Rows and keys of several tiles and words, none of a whole one; sequences that are short or see nothing; packed heads.
PACKED = Case(
    "packed", lengths=((130, 300), (37, 37), (0, 20), (60, 1)), heads_q=4, head_dim_v=128, dropout_p=0.3
)  # fmt: skip
# Hopper's backward of wide heads: pairs of CTAs, the sign of whose P is dropout's verdict, under a softcap and a mask.
WIDE = Case(
    "wide", lengths=((70, 150), (9, 90)), head_dim=256, heads_q=2, heads_kv=1, causal=True, softcap=9.0, dropout_p=0.2
)
WIDE_IN_ORDER = replace(WIDE, name="wide_in_order", deterministic=True)
# Without pairs; columns of dQ that one of the warpgroups has alone.
WIDE_KEYS = Case("wide_keys", seqlen_q=90, seqlen_k=170, head_dim=192, head_dim_v=128, dropout_p=0.5)
# Three query heads of a key/value head take four rows of a tile where a query's heads are padded.
PADDED_HEADS = Case("padded_heads", seqlen_q=5, seqlen_k=150, heads_q=3, heads_kv=1, dropout_p=0.3)
DENSE = Case("dense", batch=2, seqlen_q=200, seqlen_k=333, heads_q=4, head_dim=128, causal=True, dropout_p=0.1)


def assert_right_with_dropout(case: Case, seed: int, backend: str, device: str = "cpu") -> None:
    problem = make(case, seed, device)
    out, lse, grads = problem.call_with_gradients(backend=backend)
    judged = judge_forward(problem, out, lse) + judge_backward(problem, grads)
    assert_right(judged, f"{case} on {backend}, seed {seed}")


def assert_bits(seed: int, backend: str, device: str = "cpu") -> None:
    """All keep bits, read from out and from dv.

    Queries are 0, so that all probabilities of a sequence are 1 / seqlen_k. Key j has the value 2^(j / 128) in column
    j % 128 and 0 in others: the bits of a sum say which keys it is of. In dv likewise queries and heads of a group.
    """
    problem = make(PACKED, seed, device)
    q, k, v, *_ = problem.inputs
    q, v, dout = torch.zeros_like(q), torch.zeros_like(v), torch.zeros_like(problem.dout)
    for of_q, of_k in _sequences():
        _mark(v, of_k, [0] * 2)
        _mark(dout, of_q, [0, 2] * 2)
    q.requires_grad_(), v.requires_grad_()
    out, lse = problem.call(q=q, k=k, v=v, dropout_seed=(seed, 3), backend=backend)
    # lse's gradient has no part in dv; with it the kernel is the one that gives results.
    (dv,) = torch.autograd.grad((out, lse), v, (dout, torch.zeros_like(lse)))
    p, lengths = PACKED.dropout_p, PACKED.lengths
    sizes = [max(side) for side in zip(*lengths)]
    mask = fa4.dropout_mask(p, (seed, 3), batch=len(lengths), heads=4, seqlen_q=sizes[0], seqlen_k=sizes[1])
    for b, (of_q, of_k) in enumerate(_sequences()):
        seqlen_q, seqlen_k = len(of_q), len(of_k)
        expected = mask[b, :, :seqlen_q, :seqlen_k]
        unit = Rate.of(p).scale / seqlen_k
        columns = torch.arange(seqlen_k)
        got = _bits(out[of_q.start : of_q.stop], unit)[:, :, columns % 128] >> columns // 128 & 1
        assert torch.equal(got.transpose(0, 1).bool(), expected), f"forward, sequence {b}, seed {seed}"
        rows = torch.arange(seqlen_q)
        by_row = _bits(dv[of_k.start : of_k.stop], unit)[:, :, rows % 128]  # (keys, key/value heads, queries)
        for head in range(4):
            got = by_row[:, head // 2] >> rows // 128 + 2 * (head % 2) & 1
            assert torch.equal(got.T.bool(), expected[head]), f"backward, sequence {b}, head {head}, seed {seed}"


def _sequences():
    """Rows of q and of k of each."""
    starts = [0, 0]
    for lengths in PACKED.lengths:
        yield tuple(range(start, start + length) for start, length in zip(starts, lengths))
        starts = [start + length for start, length in zip(starts, lengths)]


def _mark(x, rows, shifts):
    for i, row in enumerate(rows):
        for head, shift in enumerate(shifts):
            x[row, head, i % 128] = 2 ** (i // 128 + shift)


def _bits(x, unit):
    return (x.detach().double().cpu() / unit).round().long()
