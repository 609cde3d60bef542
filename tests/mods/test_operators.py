"""The operators of calls with mods as torch sees them: opcheck, checkpointing, FLOP counts, and what is refused."""

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4.runtime.spec import AttentionInputs, Flags
from fa4.torch_ops import mod_ops

from .programs import SCORES


def arguments(requires_grad):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 20, heads, 8, generator=generator) for heads in (4, 2, 2))
    score_mod, (slopes,) = SCORES["alibi"].of(torch.float32)
    block_mask = fa4.create_block_mask(fa4.masks.sliding_window(5), 2, None, 20, 20, "cpu", BLOCK_SIZE=8)
    inputs = AttentionInputs(q, k, v, max_seqlen_q=20, max_seqlen_k=20)
    mods, flags = mod_ops.prepare(inputs, Flags(0.3, needs_backward=requires_grad), score_mod, None, block_mask)
    for x in (q, k, v):
        x.requires_grad_(requires_grad)
    mods.tensors[0] = slopes.detach().requires_grad_(requires_grad)
    return inputs, mods, flags


def test_opcheck_forward():
    inputs, mods, flags = arguments(True)
    torch.library.opcheck(torch.ops.fa4.forward_with_mods.default, (*inputs, *mods, *flags))


def test_opcheck_backward():
    inputs, mods, flags = arguments(False)
    out, lse = torch.ops.fa4.forward_with_mods(*inputs, *mods, *flags)
    saved = (out, lse, torch.ones_like(out), torch.ones_like(lse))
    torch.library.opcheck(torch.ops.fa4.backward_with_mods.default, (*saved, *inputs, *mods, *flags))


def test_activation_checkpointing_reaches_captured_tensors():
    q = torch.randn(1, 20, 4, 8, requires_grad=True)
    score_mod, (slopes,) = SCORES["alibi"].of(torch.float32)

    def attend(q):
        return fa4.flash_attn_func(q, q, q, score_mod=score_mod)

    expected = torch.autograd.grad(attend(q).sum(), (q, slopes))
    got = torch.autograd.grad(checkpoint(attend, q, use_reentrant=False).sum(), (q, slopes))
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_flop_counter_counts_visited_blocks():
    """A window of 16 keys in 512: 2 of 32 blocks a row, but of the first."""
    q = torch.randn(1, 512, 2, 8, requires_grad=True)
    block_mask = fa4.create_block_mask(fa4.masks.sliding_window(15), None, None, 512, 512, "cpu", BLOCK_SIZE=16)
    with FlopCounterMode(display=False) as counter:
        fa4.flash_attn_func(q, q, q, block_mask=block_mask).sum().backward()
    pairs = (2 * 32 - 1) * 16 * 16
    assert counter.get_total_flops() == 2 * 2 * pairs * 8 * (2 + 5)


def test_transforms_of_functions_are_refused():
    q = torch.randn(1, 20, 2, 8)
    with pytest.raises(NotImplementedError, match=r"transforms of torch\.func"):
        torch.func.grad(lambda x: fa4.flash_attn_func(x, q, q, score_mod=fa4.scores.softcap(2.0)).sum())(q)


def test_fullgraph_compile_with_gradients_of_captured_tensors():
    score_mod, (slopes,) = SCORES["alibi"].of(torch.float32)
    q = torch.randn(1, 20, 4, 8, requires_grad=True)

    def attend(q):
        return fa4.flash_attn_func(q, q, q, score_mod=score_mod, mask_mod=fa4.masks.causal)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        expected, got = (f(q) for f in (attend, compiled))
        assert torch.equal(got, expected)
        pairs = zip(*(torch.autograd.grad(out.sum(), (q, slopes)) for out in (got, expected)))
        assert all(torch.equal(a, b) for a, b in pairs)
        with torch.no_grad():
            slopes.mul_(2)


def test_fullgraph_compile_with_other_functions_and_block_masks():
    """What was compiled holds for one function: another one's numbers were taken for the first one's. Lists and values
    may change."""
    q = torch.randn(1, 40, 2, 8, requires_grad=True)
    softcap, graphs = fa4.scores.softcap(3.0), []

    def attend(q, mask_mod, block_mask):
        return fa4.flash_attn_func(q, q, q, score_mod=softcap, mask_mod=mask_mod, block_mask=block_mask)

    def count(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=count)
    windows = [fa4.masks.sliding_window(width) for width in (5, 20)]
    masks = [fa4.create_block_mask(window, None, None, 40, 40, "cpu", BLOCK_SIZE=8) for window in windows]
    narrow = fa4.create_block_mask(fa4.masks.sliding_window(3), None, None, 40, 40, "cpu", BLOCK_SIZE=8)
    lists = narrow.kv_num_blocks, narrow.kv_indices, narrow.full_kv_num_blocks, narrow.full_kv_indices
    fewer = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=8, mask_mod=windows[0], seq_lengths=(40, 40))
    for given, compiles in (
        *(((window, None), 1) for window in windows),
        *(((None, block_mask), 1) for block_mask in masks),
        ((None, fewer), 0),
        ((windows[0], None), 0),
    ):
        before = len(graphs)
        expected, got = (f(q, *given) for f in (attend, compiled))
        assert torch.equal(got, expected)
        assert torch.equal(*(torch.autograd.grad(out.sum(), q)[0] for out in (got, expected)))
        assert len(graphs) == before + compiles


def test_packed_calls_and_caches_with_functions_compile_whole(seed):
    """What a call keeps for others like it is nothing that compiled code makes."""
    generator = torch.Generator().manual_seed(seed)
    slopes, bounds = torch.rand(2, generator=generator), torch.tensor([0, 20, 60], dtype=torch.int32)
    used = torch.tensor([30, 41], dtype=torch.int32)
    q, k = torch.randn(60, 2, 8, generator=generator), torch.randn(2, 50, 2, 8, generator=generator)

    def sloped(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx)

    def packed(q):
        sizes = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=40, max_seqlen_k=40)
        return fa4.flash_attn_varlen_func(q, q, q, **sizes, score_mod=sloped, causal=True)

    def on_cache(q):
        return fa4.flash_attn_with_kvcache(
            q[None, :1].expand(2, -1, -1, -1), k, k, cache_seqlens=used, score_mod=sloped
        )

    for attend in (packed, on_cache):
        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for _ in range(3):
            torch.testing.assert_close(compiled(q), attend(q))
