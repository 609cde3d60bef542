"""Attention dropout: the definition of its bits, tiled torch against the oracle, arguments, what torch does with it."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4.mods.ir.dropout import KEYS, Rate, philox
from fa4.mods.ir.record import Mods, ModSpec
from fa4.oracle.cases import Case, assert_right, judge_backward, judge_forward, make
from fa4.runtime.device import chip_by_number
from fa4.runtime.dispatch import BACKENDS
from fa4.runtime.spec import AttentionInputs, AttentionSpec, Flags, ProblemSize

SIZES = dict(batch=2, heads=3, seqlen_q=70, seqlen_k=100)

# Each is a way of finding a pair's place.
CASES = {
    case.name: case
    for case in (
        Case("dense", batch=2, seqlen_q=150, seqlen_k=203, heads_q=6, heads_kv=2, causal=True, dropout_p=0.1),
        Case("large_p_and_softcap", seqlen_q=90, seqlen_k=90, softcap=15.0, dropout_p=0.7),
        Case("window_begins_within_a_word", seqlen_q=300, seqlen_k=300, window_size=(45, 3), dropout_p=0.25),
        Case("sink", seqlen_q=60, seqlen_k=130, sink=True, dropout_p=0.5),
        Case(
            "varlen", lengths=((37, 37), (200, 180), (0, 20), (1, 1), (60, 129)), heads_q=4, causal=True, dropout_p=0.3
        ),
        Case("seqused", lengths=((100, 140), (60, 60)), seqused=((77, 131), (60, 0)), dropout_p=0.3),
    )
}


def test_philox_gives_the_published_words():
    """Of ten rounds, the known answers of Random123 (kat_vectors); seven are the same rounds, stopped earlier."""
    for number, key, words in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        counter, keys = ([torch.tensor(x) for x in numbers] for numbers in (number, key))
        assert tuple(int(x) for x in philox(tuple(counter), tuple(keys), rounds=10)) == words


def byte_by_byte(dropout_p, seed, offset, pair, query, key):
    """Whether a pair is kept, by the sentences of the definition."""
    words = []
    for half in (0, 1):
        counter = [torch.tensor(x) for x in (2 * (key // 32) + half, query, pair, offset % 2**32)]
        words += philox(tuple(counter), (torch.tensor(seed % 2**32), torch.tensor(seed // 2**32)))
    byte = int("".join(str(int(word) >> key % 32 & 1) for word in words), 2)
    return byte < round(256 * (1 - dropout_p))


def test_the_mask_is_its_definition():
    seed, offset = 2**64 - 12345, 2**40 + 6
    mask = fa4.dropout_mask(0.3, (seed, offset), **SIZES)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 69, 99), (0, 1, 3, 31), (1, 0, 40, 32), (1, 1, 1, 65), (0, 2, 50, 64)):
        assert bool(mask[b, h, i, j]) == byte_by_byte(0.3, seed, offset, b * 3 + h, i, j)


def test_the_mask_is_as_likely_as_it_says_and_its_bits_are_alone(seed):
    """Means within five sigma, of pairs and of pairs of neighbours along each axis and between seeds and offsets."""
    sizes = dict(batch=4, heads=4, seqlen_q=256, seqlen_k=256)
    mask = fa4.dropout_mask(0.3, (seed, 1), **sizes)
    kept = Rate.of(0.3).threshold / 256

    def assert_mean(bits, mean):
        assert abs(float(bits.double().mean()) - mean) < 5 * (mean * (1 - mean) / bits.numel()) ** 0.5

    assert_mean(mask, kept)
    for axis in range(4):
        assert_mean((mask & mask.roll(1, axis)).narrow(axis, 1, mask.shape[axis] - 1), kept**2)
    assert_mean((mask & mask.roll(32, 3))[..., 32:], kept**2)
    for other in ((seed + 1, 1), (seed, 2), (seed + 2**32, 1)):
        assert_mean(mask & fa4.dropout_mask(0.3, other, **sizes), kept**2)


def test_the_mask_of_a_larger_problem_begins_with_that_of_a_smaller():
    small = fa4.dropout_mask(0.5, 3, **SIZES)
    large = fa4.dropout_mask(0.5, 3, **SIZES | dict(batch=5, seqlen_q=90, seqlen_k=333))
    assert torch.equal(large[:2, :, :70, :100], small)


@pytest.mark.parametrize("p, threshold", ((0.1, 230), (0.5, 128), (1e-4, 255), (0.9999, 1), (1.0, 0)))
def test_the_probability_is_rounded_to_parts_of_256(p, threshold):
    assert Rate.of(p) == (threshold, 256 / threshold if threshold else 0.0)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_results_against_the_oracle(case, seed):
    problem = make(replace(case, dtype=torch.float32), seed)
    out, lse, grads = problem.call_with_gradients(backend="torch")
    assert_right(judge_forward(problem, out, lse), f"{case}, seed {seed}")
    assert_right(judge_backward(problem, grads), f"{case}, seed {seed}")


def tensors(seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, 40, 2, 16, dtype=torch.float64, generator=generator).requires_grad_(**options) for _ in range(3)
    ]


def by_mask(q, k, v, mask, p):
    """Attention with an explicit mask, by torch's own operators."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax(q @ k.transpose(2, 3) / 4, dim=3) * mask * Rate.of(p).scale
    return (weights @ v).transpose(1, 2)


def test_gradients_are_those_of_the_mask_by_autograd():
    q, k, v = leaves = tensors()
    mask = fa4.dropout_mask(0.2, (5, 6), batch=2, heads=2, seqlen_q=40, seqlen_k=40)
    out, expected = fa4.flash_attn_func(q, k, v, dropout_p=0.2, dropout_seed=(5, 6)), by_mask(q, k, v, mask, 0.2)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for got, wanted in zip(*(torch.autograd.grad(x, leaves, dout) for x in (out, expected))):
        torch.testing.assert_close(got, wanted)


def test_with_a_score_mod_and_its_captured_tensor():
    q, k, v = tensors()
    bias = torch.randn(2, 40, dtype=torch.float64, requires_grad=True)
    leaves = q, k, v, bias
    mask = fa4.dropout_mask(0.2, 8, batch=2, heads=2, seqlen_q=40, seqlen_k=40)
    out = fa4.flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, j], dropout_p=0.2, dropout_seed=8)
    qs, ks, vs = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax(qs @ ks.transpose(2, 3) / 4 + bias[:, None], dim=3) * mask * Rate.of(0.2).scale
    expected = (weights @ vs).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for got, wanted in zip(*(torch.autograd.grad(x, leaves, dout) for x in (out, expected))):
        torch.testing.assert_close(got, wanted)


def test_nothing_and_everything_dropped():
    q, k, v = leaves = tensors()
    plain, lse = fa4.flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(fa4.flash_attn_func(q, k, v, dropout_p=0.0, dropout_seed=3), plain)
    out, own_lse = fa4.flash_attn_func(q, k, v, dropout_p=1.0, return_lse=True)
    assert torch.equal(own_lse, lse)
    for x in (out, *torch.autograd.grad(out.sum(), leaves)):
        assert not x.any()


def test_without_a_seed_the_generator_decides():
    q, k, v = tensors(requires_grad=False)

    def drawn():
        return fa4.flash_attn_func(q, k, v, dropout_p=0.5)

    torch.manual_seed(1)
    first, second = drawn(), drawn()
    torch.manual_seed(1)
    assert torch.equal(drawn(), first)
    assert not torch.equal(first, second)


def test_a_seed_has_several_forms():
    q, k, v = tensors(requires_grad=False)
    forms = 2**64 - 9, (2**64 - 9, 0), [-9, 0], torch.tensor([-9, 0])
    results = [fa4.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=form) for form in forms]
    assert all(torch.equal(x, results[0]) for x in results[1:])
    assert not torch.equal(results[0], fa4.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=(-9, 1)))


def test_a_seed_that_changed_before_the_backward_is_noticed():
    leaves, seed = tensors(), torch.tensor([3, 0])
    out = fa4.flash_attn_func(*leaves, dropout_p=0.5, dropout_seed=seed)
    seed[1] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    "error, message, options",
    [
        (ValueError, "dropout_p is 1.5, expected a number from 0 to 1", dict(dropout_p=1.5)),
        (ValueError, "dropout_p is -0.1, expected a number from 0 to 1", dict(dropout_p=-0.1)),
        (TypeError, "dropout_p is a Tensor, expected a float", dict(dropout_p=torch.tensor(0.0))),
        (TypeError, "dropout_seed is 'x', expected an int", dict(dropout_p=0.1, dropout_seed="x")),
        (TypeError, r"dropout_seed is \(1, 2, 3\)", dict(dropout_p=0.1, dropout_seed=(1, 2, 3))),
        (ValueError, "expected ints of 64 bits", dict(dropout_p=0.1, dropout_seed=2**64)),
        (ValueError, r"shape \(2\), torch\.int32", dict(dropout_p=0.1, dropout_seed=torch.zeros(2).int())),
    ],
)
def test_errors_name_the_argument(error, message, options):
    with pytest.raises(error, match=message):
        fa4.flash_attn_func(*tensors(requires_grad=False), **options)


def test_checkpointing_drops_the_same_again():
    q, k, v = leaves = tensors()

    def block(q, k, v):
        return fa4.flash_attn_func(q, k, v, dropout_p=0.5)

    results = []
    for call in (block, lambda *x: checkpoint(block, *x, use_reentrant=False)):
        torch.manual_seed(4)
        results.append(torch.autograd.grad(call(q, k, v).square().sum(), leaves))
    assert all(map(torch.equal, *results))


def test_opcheck():
    inputs = AttentionInputs(*tensors(), max_seqlen_q=40, max_seqlen_k=40)
    mods = Mods.without_functions(0.5, torch.tensor([1, 2]))
    flags = Flags(0.25, needs_backward=True)
    torch.library.opcheck(torch.ops.fa4.forward_with_mods.default, (*inputs, *mods, *flags))


def test_flops_are_those_without_dropout():
    with FlopCounterMode(display=False) as counter:
        fa4.flash_attn_func(*tensors(), dropout_p=0.5).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * (2 * 2 * 40 * 40 * 16)


def test_fullgraph_compile_draws_its_seeds():
    leaves = tensors()
    compiled = torch.compile(lambda *x: fa4.flash_attn_func(*x, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(2)
    expected = torch.autograd.grad(fa4.flash_attn_func(*leaves, dropout_p=0.5).sum(), leaves)
    torch.manual_seed(2)
    assert all(map(torch.equal, torch.autograd.grad(compiled(*leaves).sum(), leaves), expected))
    assert not torch.equal(compiled(*leaves), compiled(*leaves))


def test_transforms_of_functions_are_refused():
    q, k, v = tensors(requires_grad=False)
    with pytest.raises(NotImplementedError, match="dropout_p do not work inside transforms"):
        torch.vmap(lambda x: fa4.flash_attn_func(x, k, v, dropout_p=0.5, dropout_seed=1))(q[None])


@pytest.mark.parametrize("backend, number", [("sm80", 80), ("sm90", 90), ("sm100", 100)])
def test_tiles_are_made_of_whole_words(backend, number):
    """Kernels take the words of a block of keys from its first key on."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    plans = importlib.import_module(f"fa4.{backend}.plan")
    for head_dim in (64, 96, 128, 192, 256):
        for extent in (ProblemSize(1, 1, 4096), ProblemSize(2, 4096, 4096)):
            for right in (None, 0):
                spec = AttentionSpec(
                    torch.bfloat16, head_dim, head_dim, 4, 4, 1.0, window_right=right, mods=ModSpec(dropout=True)
                )
                chip = chip_by_number(number)
                if any(row.name == backend and not row.refusals(spec, chip) for row in BACKENDS):
                    cfg = plans.Plan(spec, extent, chip)._forward.cfg
                    tile_n = cfg.tiles.tile_n if backend == "sm80" else cfg.tile_n
                    assert tile_n % KEYS == 0, (head_dim, extent, right)
