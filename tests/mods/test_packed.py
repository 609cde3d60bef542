"""Block masks of packed sequences: in tiled torch, in the kernels of three chips, and what is refused."""

import importlib.util

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fa4
from tests.mods.packed import assert_packed_is_right, packed_problems, results_of

pytestmark = pytest.mark.rotates(3)

needs_chips = pytest.mark.skipif(
    not (importlib.util.find_spec("cutlass") and importlib.util.find_spec("warpcheck.machine._core")),
    reason="needs CuTe DSL, which is installed on Linux only, and the emulator's core",
)
CHIPS = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100a"}
# The soak runs all others.
QUICK = {"sm80": ("documents",), "sm90": ("heads_used",), "sm100": ("documents",)}


@pytest.mark.parametrize("name", packed_problems())
def test_in_tiled_torch(name, seed):
    assert_packed_is_right(packed_problems()[name], seed, "torch")


@needs_chips
@pytest.mark.parametrize(
    "backend, name",
    [
        pytest.param(backend, name, marks=[pytest.mark.soak] * (name not in quick))
        for backend, quick in QUICK.items()
        for name in packed_problems()
    ],
)
def test_in_kernels(backend, name, seed):
    from fa4.emulator import emulate

    with emulate(CHIPS[backend], sms=4, seed=seed):
        assert_packed_is_right(packed_problems()[name], seed, backend)


def test_a_mask_for_longer_sequences_gives_the_same(seed):
    problem = packed_problems()["documents"]
    longer = torch.nn.functional.pad(problem.mask_mod.document, (0, 200))
    block_mask = fa4.create_block_mask(fa4.masks.documents(longer), 5, None, 600, 600, device="cpu")
    results = results_of(problem, seed, "torch")
    others = results_of(problem, seed, "torch", block_mask=block_mask)
    assert all(map(torch.equal, results, others))


def test_flops_are_those_of_blocks_that_sequences_have():
    """Of 3 x 4 blocks: 3 x 3, none, 1 x 1, 2 x 4, none."""
    problem = packed_problems()["whole"]
    (q, k, v), _ = problem.make(0)
    options = problem.options("cpu")
    options = {name: options[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    with FlopCounterMode(display=False) as counter:
        fa4.flash_attn_varlen_func(q, k, v, **options, block_mask=problem.block_mask)
    assert counter.get_total_flops() == 2 * 2 * 32 * 128 * 128 * 2 * (9 + 1 + 8)


@pytest.mark.parametrize(
    "message, sizes, options",
    [
        ("block_mask is for batch 4, expected 1 or 5", (4, None, 300, 400), {}),
        ("block_mask is for query heads 3, expected 1 or 2", (None, 3, 300, 400), {}),
        (
            "block_mask is for 300 queries and 400 keys, expected 301 and 400 at least, like max_seqlen",
            (None, None, 300, 400),
            dict(max_seqlen_q=301, max_seqlen_k=400),
        ),
        ("max_seqlen_q is 256, expected at least 300, the longest sequence", (None, None, 256, 400), {}),
    ],
    ids=["batch", "heads", "max_seqlen", "longer_sequence"],
)
def test_errors_say_what_does_not_fit(message, sizes, options):
    problem = packed_problems()["whole"]
    (q, k, v), _ = problem.make(0)
    lengths = {name: x for name, x in problem.options("cpu").items() if name.startswith("cu")}
    block_mask = fa4.create_block_mask(fa4.masks.causal, *sizes, device="cpu")
    with pytest.raises(ValueError, match=message):
        fa4.flash_attn_varlen_func(q, k, v, **lengths, block_mask=block_mask, **options)


def test_used_keys_of_a_padded_batch_end_within_whole_blocks(seed):
    """Blocks that a list calls whole and that used keys end in, or before."""
    q, k, v = torch.randn(3, 2, 300, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).unbind()
    used = torch.tensor([100, 256], dtype=torch.int32)
    block_mask = fa4.create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 0 * q_idx, None, None, 300, 300, "cpu")
    out = fa4.flash_attn_func(q, k, v, seqused_k=used, block_mask=block_mask)
    torch.testing.assert_close(out, fa4.flash_attn_func(q, k, v, seqused_k=used))


@needs_chips
@pytest.mark.parametrize("backend", ["sm100", *(pytest.param(x, marks=pytest.mark.soak) for x in ("sm80", "sm90"))])
def test_used_keys_end_within_whole_blocks_in_kernels(backend, seed):
    """That of Blackwell once took keys for seen that lie in whole blocks past the one where used keys end."""
    from fa4.emulator import emulate

    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 128, 2, 64, generator=generator).bfloat16().unbind()
    k, v = (x.repeat(1, 3, 1, 1) for x in (k, v))
    used = torch.tensor([100], dtype=torch.int32)
    everything = fa4.create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 0 * q_idx, None, None, 128, 384, "cpu")
    with emulate(CHIPS[backend], sms=4, seed=seed):
        out = fa4.flash_attn_func(q, k, v, seqused_k=used, block_mask=everything, backend=backend)
    expected = fa4.flash_attn_func(*(x.double() for x in (q, k, v)), seqused_k=used)
    assert (out.double() - expected).abs().max() < 0.03, f"seed {seed}"
