"""Calls on e2m1 q, k and v with scales of blocks of 16: everywhere but on chips that multiply them, attention on the
numbers that they stand for."""

import pytest
import torch

import fa4
from fa4.runtime import nvfp4
from fa4.runtime.device import chip_by_number, emulating

from .test_nvfp4 import decoded
from .test_recipes import assert_same, drawn


def made(seed, seqlen_q=50, seqlen_k=77, heads=4, heads_kv=2, head_dim=64, head_dim_v=48):
    """q, k and v, and the arguments of a call."""
    tensors = (
        drawn(seed, 2, seqlen_q, heads, head_dim).clamp(-9, 9),
        drawn(seed + 1, 2, seqlen_k, heads_kv, head_dim).clamp(-9, 9),
        drawn(seed + 2, 2, seqlen_k, heads_kv, head_dim_v).clamp(-9, 9),
    )
    arguments, exact = {}, []
    for name, x in zip("qkv", tensors):
        axis = "tokens" if name == "v" else "head_dim"
        arguments[name], arguments[f"{name}_descale"] = four = fa4.quantize(x, "nvfp4", axis=axis)
        exact.append(fa4.dequantize(*four, seqlen=x.shape[1] if name == "v" else None))
    return exact, arguments


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 45])
def test_tokens_of_a_column_are_quantised_as_columns_of_a_row(tokens, seed):
    x = drawn(seed, 2, tokens, 3, 32).clamp(-9, 9)
    data, scales = fa4.quantize(x, "nvfp4", axis="tokens")
    assert data.dtype == nvfp4.DTYPE and data.shape == (2, -(-tokens // 2), 3, 32) and data.is_contiguous()
    assert scales.shape == (2, -(-tokens // 16), 3, 32) and scales.is_contiguous()
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -tokens % 16)).transpose(1, -1).contiguous()
    of_rows = fa4.quantize(padded, "nvfp4")
    assert_same(scales.transpose(1, -1), of_rows.scales)
    numbers = decoded(of_rows.data).transpose(1, -1)[:, : 2 * data.shape[1]]
    for half in range(2):  # of a byte
        assert_same(decoded(data)[..., half::2], numbers[:, half::2])
    back = fa4.dequantize(data, scales, torch.float32, seqlen=tokens)
    assert_same(back, fa4.dequantize(*of_rows, torch.float32).transpose(1, -1)[:, :tokens])


def test_no_tokens():
    four = fa4.quantize(torch.zeros(2, 0, 3, 32), "nvfp4", axis="tokens")
    assert four.data.shape == four.scales.shape == (2, 0, 3, 32)
    assert four.data.stride() == four.scales.stride() == (96, 96, 32, 1)
    assert fa4.dequantize(*four).shape == (2, 0, 3, 32)


def test_tokens_that_are_not_used_count_in_no_scale(seed):
    x, used = drawn(seed, 2, 40, 1, 32).clamp(-9, 9), torch.tensor([40, 21], dtype=torch.int32)
    clean = torch.where(torch.arange(40)[:, None, None] < used[:, None, None, None], x, 0.0)
    x[1, 21:] = torch.nan
    for one, other in zip(
        fa4.quantize(x, "nvfp4", axis="tokens", seqused=used), fa4.quantize(clean, "nvfp4", axis="tokens")
    ):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


OPTIONS = {
    "plain": {},
    "causal": dict(causal=True, softcap=5.0),
    "window": dict(window_size=(9, 30), softmax_scale=-0.2),
    "used": dict(seqused_k=torch.tensor([77, 20], dtype=torch.int32)),
    "functions": dict(score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j), mask_mod=lambda b, h, i, j: j % 3 > 0),
    "dropout": dict(dropout_p=0.25, dropout_seed=3),
}


@pytest.mark.parametrize("chip", [None, 80, 90, 100], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_is_that_of_the_numbers(name, chip, seed):
    (q, k, v), four = made(seed)
    options = OPTIONS[name] | dict(return_lse=True)
    if chip is None:
        for x, y in zip(fa4.flash_attn_func(**four, **options), fa4.flash_attn_func(q, k, v, **options)):
            assert torch.equal(x, y), f"seed {seed}"
        return
    del options["return_lse"]
    with emulating(chip_by_number(chip)):
        found = fa4.explain(**four, **{name: x for name, x in options.items() if name != "dropout_seed"})
    assert found.spec.operands is None and (found.spec.head_dim, found.spec.head_dim_v) == (64, 48)
    assert "products of 4 bits: no kernel has them" in str(found)


def test_compiled_code_is_the_same(seed):
    _, four = made(seed)
    names = list(four)
    call = torch.compile(
        lambda *tensors: fa4.flash_attn_func(**dict(zip(names, tensors)), causal=True),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(call(*four.values()), fa4.flash_attn_func(**four, causal=True))


def test_the_sink_has_a_gradient(seed):
    (q, k, v), four = made(seed)
    sinks = [torch.linspace(-1, 1, 4).requires_grad_() for _ in range(2)]
    fa4.flash_attn_func(**four, learnable_sink=sinks[0]).float().sum().backward()
    fa4.flash_attn_func(q, k, v, learnable_sink=sinks[1]).float().sum().backward()
    assert torch.equal(sinks[0].grad, sinks[1].grad)


def test_flops_count_numbers():
    from torch.utils.flop_counter import FlopCounterMode

    _, four = made(0)
    with FlopCounterMode(display=False) as counter:
        fa4.flash_attn_func(**four)
    assert counter.get_total_flops() == 2 * 2 * 4 * 50 * 77 * (64 + 48)


_, FOUR = made(0)
X = torch.zeros(2, 77, 2, 64)
ALONG_COLUMNS = fa4.quantize(X, "nvfp4")
WRONG = {
    "v along columns": (
        dict(v=ALONG_COLUMNS.data, v_descale=ALONG_COLUMNS.scales), ValueError,
        r"v has shape \(2, 77, 2, 32\), expected \(2, 39, 2, \*\) to go with the 77 tokens of k: two tokens a byte",
    ),
    "16-bit v": (dict(v=X.bfloat16()), TypeError, "v has dtype torch.bfloat16, expected torch.float4_e2m1fn_x2"),
    "e4m3 q": (dict(q=X.to(torch.float8_e4m3fn)), TypeError, "q has dtype torch.float8_e4m3fn, expected torch.float4"),
    "no scales": (dict(k_descale=None), TypeError, "k_descale is a NoneType, expected torch.float8_e4m3fn scales of k"),
    "scales of v": (
        dict(v_descale=FOUR["v_descale"][:, :4]), ValueError,
        r"v_descale has shape \(2, 4, 2, 48\), expected \(2, 5, 2, 48\) beside v",
    ),
    "dtype of scales": (dict(q_descale=FOUR["q_descale"].float()), TypeError, "q_descale has dtype torch.float32"),
    "heads": (dict(q=FOUR["q"][:, :, :3], q_descale=FOUR["q_descale"][:, :, :3]), ValueError, "q has 3 heads"),
    "precision": (dict(precision="fp8"), ValueError, "q_descale is given with precision 'fp8'"),
    "axes": (
        dict(q=FOUR["q"][0], q_descale=FOUR["q_descale"][0]), ValueError, r"q has 3 dimensions, shape \(50, 4, 32\)"
    ),
    "backend": (dict(backend="sm120"), ValueError, "no backend can run this"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_argument(name):
    changes, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        fa4.flash_attn_func(**FOUR | changes)


def test_packed_sequences_are_refused():
    bounds = torch.tensor([0, 77], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="which packed sequences do not support: pass padded tensors"):
        fa4.flash_attn_varlen_func(**{n: x[0] for n, x in FOUR.items()}, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    with pytest.raises(ValueError, match=r"x has shape \(77, 2, 64\), expected \(batch, seqlen, heads, head_dim\)"):
        fa4.quantize(X[0], "nvfp4", axis="tokens")


@pytest.mark.parametrize("tokens, expected", [(75, "77 or 78"), (79, "77 or 78")])
def test_the_number_of_tokens_fits_the_rows(tokens, expected):
    with pytest.raises(ValueError, match=f"seqlen is {tokens}, expected {expected}"):
        fa4.dequantize(FOUR["v"], FOUR["v_descale"], seqlen=tokens)
    with pytest.raises(ValueError, match="seqlen is given, expected None"):
        fa4.dequantize(FOUR["k"], FOUR["k_descale"], seqlen=77)
