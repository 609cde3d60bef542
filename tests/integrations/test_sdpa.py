"""torch's own attention functions on fa4, through torch's registry: on CPU tensors and on an emulated chip."""

import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nested._internal import sdpa as nested_sdpa
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4
from fa4.emulator import emulate
from fa4.integrations import sdpa
from fa4.integrations.sdpa import cached_calls
from fa4.oracle.cases import Case, make
from fa4.torch_ops import run
from tests.integrations.oracle import assert_attention, leaves

attention = torch.nn.attention
if not hasattr(attention, "restore_flash_attention_impl"):
    pytest.skip("torch has the registry from 2.11 on", allow_module_level=True)
varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
CASES = {
    case.name: case
    for case in (
        Case("full", batch=2, seqlen_q=40, seqlen_k=60),
        Case("causal", seqlen_q=65, seqlen_k=65, causal=True, dtype=torch.float16),
        Case("scale", seqlen_q=33, seqlen_k=33, softmax_scale=0.3, head_dim=40),
    )
}


@pytest.fixture
def active():
    """fa4 serves CPU tensors."""
    sdpa._warn_once.cache_clear()
    fa4.register_sdpa(devices=("cpu",), activate=True)
    yield
    attention.restore_flash_attention_impl()


def heads_first(*tensors):
    return tuple(x.transpose(1, 2) for x in tensors)


def sdpa_of(case, q, k, v):
    return F.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=case.causal, scale=case.softmax_scale)


def fa4_of(case, q, k, v):
    return fa4.flash_attn_func(q, k, v, causal=case.causal, softmax_scale=case.softmax_scale)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_scaled_dot_product_attention_is_fa4s(case, active, seed):
    """To the bit, forward and backward, and right by the oracle."""
    problem = make(case, seed)
    q, k, v = leaves(problem)
    out = sdpa_of(case, q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout.transpose(1, 2))
    assert_attention(problem, out.transpose(1, 2), *grads)
    q, k, v = leaves(problem)
    ours = fa4_of(case, q, k, v)
    assert torch.equal(out, ours.transpose(1, 2))
    for a, b in zip(grads, torch.autograd.grad(ours, (q, k, v), problem.dout)):
        assert torch.equal(a, b)


def test_grouped_queries(active, seed):
    problem = make(Case("gqa", seqlen_q=40, seqlen_k=40, heads_q=4, heads_kv=2, causal=True), seed)
    q, k, v = leaves(problem)
    out = F.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout.transpose(1, 2))
    assert_attention(problem, out.transpose(1, 2), *grads)


def test_it_runs_the_kernels_of_an_emulated_chip(active, seed):
    problem = make(Case("causal", seqlen_q=64, seqlen_k=64, heads_q=1, heads_kv=1, causal=True), seed)
    with emulate("sm_100a", sms=1) as gpu:
        q, k, v = leaves(problem)
        out = sdpa_of(problem.case, q, k, v)
        forward = len(gpu.launches)
        grads = torch.autograd.grad(out, (q, k, v), problem.dout.transpose(1, 2))
        assert 0 < forward < len(gpu.launches)
    assert_attention(problem, out.transpose(1, 2), *grads)


def test_varlen_attn(active, seed):
    """torch has no kernel of it for CPUs; it has no other arguments for causal than a window of (-1, 0)."""
    problem = make(Case("varlen", lengths=((20, 20), (7, 7), (33, 33)), heads_q=4, causal=True), seed)
    i = problem.inputs
    q, k, v = leaves(problem)
    lengths = i.cu_seqlens_q, i.cu_seqlens_k, i.max_seqlen_q, i.max_seqlen_k
    out = varlen_attn(q, k, v, *lengths, window_size=(-1, 0), enable_gqa=True)
    assert_attention(problem, out, *torch.autograd.grad(out, (q, k, v), problem.dout))
    ours = torch.empty_like(out)
    torch.nn.attention.varlen.varlen_attn_out(
        ours, q.detach(), k.detach(), v.detach(), *lengths, window_size=(-1, 0), enable_gqa=True
    )
    assert torch.equal(ours, out)


def test_jagged_nested_tensors(active, seed, monkeypatch):
    """torch asks CUDA alone whether flash attention suits nested tensors: its answer is put into its mouth here."""
    monkeypatch.setattr(nested_sdpa, "_select_sdp_backend", lambda *_: SDPBackend.FLASH_ATTENTION)
    problem = make(Case("nested", lengths=((20, 20), (9, 9)), causal=True), seed)
    offsets = problem.inputs.cu_seqlens_q.long()
    leaf = leaves(problem)
    q, k, v = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in leaf)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).values()
    assert_attention(problem, out, *torch.autograd.grad(out, leaf, problem.dout))


def test_the_operators_of_cuda(active, seed):
    """Those that torch calls for CUDA tensors, whose arguments and results are others than a CPU's."""
    case = CASES["causal"]
    problem = make(case, seed)
    q, k, v = leaves(problem)
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, _, _, seqlen_q, seqlen_k, seed_, offset, _ = forward(*heads_first(q, k, v), is_causal=True)
    assert (seqlen_q, seqlen_k) == (65, 65) and lse.shape == (1, 2, 65) and seed_.dtype == offset.dtype == torch.uint64
    grads = torch.autograd.grad(out, (q, k, v), problem.dout.transpose(1, 2))
    assert_attention(problem, out.transpose(1, 2), *grads)


@pytest.mark.parametrize("contiguous", ["heads_first", "rows_first"])
def test_results_lie_in_memory_as_torch_compile_expects(contiguous, active, seed):
    """Of every operator: torch's own meta functions tell which strides compiled code counts on."""
    x = torch.randn(2, 3, 20, 16, generator=torch.Generator().manual_seed(seed))
    x = x if contiguous == "heads_first" else x.transpose(1, 2).contiguous().transpose(1, 2)
    aten = torch.ops.aten
    for forward, backward in (
        (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward),
        (aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward),
    ):
        results = forward(x, x, x)
        strides = [y.stride() for y in results if isinstance(y, torch.Tensor)]
        meta = forward(*[x.to("meta")] * 3)
        assert strides == [y.stride() for y in meta if isinstance(y, torch.Tensor)]
        out, lse, *rest = results
        none = torch.empty(0, dtype=torch.int32)
        others = (0.0, False) if not rest else (none, none, 20, 20, 0.0, False, *rest[4:6])
        to_meta = [y.to("meta") if isinstance(y, torch.Tensor) else y for y in (x, x, x, x, out, lse, *others)]
        expected = [y.stride() for y in backward(*to_meta)]
        assert [y.stride() for y in backward(x, x, x, x, out, lse, *others)] == expected


def test_torchs_deterministic_flag_is_asked_at_each_backward(active, seed, monkeypatch):
    """It may change between calls that are alike otherwise."""
    asked, backward = [], run.BackwardExecutor.__call__
    monkeypatch.setattr(
        run.BackwardExecutor, "__call__", lambda b, *a: asked.append(b.spec.deterministic) or backward(b, *a)
    )
    q, k, v = leaves(make(CASES["full"], seed))
    flags = [False, True, False, False, False, True, True, True, False]
    for deterministic in flags:
        torch.use_deterministic_algorithms(deterministic)
        try:
            sdpa_of(CASES["full"], q, k, v).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == flags


def test_a_compiled_model_runs_on_it(active, seed):
    problem = make(CASES["causal"], seed)
    function = torch.compile(lambda *tensors: sdpa_of(problem.case, *tensors), fullgraph=True, backend="aot_eager")
    q, k, v = leaves(problem)
    out = function(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout.transpose(1, 2))
    assert_attention(problem, out.transpose(1, 2), *grads)
    assert torch.equal(out, fa4_of(problem.case, q, k, v).transpose(1, 2))


REFUSALS = {
    "attn_mask": ({"attn_mask": torch.ones(8, 12, dtype=torch.bool).tril()}, "attn_mask is given"),
    "causal_of_other_lengths": ({"is_causal": True}, "which torch aligns at the first key"),
}


@pytest.mark.parametrize("arguments, reason", REFUSALS.values(), ids=REFUSALS)
def test_what_fa4_lacks_goes_to_torch_and_says_so_once(arguments, reason, active, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 2, n, 16, generator=generator).requires_grad_() for n in (8, 12))

    def run():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, k, **arguments)
        return out, *torch.autograd.grad(out.sum(), (q, k))

    with pytest.warns(UserWarning, match=reason):
        served = run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    attention.restore_flash_attention_impl()
    assert all(torch.equal(a, b) for a, b in zip(served, run()))


def test_where_torch_has_no_kernel_either_the_reason_is_an_error(active):
    x = torch.zeros(4, 1, 8)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="torch has no kernel for it: alibi_slopes is given"):
        torch.ops.aten._flash_attention_forward(
            x, x, x, lengths, lengths, 4, 4, 0.0, False, False, alibi_slopes=torch.ones(1)
        )
    with pytest.raises(NotImplementedError, match=r"q has dtype torch\.int32"):
        varlen_attn(x.int(), x.int(), x.int(), lengths, lengths, 4, 4)


def test_restoring_gives_torch_its_kernels_back(seed):
    q, k, v = leaves(make(CASES["full"], seed))
    before, order = sdpa_of(CASES["full"], q, k, v), torch._C._get_sdp_priority_order()
    fa4.register_sdpa(devices=("cpu",))
    assert "fa4" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None, "registering activates nothing"
    attention.activate_flash_attention_impl("fa4")
    assert attention.current_flash_attention_impl() == "fa4"
    assert torch._C._get_sdp_priority_order()[0] == SDPBackend.FLASH_ATTENTION.value
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    assert torch._C._get_sdp_priority_order() == order
    assert torch.equal(sdpa_of(CASES["full"], q, k, v), before)
    lengths = torch.tensor([0, 40], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(q[0], q[0], q[0], lengths, lengths, 40, 40)


def test_an_interpreter_may_end_while_it_is_active():
    code = "import fa4; fa4.register_sdpa(activate=True)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_torch_without_the_registry_is_told(monkeypatch):
    monkeypatch.delattr(attention, "restore_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"has no torch.nn.attention.restore_flash_attention_impl \(2.11 has\)"):
        fa4.register_sdpa()


def test_unknown_devices_are_refused():
    with pytest.raises(ValueError, match=r"devices is \('mps',\), expected some of"):
        fa4.register_sdpa(devices=("mps",))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_call_like_the_one_before_is_told_by_one_look(grad, active, monkeypatch):
    """From the third call on, without a key, though torch makes a new float for the scale each time."""
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=grad) for _ in range(3))
    looks, find = [], cached_calls.routes.find

    def look(signature):
        if signature is not None and signature.kind == "torch":
            looks.append(signature)
        return find(signature)

    monkeypatch.setattr(cached_calls.routes, "find", look)
    for _ in range(6):
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=0.37)[0]
        if grad:
            out.backward(torch.ones_like(out))
    assert len(looks) <= (4 if grad else 2)


CHANGES = {
    "nothing": {},
    "strides": {"turned": True},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "length": {"rows": 24},
    "one tensor thrice": {"same": True},
}


@pytest.mark.parametrize("operator", ["cpu", "cuda"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_unlike_the_one_before_gets_what_it_asks(change, operator, active, seed):
    """After three alike, so that the one before is remembered; forward and backward, in both layouts."""
    generator = torch.Generator().manual_seed(seed)

    def call(is_causal=False, scale=None, rows=20, turned=False, same=False):
        shape = (2, rows, 3, 16) if turned else (2, 3, rows, 16)
        made = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
        q, k, v = (x.transpose(1, 2) if turned else x for x in ([made[0]] * 3 if same else made))
        if operator == "cpu":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        else:
            out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        leaves = made[:1] if same else made
        torch.testing.assert_close(out, expected)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected))):
            torch.testing.assert_close(a, b)

    for _ in range(3):
        call()
    call(**change)
    call()
    with torch.no_grad():
        q = torch.randn(2, 3, 20, 16)
        assert not F.scaled_dot_product_attention(q, q.clone(), q.clone()).requires_grad


def test_packed_calls_whose_bounds_are_one_tensor_or_two(active, seed):
    """Torch compares tensors as many as there were; a call with two bounds came after some with one."""
    problem = make(Case("varlen", lengths=((20, 20), (7, 7)), heads_q=2), seed)
    i = problem.inputs
    one = i.cu_seqlens_q
    two = one, one.clone()
    for bounds in ((one, one), (one, one), (one, one), two, two, two, (one, one)):
        q, k, v = leaves(problem)
        out = varlen_attn(q, k, v, *bounds, i.max_seqlen_q, i.max_seqlen_k)
        assert_attention(problem, out, *torch.autograd.grad(out, (q, k, v), problem.dout))
