"""torch's attention functions and models of transformers on the kernels of the GPU at hand."""

import inspect
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4
from fa4.integrations import sdpa
from fa4.integrations.sdpa import operators
from fa4.oracle.cases import Case, make
from tests.integrations.oracle import assert_attention, leaves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = {
    case.name: case
    for case in (
        Case("full", batch=2, seqlen_q=200, seqlen_k=300),
        Case("causal", batch=2, seqlen_q=300, seqlen_k=300, causal=True, head_dim=128, dtype=torch.float16),
        Case("gqa", seqlen_q=257, seqlen_k=257, heads_q=8, heads_kv=2, causal=True),
        Case("head_dim_72", seqlen_q=100, seqlen_k=100, head_dim=72),
        Case("head_dim_256", seqlen_q=100, seqlen_k=100, head_dim=256),
    )
}


@pytest.fixture
def served(monkeypatch):
    """fa4 serves CUDA tensors; the list grows with each forward that it serves."""
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("needs torch.nn.attention.restore_flash_attention_impl, which torch has from 2.11 on")
    calls, cached_call = [], operators.cached_call
    monkeypatch.setattr(operators, "cached_call", lambda *a: calls.append(a) or cached_call(*a))
    sdpa._warn_once.cache_clear()
    fa4.register_sdpa(activate=True)
    yield calls
    torch.nn.attention.restore_flash_attention_impl()


def attend(case, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = case.heads_q != case.heads_kv
    return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=groups).transpose(1, 2)


def test_the_first_call_of_a_process_is_served():
    """torch settles its own order of preference at its first choice."""
    code = """
import torch, fa4
from fa4.integrations.sdpa import operators
calls, cached_call = [], operators.cached_call
operators.cached_call = lambda *a: calls.append(a) or cached_call(*a)
fa4.register_sdpa(activate=True)
x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
torch.nn.functional.scaled_dot_product_attention(x, x, x)
assert len(calls) == 1
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_scaled_dot_product_attention(case, served, seed):
    problem = make(case, seed, "cuda")
    q, k, v = leaves(problem)
    out = attend(case, q, k, v)
    assert len(served) == 1
    assert_attention(problem, out, *torch.autograd.grad(out, (q, k, v), problem.dout))


def test_a_compiled_model(served, seed):
    problem = make(CASES["causal"], seed, "cuda")
    q, k, v = leaves(problem)
    out = torch.compile(lambda *x: attend(problem.case, *x), fullgraph=True)(q, k, v)
    assert len(served) == 1
    assert_attention(problem, out, *torch.autograd.grad(out, (q, k, v), problem.dout))


def test_varlen_attn(served, seed):
    from torch.nn.attention import varlen

    problem = make(Case("varlen", lengths=((200, 200), (7, 7), (330, 330)), causal=True), seed, "cuda")
    i = problem.inputs
    q, k, v = leaves(problem)
    causal = {"window_size": (-1, 0)} if "window_size" in inspect.signature(varlen.varlen_attn).parameters else {}
    causal = causal or {"is_causal": True}
    lengths = i.cu_seqlens_q, i.cu_seqlens_k, i.max_seqlen_q, i.max_seqlen_k
    out = varlen.varlen_attn(q, k, v, *lengths, **causal)
    assert len(served) == 1
    assert_attention(problem, out, *torch.autograd.grad(out, (q, k, v), problem.dout))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors(layout, served, seed):
    problem = make(Case("nested", lengths=((200, 200), (90, 90)), causal=True), seed, "cuda")
    tensors = leaves(problem)
    if layout is torch.jagged:
        offsets = problem.inputs.cu_seqlens_q.long()
        nested = [torch.nested.nested_tensor_from_jagged(x, offsets) for x in tensors]
    else:
        nested = [torch.nested.as_nested_tensor([x[:200], x[200:]]) for x in tensors]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in nested), is_causal=True).transpose(1, 2)
    assert len(served) == 1
    out = torch.cat(list(out.unbind()))
    assert_attention(problem, out, *torch.autograd.grad(out, tensors, problem.dout))


def test_dropout_and_its_gradients(served):
    x = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    results = []
    for call in (F.scaled_dot_product_attention, None):
        torch.manual_seed(5)
        if call is None:
            out = fa4.flash_attn_func(x, x, x, dropout_p=0.5)
        else:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = call(*[x.transpose(1, 2)] * 3, dropout_p=0.5).transpose(1, 2)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])  # dQ is added up in any order


def test_what_fa4_lacks_goes_to_torch_and_the_reason_is_said_once(served):
    x = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    lengths = None, None, 64, 64, 0.5, False, True  # return_debug_mask
    with pytest.warns(UserWarning, match="return_debug_mask is asked for"):
        torch.ops.aten._flash_attention_forward(x, x, x, *lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ops.aten._flash_attention_forward(x, x, x, *lengths)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_models_of_transformers(name, seed):
    """A padded batch in bfloat16: logits and gradients err at most twice as much as with eager attention."""
    pytest.importorskip("transformers", reason="hooks into it")
    from tests.integrations import test_transformers as models

    models.register()
    there = models.padded().cuda()
    positions = (there.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": there.long(), "position_ids": positions}
    models.assert_as_eager(name, seed, models.tokens_of(seed).cuda(), there, torch.bfloat16, **inputs)


@pytest.mark.parametrize("can_look", [True, False])
def test_documents_of_packed_position_ids(can_look, monkeypatch, seed):
    """Each as if alone; also in a captured graph, which cannot look at positions and has others at each replay."""
    from fa4.integrations import transformers as ours

    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, heads, 300, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    positions = torch.zeros(1, 300, dtype=torch.long, device="cuda")
    layer = torch.nn.Module()
    options = dict(is_causal=True, sliding_window=70, s_aux=torch.randn(8, device="cuda"), position_ids=positions)

    def packed(lengths):
        positions.copy_(torch.cat([torch.arange(n) for n in lengths])[None])

    def run():
        return ours.attention(layer, q, k, v, None, **options)[0]

    packed((300,))
    replay = run
    if not can_look:
        with monkeypatch.context() as patch:
            patch.setattr(ours, "_can_read", lambda x: False)
            run()  # compiles what the graph launches
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()

        def replay():
            graph.replay()
            return out

    for lengths in ((300,), (100, 1, 199), (1,) * 20 + (280,)):
        packed(lengths)
        got, first = replay().float(), 0
        for n in lengths:
            part = [x[:, :, first : first + n] for x in (q, k, v)]
            alone = ours.attention(layer, *part, None, **options | {"position_ids": None})[0].float()
            assert (got[:, first : first + n] - alone).abs().max() < 0.02, (lengths, first)
            first += n
