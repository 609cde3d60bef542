"""Generate with a cache of pages: sequences of other lengths share one pool of keys and values.

    python examples/decode_with_pages.py

Each step appends one token's keys and values in the call that attends to them.
"""

import torch

import fa4

PAGE, PAGES, HEADS, HEADS_KV, HEAD_DIM = 16, 24, 4, 2, 32
PROMPTS, STEPS = (37, 5, 20), 12


def main():
    torch.manual_seed(0)
    dtype, device = torch.float32, "cpu"
    if torch.cuda.is_available():
        dtype, device = torch.bfloat16, "cuda"
    rows = max(PROMPTS) + STEPS
    keys, values = (torch.randn(len(PROMPTS), rows, HEADS_KV, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
    queries = torch.randn(len(PROMPTS), rows, HEADS, HEAD_DIM, dtype=dtype, device=device)

    k_pool, v_pool = (torch.zeros(PAGES, PAGE, HEADS_KV, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
    per_sequence = -(-rows // PAGE)
    table = torch.randperm(PAGES, device=device)[: len(PROMPTS) * per_sequence].view(len(PROMPTS), -1).int()
    used = torch.zeros(len(PROMPTS), dtype=torch.int32, device=device)

    def attend(b, first, count):
        """Queries, and new keys and values, of rows first to first + count of sequence b (all sequences: a slice)."""
        at = [torch.arange(f, f + count) for f in first]
        q, k, v = (torch.stack([x[i, r] for i, r in zip(b, at)]) for x in (queries, keys, values))
        out = fa4.flash_attn_with_kvcache(
            q, k_pool, v_pool, k, v, page_table=table[b], cache_seqlens=used[b], causal=True
        )
        used[b] += count
        return out

    for b, length in enumerate(PROMPTS):
        attend([b], [0], length)
    everybody, worst = list(range(len(PROMPTS))), 0.0
    for step in range(STEPS):
        out = attend(everybody, [length + step for length in PROMPTS], 1)
        for b, length in enumerate(PROMPTS):
            n = length + step + 1
            whole = fa4.flash_attn_func(queries[b : b + 1, n - 1 : n], keys[b : b + 1, :n], values[b : b + 1, :n])
            worst = max(worst, float((out[b] - whole[0]).abs().max()))
    print(
        f"{STEPS} steps of {len(PROMPTS)} sequences, lengths {used.tolist()}, in {table.numel()} pages of {PAGE} rows"
    )
    print(f"differs from attention without a cache by {worst:.1e} at most")
    assert worst < (1e-5 if dtype == torch.float32 else 2e-2)


if __name__ == "__main__":
    main()
