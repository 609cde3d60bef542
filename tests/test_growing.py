"""Decoding without a cache: calls whose k and v have more rows each time run a kept executor, and nothing else does."""

import pytest
import torch

import fa4
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import dispatch, jit
from fa4.runtime.device import chip_by_number, emulating
from fa4.runtime.spec import AttentionSpec, Flags, ProblemSize, rounded_keys
from fa4.torch_ops import calls, ops, run
from fa4.torch_ops.growing import GrowingCalls
from tests.forget import forget_calls

CHIP = chip_by_number(90)


@pytest.fixture
def launched(monkeypatch):
    """Arguments of kernels, which do nothing, on a chip that is not there."""
    forget_calls()
    arguments = []
    monkeypatch.setattr(jit, "compiled", lambda key, *_: lambda *given: arguments.append((key, given)))
    with emulating(CHIP), torch.no_grad():
        yield arguments
    forget_calls()


def buffer(layout, keys, heads=4, batch=2):
    """k or v as decoders have them: a part of a buffer, concatenated, or transposed from heads first."""
    if layout == "buffer":
        return torch.zeros(batch, 900, heads, 64, dtype=torch.bfloat16)[:, :keys]
    if layout == "concatenated":
        return torch.zeros(batch, keys, heads, 64, dtype=torch.bfloat16)
    return torch.zeros(batch, heads, keys, 64, dtype=torch.bfloat16).transpose(1, 2)


@pytest.mark.parametrize("layout", ["buffer", "concatenated", "heads first"])
def test_a_route_serves_all_rounded_alike(launched, monkeypatch, layout):
    made = []
    route = ops.Route
    monkeypatch.setattr(ops, "Route", lambda *given: made.append(given) or route(*given))
    q = torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16)
    lengths = range(300, 460)
    for keys in lengths:
        k, v = buffer(layout, keys), buffer(layout, keys)
        out = fa4.flash_attn_func(q, k, v, causal=True)
        of_call = [given[0] for key, given in launched if key[0] == "sm90.forward"][-1]
        assert of_call[1] is k and of_call[2] is v and out.shape == q.shape
    # (The first two calls find out that the keys grow.)
    assert len(made) <= len({*map(rounded_keys, lengths)}) + 1


def test_what_differs_in_something_else_is_another_call(launched):
    def call(keys=301, rows=1, layout="buffer", **options):
        q = torch.zeros(2, rows, 8, 64, dtype=torch.bfloat16)
        k, v = (buffer(layout, keys) for _ in range(2))
        tensors = (q, k, v, None, None, None, None, None)
        key = (None, options.get("causal", True), (None, None), 0.0, None, "auto")
        return calls._growing.find(tensors, key)

    q = torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16)
    for keys in (300, 301, 302):
        fa4.flash_attn_func(q, buffer("buffer", keys), buffer("buffer", keys), causal=True)
    assert call() is not None and call(keys=320) is not None
    assert call(keys=400) is None  # rounded to another number, which may have another kernel
    assert call(causal=False) is None and call(rows=2) is None and call(layout="heads first") is None
    k, v = buffer("buffer", 301), buffer("buffer", 302)
    assert calls._growing.find((q, k, v, *[None] * 5), (None, True, (None, None), 0.0, None, "auto")) is None
    with torch.enable_grad():
        assert call() is None


def test_strides_that_a_kernel_cannot_load_are_another_call(launched):
    growing, q = GrowingCalls(), torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16)
    options = (None, True)

    def tensors(keys, batch_stride):
        k = torch.zeros(1 << 20, dtype=torch.bfloat16).as_strided((2, keys, 4, 64), (batch_stride, 256, 64, 1))
        return (q, k, k, *[None] * 5)

    for keys in (300, 301):
        growing.keep(tensors(keys, 1 << 19), options, "forward")
    assert growing.find(tensors(302, 1 << 18), options) == "forward"
    assert growing.find(tensors(302, (1 << 18) + 4), options) is None and growing.find(tensors(302, 0), options) is None


def test_plans_of_decoders_have_rounded_keys():
    spec = AttentionSpec(torch.bfloat16, 64, 64, 8, 4, 0.125, window_right=0)
    assert ProblemSize(2, 1, 1025).planned(spec) == ProblemSize(2, 1, 1152)
    assert ProblemSize(2, 1025, 1025).planned(spec) == ProblemSize(2, 1025, 1025)
    plans = {id(dispatch.plan(spec, ProblemSize(2, 1, keys), CHIP)) for keys in range(1025, 1153)}
    assert len(plans) == 1


@pytest.mark.parametrize("chip", ["sm_80", "sm_90a"])
def test_an_executor_computes_calls_with_more_keys(seed, chip):
    """By the emulator: the executor of the first call, on the tensors of the others."""
    emulator = pytest.importorskip("fa4.emulator")
    first = None
    with emulator.emulate(chip, sms=2, seed=seed):
        for keys in (65, 128, 90, 66):
            case = Case("growing", seqlen_q=1, seqlen_k=keys, heads_q=2, heads_kv=1, head_dim=64, causal=True)
            problem = cases.make(case, seed + keys)
            if first is None:
                first = run.ForwardExecutor(
                    problem.inputs, *ops.spec_and_plan(problem.inputs, Flags(problem.spec.softmax_scale, None, 0), None)
                )
            assert first.takes_any_keys and rounded_keys(keys) == 128
            out, lse = first.call_with_tensors(problem.inputs.tensors)
            cases.assert_right(cases.judge_forward(problem, out, lse), f"{keys} keys, seed {seed}")
