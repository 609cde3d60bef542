"""Train the GPT of train_gpt.py with attention that selects its keys: by MoBA's rule, and by NSA's three branches.

    python examples/sparse_gpt.py

Each rule is trained twice from the same weights: with fa4.sparse_attention, and with a softmax over all keys under a
mask of the same lists. The losses must agree.
"""

import argparse
import math

import torch
import train_gpt
from torch import nn

import fa4

BLOCK, SELECTED, WINDOW = 16, 3, 15  # keys of a block, blocks of a list, keys before a query that it always sees


def masked_softmax_attention(q, k, v, is_visible):
    """The dense formula. is_visible: (batch, heads_q, seqlen_q, seqlen_k)."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k).float() / math.sqrt(q.shape[-1])
    p = scores.masked_fill(~is_visible, -torch.inf).softmax(-1).nan_to_num(0.0)  # a row without keys is 0
    return torch.einsum("bhij,bjhd->bihd", p.to(v.dtype), v)


def mask_of(lists, heads, keys):
    """Return which keys lists of blocks hold, causal: (batch, seqlen, lists, n) to (batch, heads, seqlen, keys)."""
    blocks = torch.arange(keys, device=lists.device) // BLOCK
    is_listed = (lists[..., None] == blocks).any(-2).transpose(1, 2).repeat_interleave(heads // lists.shape[2], 1)
    return is_listed.tril()


def best_blocks(scores, always):
    """Return the blocks of the largest scores, no later than the query's own; those of `always` first; -1 for none."""
    own = torch.arange(scores.shape[1], device=scores.device)[:, None, None] // BLOCK
    block = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill(always(block, own), torch.inf).masked_fill(block > own, -torch.inf)
    best = scores.topk(min(SELECTED, scores.shape[-1]), -1)
    return best.indices.int().masked_fill(best.values == -torch.inf, -1)


def moba(q, k, v, is_dense):
    """Each query head selects its own block and those whose mean of k it likes best (MoBA, arXiv 2502.13189)."""
    means = k.detach().unflatten(1, (-1, BLOCK)).mean(2).repeat_interleave(q.shape[2] // k.shape[2], 2)
    affinity = torch.einsum("bihd,bjhd->bihj", q.detach(), means).float()
    lists = best_blocks(affinity, lambda block, own: block == own)  # of each query head
    if is_dense:
        return masked_softmax_attention(q, k, v, mask_of(lists, q.shape[2], k.shape[1]))
    return fa4.sparse_attention(q, k, v, lists, granularity=BLOCK, causal=True)


def is_complete(b, h, q_idx, kv_idx):
    """Whether the compressed key kv_idx holds no key after the query."""
    return (kv_idx + 1) * BLOCK <= q_idx + 1


def nsa(q, k, v, compress, gates, is_dense):
    """Compressed, selected and near keys, each with a softmax of its own, mixed by gates (NSA, arXiv 2502.11089).

    compress: module, (..., BLOCK) to (..., 1). gates: (batch, seqlen, heads_q, 3).
    """
    seqlen, heads, heads_kv = k.shape[1], q.shape[2], k.shape[2]
    k_small, v_small = (compress(x.unflatten(1, (-1, BLOCK)).movedim(2, -1)).squeeze(-1) for x in (k, v))
    at = torch.arange(seqlen, device=q.device)
    small = is_complete(0, 0, at[:, None], torch.arange(k_small.shape[1], device=q.device))
    with torch.no_grad():  # the importance of a block: its share in the compressed branch, over the heads of its group
        scores = torch.einsum("bihd,bjhd->bihj", q, k_small.repeat_interleave(heads // heads_kv, 2)).float()
        scores = (scores / math.sqrt(q.shape[-1])).masked_fill(~small[:, None], -torch.inf)
        importance = scores.softmax(-1).nan_to_num(0.0).unflatten(2, (heads_kv, -1)).sum(3)
        lists = best_blocks(importance, lambda block, own: (block == 0) | (block == own))  # of each key/value head
    if is_dense:
        near = (at <= at[:, None]) & (at >= at[:, None] - WINDOW)
        masks = small, mask_of(lists, heads, seqlen), near
        pairs = (k_small, v_small), (k, v), (k, v)
        branches = [masked_softmax_attention(q, *pair, mask) for pair, mask in zip(pairs, masks)]
    else:
        branches = [
            fa4.flash_attn_func(q, k_small, v_small, mask_mod=is_complete),
            fa4.sparse_attention(q, k, v, lists, granularity=BLOCK, causal=True),
            fa4.flash_attn_func(q, k, v, causal=True, window_size=(WINDOW, 0)),
        ]
    return (torch.stack(branches, -1) * gates[..., None, :]).sum(-1)


class MoBA(train_gpt.Block):
    is_dense = False

    def attend(self, q, k, v, x):
        return moba(q, k, v, self.is_dense)


class NSA(train_gpt.Block):
    is_dense = False

    def __init__(self):
        super().__init__()
        self.compress = nn.Linear(BLOCK, 1)
        self.gates = nn.Linear(train_gpt.HIDDEN, 3 * train_gpt.HEADS)

    def attend(self, q, k, v, x):
        gates = self.gates(x).sigmoid().unflatten(-1, (-1, 3))
        return nsa(q, k, v, self.compress, gates, self.is_dense)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seqlen", type=int, default=128, help=f"a multiple of {BLOCK}")
    options = parser.parse_args()
    for block in (MoBA, NSA):
        dense = type("Dense", (block,), {"is_dense": True})
        print(block.__name__)
        losses = train_gpt.train(block, options.steps, options.seqlen)
        print(f"{block.__name__}, dense formula")
        expected = train_gpt.train(dense, options.steps, options.seqlen)
        difference = max(abs(a - b) for a, b in zip(losses, expected))
        print(f"the largest difference between the losses of a step is {difference:.1e}")
        # Rounding moves a query's choice of blocks now and then, so the runs drift apart slowly.
        assert difference < (0.1 if torch.cuda.is_available() else 1e-3), "the two formulas differ"


if __name__ == "__main__":
    main()
