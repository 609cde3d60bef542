"""What callers see: errors that name the argument, conventions of the field, explain."""

import contextlib
import inspect
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fa4
from fa4.oracle.cases import CASES, make
from fa4.runtime.spec import AttentionInputs, AttentionSpec


def qkv(batch=2, seqlen_q=7, seqlen_k=9, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32):
    return (
        torch.randn(batch, seqlen_q, heads_q, head_dim, dtype=dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype),
    )


Q, K, V = qkv()

DENSE_ERRORS = {
    "q_not_a_tensor": (TypeError, "q is a list", dict(q=[1.0])),
    "sparse": (TypeError, "k has layout torch.sparse_coo, expected torch.strided", dict(k=K.to_sparse())),
    "q_three_dims": (ValueError, "q has 3 dimensions", dict(q=Q[0])),
    "integer_dtype": (TypeError, "q has dtype torch.int64", dict(q=Q.long())),
    "mixed_dtypes": (TypeError, "k has dtype torch.float16, expected torch.float32", dict(k=K.half())),
    "other_device": (ValueError, "v is on meta, expected cpu", dict(v=V.to("meta"))),
    "batch_of_k": (ValueError, r"k has shape \(1, 9, 2, 16\), expected \(2, \*, \*, 16\)", dict(k=K[:1])),
    "head_dim_of_k": (ValueError, "k has shape", dict(k=K[..., :8].contiguous())),
    "seqlen_of_v": (ValueError, r"v has shape \(2, 8, 2, 16\), expected \(2, 9, 2, \*\)", dict(v=V[:, :8])),
    "heads_do_not_divide": (ValueError, "q has 3 heads, expected a positive multiple of k's 2", dict(q=Q[:, :, :3])),
    "strided_last_axis": (ValueError, "q has stride 2 on its last axis", dict(q=torch.randn(2, 7, 4, 32)[..., ::2])),
    "nan_scale": (ValueError, "softmax_scale is nan", dict(softmax_scale=float("nan"))),
    "scale_a_tensor": (TypeError, "softmax_scale is a Tensor, expected a float", dict(softmax_scale=torch.tensor(1.0))),
    "softcap_none": (TypeError, "softcap is a NoneType, expected a float or an int", dict(softcap=None)),
    "infinite_softcap": (ValueError, "softcap is inf, expected a finite", dict(softcap=float("inf"))),
    "causal_a_word": (TypeError, "causal is a str, expected a bool", dict(causal="no")),
    "deterministic_a_number": (TypeError, "deterministic is a int, expected a bool or None", dict(deterministic=1)),
    "no_q": (TypeError, "q is a NoneType, expected a torch.Tensor", dict(q=None)),
    "enormous_scale": (ValueError, "softmax_scale is an integer of that size", dict(softmax_scale=10**400)),
    "scale_beyond_float32": (ValueError, "softmax_scale is 1e[+]39, expected", dict(softmax_scale=1e39)),
    "scale_a_bool": (TypeError, "softmax_scale is a bool", dict(softmax_scale=True)),
    "scale_an_array": (TypeError, "softmax_scale is a ndarray", dict(softmax_scale=np.ones(2))),
    "window_a_string": (ValueError, "window_size is", dict(window_size=("3", 0))),
    "sink_sparse": (TypeError, "learnable_sink has layout", dict(learnable_sink=torch.zeros(4).to_sparse())),
    "sink_float8": (
        TypeError,
        "learnable_sink has dtype torch.float8_e4m3fn",
        dict(learnable_sink=torch.zeros(4).to(torch.float8_e4m3fn)),
    ),
    "negative_softcap": (ValueError, "softcap is -1.0", dict(softcap=-1.0)),
    "negative_window": (ValueError, r"window_size is \(-2, 0\)", dict(window_size=(-2, 0))),
    "window_not_a_pair": (TypeError, "window_size is 5, expected a pair", dict(window_size=5)),
    "fractional_window": (ValueError, "window_size is", dict(window_size=(1.5, 0))),
    "sink_shape": (ValueError, r"learnable_sink has shape \(2\), expected \(4,\)", dict(learnable_sink=torch.zeros(2))),
    "sink_dtype": (TypeError, "learnable_sink has dtype", dict(learnable_sink=torch.zeros(4, dtype=torch.int32))),
    "sink_device": (ValueError, "learnable_sink is on meta", dict(learnable_sink=torch.zeros(4, device="meta"))),
    "seqused_shape": (ValueError, r"seqused_k has shape \(3\), expected \(2,\)", dict(seqused_k=torch.ones(3).int())),
    "seqused_dtype": (TypeError, "seqused_k has dtype torch.int64", dict(seqused_k=torch.ones(2).long())),
    "seqused_too_large": (
        ValueError,
        r"seqused_k is \[9, 10\], expected 0 to",
        dict(seqused_k=torch.tensor([9, 10], dtype=torch.int32)),
    ),
    "dropout_a_word": (TypeError, "dropout_p is a str, expected a float", dict(dropout_p="0.1")),
    "return_lse_a_word": (TypeError, "return_lse is a str, expected a bool", dict(return_lse="yes")),
    "unknown_backend": (ValueError, "backend is 'fast', expected one of 'auto'", dict(backend="fast")),
}


@pytest.mark.parametrize("error, message, change", DENSE_ERRORS.values(), ids=DENSE_ERRORS)
def test_dense_error_names_the_argument(error, message, change):
    arguments = {"q": Q, "k": K, "v": V, **change}
    with pytest.raises(error, match=message):
        fa4.flash_attn_func(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


PACKED = dict(q=torch.randn(10, 4, 16), k=torch.randn(12, 2, 16), v=torch.randn(12, 2, 16))
VARLEN_ERRORS = {
    "cu_seqlens_dtype": (TypeError, "cu_seqlens_q has dtype torch.int64", dict(cu_seqlens_q=torch.tensor([0, 4, 10]))),
    "cu_seqlens_nested": (
        TypeError,
        "cu_seqlens_k is a nested tensor, expected",
        dict(cu_seqlens_k=torch.nested.nested_tensor([i32(0), i32(5)], layout=torch.strided)),
    ),
    "cu_seqlens_list": (TypeError, "cu_seqlens_k is a list", dict(cu_seqlens_k=[0, 4, 10])),
    "cu_seqlens_shape": (ValueError, r"cu_seqlens_q has shape \(1, 3\)", dict(cu_seqlens_q=i32(0, 4, 10)[None])),
    "batches_differ": (ValueError, r"cu_seqlens_k has shape \(2\), expected \(3,\)", dict(cu_seqlens_k=i32(0, 12))),
    "decreasing": (ValueError, r"cu_seqlens_q is \[0, 8, 4\], expected", dict(cu_seqlens_q=i32(0, 8, 4))),
    "cu_seqlens_of_nothing": (ValueError, r"cu_seqlens_q has shape \(0\)", dict(cu_seqlens_q=i32())),
    "cu_seqlens_elsewhere": (ValueError, "cu_seqlens_k is on meta", dict(cu_seqlens_k=i32(0, 5, 12).to("meta"))),
    "cu_seqlens_strided": (ValueError, "cu_seqlens_q has stride 2", dict(cu_seqlens_q=i32(0, 0, 4, 0, 10, 0)[::2])),
    "not_from_zero": (ValueError, r"cu_seqlens_k is \[1, 5, 12\]", dict(cu_seqlens_k=i32(1, 5, 12))),
    "past_the_end_of_q": (ValueError, "at most 10 at the end", dict(cu_seqlens_q=i32(0, 4, 11))),
    "past_the_end": (ValueError, "at most 12 at the end", dict(cu_seqlens_k=i32(0, 5, 13))),
    "max_too_small": (ValueError, "max_seqlen_q is 5, expected at least 6", dict(max_seqlen_q=5)),
    "max_k_too_small": (ValueError, "max_seqlen_k is 6, expected at least 7", dict(max_seqlen_k=6)),
    "max_a_fraction": (TypeError, r"max_seqlen_q is a tensor of shape \(\)", dict(max_seqlen_q=torch.tensor(7.0))),
    "max_a_bool": (TypeError, "max_seqlen_q is a bool", dict(max_seqlen_q=True)),
    "max_negative": (ValueError, "max_seqlen_q is -1", dict(max_seqlen_q=-1)),
    "max_a_float": (TypeError, "max_seqlen_k is a float", dict(max_seqlen_k=7.0)),
    "max_a_vector": (TypeError, r"max_seqlen_k is a tensor of shape \(1\)", dict(max_seqlen_k=torch.tensor([7]))),
    "seqused_shape": (ValueError, r"seqused_k has shape \(3\), expected \(2,\)", dict(seqused_k=i32(1, 2, 3))),
    "seqused_too_large": (ValueError, r"seqused_q is \[4, 7\], expected 0 to", dict(seqused_q=i32(4, 7))),
    "seqused_k_too_large": (ValueError, r"seqused_k is \[5, 8\], expected 0 to", dict(seqused_k=i32(5, 8))),
    "seqused_negative": (ValueError, r"seqused_q is \[-1, 3\], expected 0 to", dict(seqused_q=i32(-1, 3))),
    "seqused_dtype": (TypeError, "seqused_k has dtype torch.int64", dict(seqused_k=torch.tensor([5, 7]))),
    "heads_of_v": (ValueError, "v has shape", dict(v=torch.randn(12, 1, 16))),
    "no_key_heads": (ValueError, "multiple of k's 0", dict(k=torch.randn(12, 0, 16))),
    "dense_tensors": (ValueError, "q has 4 dimensions", dict(q=Q)),
    "head_dim_of_k": (ValueError, "k has shape", dict(k=torch.randn(12, 2, 8))),
    "rows_of_v": (ValueError, "v has shape", dict(v=torch.randn(11, 2, 16))),
}


@pytest.mark.parametrize("error, message, change", VARLEN_ERRORS.values(), ids=VARLEN_ERRORS)
def test_varlen_error_names_the_argument(error, message, change):
    arguments = {**PACKED, "cu_seqlens_q": i32(0, 4, 10), "cu_seqlens_k": i32(0, 5, 12), **change}
    with pytest.raises(error, match=message):
        fa4.flash_attn_varlen_func(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_minus_one_and_none_both_mean_an_open_window():
    a = fa4.flash_attn_func(Q, K, V, window_size=(-1, 2))
    b = fa4.flash_attn_func(Q, K, V, window_size=(None, 2))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "given, kept",
    [
        ((0, 0), (0, 0)),
        ((0, 1), (0, 1)),
        ((-1, 3), (None, 3)),
        ((3, -1), (3, None)),
        ((2**30 - 1, 2**30 - 2), (2**30 - 1, 2**30 - 2)),
    ],
    ids=str,
)
def test_each_side_of_a_window_is_kept(given, kept):
    spec = fa4.explain(Q, K, V, window_size=given).spec
    assert (spec.window_left, spec.window_right) == kept


@pytest.mark.parametrize("side", [2**30, 2**31 - 1, sys.maxsize, 2**70])
def test_a_huge_window_is_open(side):
    """Kernels count rows in 32 bits, in which the sum of a row and such a side would be negative."""
    meta = [x.to("meta", torch.bfloat16) for x in (Q, K, V)]
    assert fa4.explain(*meta, window_size=(side, side)).spec == fa4.explain(*meta).spec
    q = Q.clone().requires_grad_()
    assert torch.equal(fa4.flash_attn_func(q, K, V, window_size=(side, 0)), fa4.flash_attn_func(q, K, V, causal=True))


def test_numpy_scalars_and_lists_are_taken():
    plain = fa4.flash_attn_func(Q, K, V, softmax_scale=0.25, causal=True, window_size=(3, None), softcap=2.0)
    scalars = dict(softmax_scale=np.float32(0.25), causal=np.bool_(True), softcap=np.float64(2))
    assert torch.equal(plain, fa4.flash_attn_func(Q, K, V, window_size=[np.int64(3), None], **scalars))


def test_whole_numbers_become_floats():
    """Kernels are handed them as such."""
    spec = fa4.explain(Q, K, V, softmax_scale=1, softcap=2).spec
    assert (spec.softmax_scale, spec.softcap) == (1.0, 2.0)
    assert type(spec.softmax_scale) is type(spec.softcap) is float


def test_a_flag_of_the_wrong_type_is_seen_after_an_equal_one_of_the_right_type():
    fa4.flash_attn_func(Q, K, V, causal=True)
    with pytest.raises(TypeError, match="causal is a int"):
        fa4.flash_attn_func(Q, K, V, causal=1)


def test_autocast_decides_the_dtype_as_for_torchs_attention(seed):
    q, k, v = (x.requires_grad_() for x in qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa4.flash_attn_func(q, k, v)
        mixed = fa4.flash_attn_func(q, k.bfloat16(), v.half())
        double = fa4.flash_attn_func(q.double(), k.double(), v.double())
        assert fa4.explain(q, k, v).spec.dtype == torch.bfloat16
    assert out.dtype == mixed.dtype == torch.bfloat16 and double.dtype == torch.float64
    assert torch.equal(out, fa4.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_autocast_leaves_alone_what_it_does_not_know():
    """A device without autocast, integers (which are refused) and what is no tensor."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fa4.explain(*(x.to("meta") for x in (Q, K, V))).spec.dtype == torch.float32
        with pytest.raises(TypeError, match=r"k has dtype torch\.int64"):
            fa4.flash_attn_func(Q, K.long(), V)
        with pytest.raises(TypeError, match="q is a NoneType"):
            fa4.flash_attn_func(None, K, V)


def test_causal_and_window_both_hold():
    a = fa4.flash_attn_func(Q, K, V, causal=True, window_size=(3, 3))
    b = fa4.flash_attn_func(Q, K, V, window_size=(3, 0))
    assert torch.equal(a, b)


def test_max_seqlen_may_be_an_int_a_tensor_or_absent():
    lengths = dict(cu_seqlens_q=i32(0, 4, 10), cu_seqlens_k=i32(0, 5, 12))
    q, k, v = PACKED.values()
    results = [
        fa4.flash_attn_varlen_func(q, k, v, **lengths, max_seqlen_q=m, max_seqlen_k=m)
        for m in (None, 8, torch.tensor(8), torch.tensor(8, dtype=torch.int32))
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])
    fa4.flash_attn_varlen_func(q, k, v, **lengths, max_seqlen_q=6, max_seqlen_k=np.int64(7))  # no longer than that


def test_an_empty_batch_is_taken():
    out, lse = fa4.flash_attn_func(*qkv(batch=0), return_lse=True)
    assert out.shape == (0, 7, 4, 16) and lse.shape == (0, 4, 7)
    out, lse = fa4.flash_attn_varlen_func(
        *(x[:0] for x in PACKED.values()), cu_seqlens_q=i32(0), cu_seqlens_k=i32(0), return_lse=True
    )
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0)


def test_a_last_axis_of_one_may_have_any_stride():
    wide = [x[..., ::16] for x in (Q, K, V)]
    assert wide[0].shape[-1] == 1 != wide[0].stride(-1)
    assert torch.equal(fa4.flash_attn_func(*wide), fa4.flash_attn_func(*(x.contiguous() for x in wide)))


@pytest.mark.parametrize("asked", [False, True])
def test_lengths_on_an_accelerator_are_checked_on_request(asked, monkeypatch):
    """What stands for it here: tensors that say they are on one."""

    class Far(torch.Tensor):
        device = torch.device("cuda", 0)

    monkeypatch.setenv("FA4_CHECK_LENGTHS", "1" if asked else "0")
    monkeypatch.setattr(fa4.torch_ops.checks, "_checks_everywhere", fa4.torch_ops.checks._checks_everywhere.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    q = torch.empty(10, 2, 8).as_subclass(Far)
    inputs = AttentionInputs(q, q, q, None, i32(0, 8, 4), i32(0, 4, 8), None, None, 8, 8)
    with pytest.raises(ValueError, match="cu_seqlens_q is") if asked else contextlib.nullcontext():
        fa4.torch_ops.checks.lengths(inputs)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    fa4.torch_ops.checks.lengths(inputs)


class _Operators(TorchDispatchMode):
    """Notes what `fa4::forward` was called with, by name."""

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        if function is torch.ops.fa4.forward.default:
            self.seen = {a.name: value for a, value in zip(function._schema.arguments, arguments)}
        return function(*arguments, **(kwargs or {}))


def test_each_argument_reaches_the_operator_under_its_name():
    """All of them different, where two may differ."""
    flags = dict(softmax_scale=0.3, window_size=(5, 6), softcap=2.0, deterministic=True, backend="torch")
    sink = torch.zeros(4)
    expected = dict(softmax_scale=0.3, window_left=5, window_right=6, softcap=2.0, deterministic=True)
    expected |= dict(
        needs_backward=False, backend="torch", num_splits=0, batch_invariant=False, v_in_k=False, scales=None
    )
    with _Operators() as operators:
        fa4.flash_attn_func(Q, K, V, learnable_sink=sink, **flags)
    seen = operators.seen
    assert (seen["q"] is Q) and (seen["k"] is K) and (seen["v"] is V) and (seen["sink"] is sink)
    dense = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"))
    assert {name: seen[name] for name in seen if name not in ("q", "k", "v", "sink")} == {
        **dense, **expected, "max_seqlen_q": 7, "max_seqlen_k": 9,
    }  # fmt: skip

    lengths = dict(cu_seqlens_q=i32(0, 4, 10), cu_seqlens_k=i32(0, 5, 12), seqused_q=i32(3, 6), seqused_k=i32(5, 6))
    q, k, v = PACKED.values()
    with _Operators() as operators:
        fa4.flash_attn_varlen_func(
            q, k, v, **lengths, max_seqlen_q=8, max_seqlen_k=9, learnable_sink=sink, **(flags | {"causal": True})
        )
    seen = operators.seen
    assert all(seen[name] is x for name, x in (lengths | dict(q=q, k=k, v=v, sink=sink)).items())
    assert {name: seen[name] for name in expected} == expected | {"window_right": 0}
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == (8, 9)


def test_what_is_not_given_has_its_default():
    plain = dict(softmax_scale=0.25, window_left=None, window_right=None, softcap=0.0, deterministic=False)
    plain |= dict(needs_backward=False, backend="auto", sink=None, seqused_q=None, seqused_k=None)
    with _Operators() as operators:
        fa4.flash_attn_func(Q, K, V)
        assert {name: operators.seen[name] for name in plain} == plain
        fa4.flash_attn_varlen_func(*PACKED.values(), cu_seqlens_q=i32(0, 4, 10), cu_seqlens_k=i32(0, 5, 12))
        assert {name: operators.seen[name] for name in plain} == plain
        assert (operators.seen["max_seqlen_q"], operators.seen["max_seqlen_k"]) == (10, 12)


def test_explain_takes_the_arguments_of_both_functions():
    flags = dict(softmax_scale=0.3, window_size=(5, 6), softcap=2.0, deterministic=True, backend="torch")
    q, k, v = qkv()
    v = torch.randn(2, 9, 2, 24, requires_grad=True)
    expected = AttentionSpec(
        torch.float32, 16, 24, 4, 2, 0.3, 5, 6, 2.0, has_sink=True, deterministic=True, needs_backward=True
    )
    told = fa4.explain(q, k, v, learnable_sink=torch.zeros(4), **flags)
    assert told.spec == expected and told.extent == (2, 7, 9) and told.chosen == "torch"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fa4.explain(q, k, v, learnable_sink=torch.zeros(4), **flags).spec == replace(
            expected, dtype=torch.bfloat16
        )

    q, k, v = PACKED.values()
    plain = fa4.explain(q, k, v)
    assert plain.spec == AttentionSpec(torch.float32, 16, 16, 4, 2, 0.25, varlen=True)
    assert plain.extent == (1, 10, 12)
    lengths = dict(cu_seqlens_q=i32(0, 4, 10), cu_seqlens_k=i32(0, 5, 12))
    assert fa4.explain(q, k, v, **lengths).extent == (2, 10, 12)
    told = fa4.explain(q, k, v, **lengths, max_seqlen_q=8, max_seqlen_k=9, seqused_k=i32(5, 6), causal=True)
    assert told.spec == replace(plain.spec, window_right=0, has_seqused_k=True) and told.extent == (2, 8, 9)
    assert fa4.explain(q, k, v, **lengths, seqused_q=i32(3, 6)).spec == replace(plain.spec, has_seqused_q=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "learnable_sink"])
def test_one_tensor_that_asks_for_a_gradient_is_enough(name):
    tensors = dict(q=Q, k=K, v=V, learnable_sink=torch.zeros(4))
    tensors[name] = tensors[name].clone().requires_grad_()
    with _Operators() as operators:
        out = fa4.flash_attn_func(**tensors)
        assert out.requires_grad and operators.seen["needs_backward"]
        with torch.no_grad():
            assert not fa4.flash_attn_func(**tensors).requires_grad and not operators.seen["needs_backward"]
    out.sum().backward()
    assert tensors[name].grad.shape == tensors[name].shape and tensors[name].grad.any()
    assert all(x.grad is None for other, x in tensors.items() if other != name)


def test_an_unknown_backend_is_refused_also_where_none_would_run():
    """Under fake tensors nothing is chosen, and a traced graph would carry the name to its first run."""
    with FakeTensorMode(), pytest.raises(ValueError, match="backend is 'nope'"):
        fa4.flash_attn_func(*qkv(), backend="nope")


def test_return_lse_decides_what_comes_back():
    assert isinstance(fa4.flash_attn_func(Q, K, V), torch.Tensor)
    out, lse = fa4.flash_attn_func(Q, K, V, return_lse=True)
    assert out.shape == (2, 7, 4, 16) and lse.shape == (2, 4, 7)


def test_varlen_equals_each_sequence_alone(seed):
    i = make(CASES["varlen_different_k"], seed).inputs
    out, lse = make(CASES["varlen_different_k"], seed).call()
    for (q0, q1), (k0, k1) in zip(i.cu_seqlens_q.unfold(0, 2, 1).tolist(), i.cu_seqlens_k.unfold(0, 2, 1).tolist()):
        alone, alone_lse = fa4.flash_attn_func(i.q[None, q0:q1], i.k[None, k0:k1], i.v[None, k0:k1], return_lse=True)
        assert torch.equal(out[q0:q1], alone[0]) and torch.equal(lse[:, q0:q1], alone_lse[0])


def test_deterministic_follows_torchs_flag(monkeypatch):
    from fa4 import fallback

    asked = []
    real = fallback.Plan.forward
    monkeypatch.setattr(
        fallback.Plan, "forward", lambda plan, *results: asked.append(plan.spec.deterministic) or real(plan, *results)
    )
    trained = Q.clone().requires_grad_()  # without a gradient there is nothing to ask for
    fa4.flash_attn_func(trained, K, V)
    torch.use_deterministic_algorithms(True)
    try:
        fa4.flash_attn_func(trained, K, V)
        fa4.flash_attn_func(trained, K, V, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, False]


@pytest.mark.parametrize("at", ["q", "k", "v"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_are_not_jagged_are_refused(at):
    """Also after calls like this one, where tensors are compared before they are checked."""
    x = torch.nested.nested_tensor([torch.randn(3, 2, 16), torch.randn(5, 2, 16)])
    calls = [
        lambda **qkv: fa4.flash_attn_func(*qkv.values()),
        lambda **qkv: fa4.flash_attn_varlen_func(*qkv.values(), cu_seqlens_q=i32(0, 7), cu_seqlens_k=i32(0, 9)),
        lambda **qkv: fa4.explain(*qkv.values()),
    ]
    for call in calls:
        if call is calls[0]:
            for _ in range(3):
                call(q=Q, k=K, v=V)
        with pytest.raises(TypeError, match=f"{at} is a nested tensor of layout torch.strided, expected .*jagged"):
            call(**{"q": Q, "k": K, "v": V} | {at: x})


def test_return_lse_of_flex_attention_is_a_bool():
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(TypeError, match="return_lse is a str, expected a bool"):
        fa4.flex_attention(q, q, q, return_lse="yes")


def test_explain_names_backend_tiles_and_refusals():
    text = str(fa4.explain(Q, K, V, causal=True))
    assert "backend  torch" in text and "queries" in text
    meta = [x.to("meta") for x in (Q, K, V)]
    assert fa4.explain(*meta).chosen == "torch"


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (fa4.flash_attn_func, fa4.api.dense._DenseKeywords),
        (fa4.flash_attn_varlen_func, fa4.api.dense._PackedKeywords),
    ],
    ids=["dense", "packed"],
)
def test_type_checkers_are_told_the_keywords_that_there_are(function, keywords):
    told = {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()}
    taken = {
        name: parameter.annotation if parameter.default is not parameter.empty else f"Required[{parameter.annotation}]"
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("q", "k", "v", "return_lse")
    }
    assert told == taken


def test_import_is_light():
    """`import fa4` does not import CuTe DSL and adds well under a second to torch, on however busy a machine."""
    code = (
        "import sys, time, torch; before = set(sys.modules); t = time.process_time(); import fa4; "
        "t = time.process_time() - t; new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "assert not new & {'cutlass', 'nvidia_cutlass_dsl', 'tvm_ffi'}, new; print(t)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.0, f"import took {done.stdout} s beyond torch"


@pytest.mark.parametrize("name", ["decreasing", "past_the_end", "max_too_small", "max_k_too_small", "seqused_negative"])
def test_compiled_code_looks_at_lengths_when_it_runs(name):
    """It has none when it is compiled. Calls past the dispatcher have them looked at once."""
    error, message, change = VARLEN_ERRORS[name]
    arguments = {**PACKED, "cu_seqlens_q": i32(0, 4, 10), "cu_seqlens_k": i32(0, 5, 12), **change}
    torch._dynamo.reset()
    compiled = torch.compile(fa4.flash_attn_varlen_func, fullgraph=True, backend="eager")
    with pytest.raises(error, match=message):
        compiled(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("watched", [False, True])
def test_lengths_are_looked_at_once(watched, monkeypatch):
    looks, real = [], fa4.torch_ops.checks.lengths
    monkeypatch.setattr(fa4.torch_ops.checks, "lengths", lambda inputs: looks.append(1) or real(inputs))
    with _Operators() if watched else contextlib.nullcontext():
        fa4.flash_attn_varlen_func(*PACKED.values(), cu_seqlens_q=i32(0, 4, 10), cu_seqlens_k=i32(0, 5, 12))
    assert len(looks) == 1


def here():
    """The file and line of the caller."""
    frame = inspect.currentframe().f_back
    return frame.f_code.co_filename, frame.f_lineno


def test_axes_that_look_wrong_are_told_at_the_callers_line(monkeypatch):
    """By the names and axes of the function that was called."""
    x, swapped = torch.zeros(2, 32, 128, 64), torch.zeros(1, 512, 4, 8)
    for call, message in (
        (lambda: (fa4.flash_attn_func(x, x, x), here()), r"q has shape \(2, 32, 128, 64\).* call q.transpose\(1, 2\)"),
        (
            lambda: (fa4.flex_attention(swapped, swapped, swapped), here()),
            r"query has shape \(1, 512, 4, 8\) and key .*, which fa4.flex_attention takes for \(batch, heads, seqlen, "
            r"head_dim\): 512 heads of 4 keys.* call fa4.flash_attn_func. Said once",
        ),
    ):
        monkeypatch.setattr(fa4.torch_ops.checks, "_warned_of_axes", False)
        with pytest.warns(UserWarning, match=message) as told:
            _, place = call()
        assert [(warning.filename, warning.lineno) for warning in told] == [place]


def test_lengths_are_checked_also_beside_functions_of_a_pair():
    lengths = dict(cu_seqlens_q=i32(0, 8, 4), cu_seqlens_k=i32(0, 5, 12))
    with pytest.raises(ValueError, match=r"cu_seqlens_q is \[0, 8, 4\]"):
        fa4.flash_attn_varlen_func(*PACKED.values(), **lengths, score_mod=lambda score, b, h, q, k: score * 2)
