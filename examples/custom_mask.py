"""A mask and a bias of one's own: documents behind one another, each with a prefix that sees itself whole.

python examples/custom_mask.py
"""

import torch

import fa4

SEQLEN, PREFIX, HEADS = 256, 40, 2


def main():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, SEQLEN, HEADS, 32, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 150, 190])
    document = torch.searchsorted(starts, torch.arange(SEQLEN), right=True) - 1
    begin = starts[document]
    slopes = torch.rand(HEADS, requires_grad=True)

    def mask_mod(b, h, q_idx, kv_idx):
        same = document[q_idx] == document[kv_idx]
        return same & ((kv_idx <= q_idx) | (kv_idx < begin[q_idx] + PREFIX))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs()

    block_mask = fa4.create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN)
    out = fa4.flash_attn_func(q, k, v, score_mod=score_mod, block_mask=block_mask)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, slopes))

    # The same with a matrix of all pairs, in plain torch.
    i, j = torch.arange(SEQLEN)[:, None], torch.arange(SEQLEN)
    seen = mask_mod(None, None, i, j)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 32**-0.5 - slopes[:, None, None] * (i - j).abs()
    expected = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    exact = torch.autograd.grad(expected.square().sum(), (q, k, v, slopes))
    visited = int(block_mask.kv_num_blocks.sum() + block_mask.full_kv_num_blocks.sum())
    print(f"{visited} of {(SEQLEN // 128) ** 2} blocks visited, {float(seen.float().mean()):.0%} of pairs seen")
    for name, a, b in zip(("out", "dq", "dk", "dv", "dslopes"), (out, *grads), (expected, *exact)):
        print(f"{name:7}  differs by {(a - b).abs().max().item():.1e} of {b.abs().max().item():.2g} at most")
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
