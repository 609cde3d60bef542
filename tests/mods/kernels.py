"""Problems with traced functions and block masks, for the kernels of every chip; each with what it shows."""

import functools

import torch

import fa4
from tests.mods.oracle import Problem

LONGEST = 700


def divides(b, h, q_idx, kv_idx):
    """Floors and remainders of negative numbers as in Python, bits of integers."""
    distance = q_idx - kv_idx
    return ((distance // 8) % 3 != 1) & ((distance % 5 < 4) | ~(kv_idx & 1 == 0))


def stripes(b, h, q_idx, kv_idx):
    """Twelve of each sixteen diagonals; a few operations, for kernels that are long without."""
    return (q_idx - kv_idx) & 12 != 4


def by_head(width):
    """Another window for each head; rows of blocks that see nothing."""
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= width * (h + 1)) & (q_idx >= kv_idx)


def shifted_by_head(shift):
    """Of every two heads the first sees keys far behind a query, the last of them in no block; the second near ones."""
    return lambda b, h, q_idx, kv_idx: (
        (q_idx - kv_idx >= shift * ((h + 1) % 2) - 20) & (q_idx - kv_idx < shift * (h + 1))
    )


def wide_and_narrow(b, h, q_idx, kv_idx):
    """Odd heads see all keys before a query and a few after it, even heads no keys far before it. Of negated indices,
    and of floats."""
    return (-kv_idx <= 20 + 500 * (h % 2) - q_idx) & (kv_idx * 0.5 <= q_idx * 0.5 + 8.25)


@functools.cache
def problems(device: str = "cpu") -> dict[str, Problem]:
    """By name; what functions captured lies on the device."""
    generator = torch.Generator().manual_seed(5)
    document = torch.randint(0, 3, (2, LONGEST), generator=generator).sort(dim=1).values.to(device)
    table = torch.randn(6, 21, generator=generator).to(device)
    rows = torch.randn(LONGEST, generator=generator).to(device, torch.bfloat16)
    is_text = (torch.rand(LONGEST, generator=generator) < 0.7).to(device)
    slopes = (torch.rand(6, generator=generator) * 0.1).to(device).requires_grad_()

    def many_kinds(table, rows):
        def score_mod(score, b, h, q_idx, kv_idx):
            near = table[h, (kv_idx - q_idx).clamp(-10, 10)]
            text = torch.where(is_text[kv_idx], rows[q_idx], 0.0)
            far = slopes[h] * (kv_idx - q_idx)
            return torch.tanh(score / 2.5) * 2.5 + near + text + score.abs().sqrt() + far

        return dict(score_mod=score_mod, trained=tuple(x for x in (table, rows, slopes) if x.requires_grad))

    def rare_operators(of_pairs, of_keys, of_queries):
        """The error function; an integer and a bool made of another kind; elements of pairs, of keys and of queries."""

        def score_mod(score, b, h, q_idx, kv_idx):
            steps = (kv_idx * 0.375).to(torch.int32) % 4 - (q_idx > kv_idx).to(torch.int32)
            odd = ((q_idx + kv_idx) & 1).to(torch.bool)
            bias = of_pairs[b, h, q_idx, kv_idx] + of_keys[kv_idx]
            return 3 * torch.erf(score) * of_queries[q_idx] + bias + torch.where(odd, steps * 0.5, score)

        return dict(score_mod=score_mod, trained=(of_pairs, of_keys, of_queries))

    def blocks(mask_mod, heads, queries, keys, size=128):
        return fa4.create_block_mask(mask_mod, 1, heads, queries, keys, device=device, BLOCK_SIZE=size)

    def alibi_in_documents(length, **options):
        same = fa4.masks.documents(document[0, :length].contiguous())
        mask = fa4.masks.both(fa4.masks.causal, same)
        call = dict(block_mask=blocks(mask, None, length, length), deterministic=True)
        alibi = dict(score_mod=fa4.scores.alibi(slopes), trained=(slopes,))
        return Problem("alibi_in_documents", length, length, **alibi, mask_mod=mask, call=call, **options)

    def of_heads(queries, keys, deterministic=False, width=40, size=128, shift=None, heads=2, **options):
        mask = by_head(width) if shift is None else shifted_by_head(shift)
        call = dict(block_mask=blocks(mask, heads, queries, keys, size), deterministic=deterministic)
        options["heads"] = heads
        return Problem("heads", queries, keys, mask_mod=mask, call=call, **options)

    def leaf(x):
        return x.clone().requires_grad_()

    def temperature_of_rows(rows):
        return dict(score_mod=lambda score, b, h, q_idx, kv_idx: score * rows[q_idx], trained=(rows,))

    def temperature_of(factors):
        return dict(score_mod=fa4.scores.temperature(factors), trained=(factors,))

    def logarithm_and_angle(score, b, h, q_idx, kv_idx):
        far = torch.log1p(slopes[h] * (q_idx - kv_idx).abs() * 4)
        ramp = torch.arange(0, 2, 0.015625, device=kv_idx.device)
        return score - far + torch.atan2(score, (q_idx - kv_idx) * 0.1 + 0.05) + ramp[kv_idx]

    temperature = temperature_of(leaf(table[:, 0].abs()))
    of_pairs = leaf(torch.randn(2, 3, 70, 150, generator=generator).to(device))
    same_document = dict(mask_mod=fa4.masks.documents(document))
    trained, fixed = many_kinds(leaf(table), leaf(rows)), many_kinds(table, rows)
    return {
        # Loads of several dtypes and of computed places, counted from the end too; what does not exist has no root.
        # Gradients of what heads, rows and distances choose. Causal as well; heads of a group.
        "many_kinds": Problem("many_kinds", *(150, 190, 6, 2, 2), **trained, **same_document, call=dict(causal=True)),
        # Operators that are computed without the library's branches, in all octants and near 0.
        "logarithm_and_angle": Problem(
            "logarithm_and_angle", *(70, 90, 4, 4), score_mod=logarithm_and_angle, trained=(slopes,)
        ),
        # What a chip's kernels have of their own in the above, without the operations, which take long to compile.
        "few_kinds": Problem(
            "few_kinds", *(150, 190, 6, 2, 2), **temperature_of_rows(leaf(rows)), call=dict(causal=True)
        ),
        # Those that are added in order: of what heads choose.
        "many_kinds_in_order": Problem(
            "many_kinds_in_order",
            *(70, 90, 6, 2, 2),
            **fixed,
            **same_document,
            call=dict(causal=True, deterministic=True),
        ),
        # Each pair of each head has an element of its own; in order.
        "bias": Problem(
            "bias",
            *(70, 150, 3, 3, 2),
            score_mod=fa4.scores.bias(of_pairs),
            trained=(of_pairs,),
            call=dict(deterministic=True),
        ),
        # A causal document mask, whose words of bits and loads meet, and a score that grows evenly along keys. Lists
        # with both kinds of blocks in them, which say the order of additions; a last block that keys end in.
        "documents": alibi_in_documents(400, head_dim=64),
        "documents_short": alibi_in_documents(150),
        # Steps of fewer queries, which divide the blocks; in order.
        "documents_192_128": alibi_in_documents(260, head_dim=192, head_dim_v=128),
        # Blocks that each head has of its own, rows of blocks without a key; with a score, or a mask alone.
        "heads": of_heads(300, 260, **temperature),
        # Added in order, several blocks of keys to a block of queries.
        "heads_far": of_heads(450, 450, deterministic=True, width=400, **temperature),
        # The same kernels: other lengths, lists, a number and a tensor that were captured.
        "heads_near": of_heads(200, 330, deterministic=True, width=90, **temperature_of(leaf(table[:3, 1].abs()))),
        # Operators and gradients of elements that no other problem has; heads of a group have lists of their own.
        "rare_operators": Problem(
            "rare_operators",
            *(280, 150, 4, 2),
            **rare_operators(
                leaf(torch.randn(1, 4, 280, 150, generator=generator).to(device)), leaf(rows[:150]), leaf(rows[:280])
            ),
            mask_mod=wide_and_narrow,
            call=dict(block_mask=blocks(wide_and_narrow, 4, 280, 150)),
        ),
        # Blocks that are no tiles: kernels walk larger ones, and look up which of the caller's a pair is in.
        "other_blocks": of_heads(300, 260, size=(48, 16)),
        "heads_wide": of_heads(300, 260, head_dim=128),
        # Heads of a group have lists of their own, the first none in some columns; in any order, and in order.
        "heads_of_group": of_heads(300, 260, heads=4, heads_kv=2, head_dim=128, shift=150),
        "heads_of_group_in_order": of_heads(300, 330, heads=4, heads_kv=2, shift=150, deterministic=True),
        # As many heads of a group as leave no step at the same place; in order.
        "three_of_group_in_order": of_heads(280, 270, heads=3, heads_kv=1, shift=150, deterministic=True),
        # A mask without a block mask.
        "divides": Problem("divides", *(140, 200, 4, 2), head_dim=128, mask_mod=divides, call=dict(deterministic=True)),
        "stripes": Problem("stripes", *(140, 200, 4, 2), head_dim=128, mask_mod=stripes, call=dict(deterministic=True)),
        # Heads are rows of a tile, and the keys are split.
        "packed_and_split": Problem(
            "packed_and_split", *(3, 1400, 6, 2), score_mod=fa4.scores.relative_bias(table), mask_mod=divides
        ),
        # The same with few operations; most parts see nothing of most heads.
        "packed_by_head": Problem(
            "packed_by_head",
            *(3, 1400, 6, 2),
            score_mod=lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx],
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 210 * (h + 1) + q_idx,
        ),
    }
