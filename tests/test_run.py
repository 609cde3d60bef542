"""The road to every backend: tensors as callers have them, and rows that no sequence uses.

Fresh memory is full of NaN in tests, as it may be on a GPU.
"""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch

import fa4
from fa4 import fallback
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import memory
from fa4.runtime.device import chip_of
from fa4.runtime.plan import Layout, Plan
from fa4.runtime.spec import AttentionInputs, ProblemSize, Saved
from fa4.torch_ops import run
from fa4.torch_ops.run import allocate, prepare

BACKENDS = ("torch", "sm80", "sm100")


def chip(backend: str, seed: int):
    """CPU tensors live on a chip of the backend inside."""
    if backend == "torch":
        return contextlib.nullcontext()
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    pytest.importorskip("warpcheck.machine._core", reason="the emulator has a part in C++")
    from fa4.emulator import emulate

    return emulate({"sm80": "sm_80", "sm100": "sm_100a"}[backend], seed=seed, sms=8)


def padded(problem: cases.Problem, rows: int) -> dict[str, torch.Tensor]:
    """q, k, v with rows behind the last sequence, as in a batch padded to a fixed size."""
    inputs = problem.inputs
    return {name: torch.cat([x, torch.full_like(x[:rows], 7.0)]) for name, x in zip("qkv", inputs[:3])}


PADDED = {
    "sequences": Case("sequences", lengths=((70, 90), (0, 5), (33, 20)), causal=True),
    "seqused_sink": Case(
        "seqused_sink", lengths=((70, 90), (0, 5), (33, 20)), seqused=((50, 90), (0, 5), (33, 0)), sink=True
    ),
    # Keys are cut into parts.
    "few_queries": Case(
        "few_queries", lengths=((2, 1100), (1, 700), (0, 9)), heads_q=2, heads_kv=1, head_dim=32, sink=True
    ),
}


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    # The other chips' own tests show parts of their keys.
    ("backend", "name"),
    [(backend, name) for backend in BACKENDS for name in PADDED if (backend, name) != ("sm100", "few_queries")],
)
def test_rows_past_the_last_sequence_are_zero(backend, name, seed):
    problem = cases.make(PADDED[name], seed)
    more = padded(problem, 3)
    used = problem.inputs.q.shape[0]
    with chip(backend, seed) as gpu:
        out, lse = problem.call(**more, backend=backend)
    if gpu is not None and name == "few_queries":
        assert len(gpu.launches) == 3  # for idle rows of parts, for parts, and what joins them
    assert (out[used:] == 0).all() and (lse[:, used:] == -torch.inf).all()
    cases.assert_right(cases.judge_forward(problem, out[:used], lse[:, :used]), f"seed {seed}")


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    # The portable backward sees lengths in use in its own tests.
    ("backend", "name"),
    [(backend, "sequences") for backend in BACKENDS] + [("torch", "seqused_sink"), ("sm100", "seqused_sink")],
)
def test_padding_leaves_the_gradient_of_a_projection_finite(backend, name, seed):
    """q, k, v of the padding come out of a Linear; one NaN in their gradients would be in every weight's."""
    problem = cases.make(PADDED[name], seed)
    more = {name: x.requires_grad_() for name, x in padded(problem, 3).items()}
    weight = torch.eye(64, dtype=torch.bfloat16, requires_grad=True)
    with chip(backend, seed):
        q, k, v = (x @ weight for x in more.values())
        out, lse = problem.call(q=q, k=k, v=v, backend=backend)
        dlse = torch.where(lse == -torch.inf, 0.0, 1.0)
        torch.autograd.backward((out, lse), (torch.ones_like(out), dlse))
    assert weight.grad.isfinite().all()
    for x, inner in zip(more.values(), problem.inputs[:3]):
        rows = inner.shape[0]
        assert (x.grad[rows:] == 0).all() and x.grad[:rows].isfinite().all()


@pytest.mark.parametrize("kind", ["packed", "packed_seqused", "seqused"])
def test_the_kernel_for_idle_rows_writes_them_alone(kind, seed):
    """In matrices of two widths, in lse, and in the lse of two parts; some sequences are empty, full or unused."""
    with chip("sm80", seed):
        from fa4.core import padding
        from fa4.runtime.device import chip_of

        here = chip_of(torch.device("cpu"))
        varlen, heads, rows = kind != "seqused", 3, 11
        seqused = {"packed": None, "packed_seqused": [2, 0, 5], "seqused": [2, 0, 11]}[kind]
        used = torch.zeros(11 if varlen else (3, 11), dtype=torch.bool)
        for i, (first, last) in enumerate(((0, 4), (4, 4), (4, 9)) if varlen else ((0, 11),) * 3):
            (used if varlen else used[i])[first : last if seqused is None else first + seqused[i]] = True
        lengths = torch.tensor([0, 4, 4, 9], dtype=torch.int32) if varlen else None
        seqused = None if seqused is None else torch.tensor(seqused, dtype=torch.int32)
        batch = () if varlen else (3,)
        for matrices, parts in ((2, 1), (0, 2)):
            cfg = padding.PaddingRowsConfig(torch.bfloat16, matrices, parts - 1, torch.inf, varlen, seqused is not None)
            of_dims = [torch.full((*batch, rows, heads, d), 7.0, dtype=torch.bfloat16) for d in (8, 24)[:matrices]]
            lse = torch.full((*((2,) if parts == 2 else ()), *batch, heads, rows), 7.0)
            padding.SET_PADDING_ROWS.launcher(cfg, here)((tuple(of_dims) or None, lse, lengths, seqused), 2)
            for x in of_dims:
                assert torch.equal(x, torch.where(used[..., None, None], 7.0, 0.0).to(x.dtype).expand_as(x))
            assert torch.equal(lse, torch.where(used.unsqueeze(-2), 7.0, torch.inf).expand_as(lse))


@pytest.mark.rotates(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_gradient_of_lse_may_be_expanded_or_strided(backend, seed):
    problem = cases.make(Case("dlse", batch=2, seqlen_q=70, seqlen_k=90, causal=True), seed)
    ones = torch.ones_like(problem.dlse)
    leaves = [x.requires_grad_() for x in problem.tensors().values()]
    with chip(backend, seed):
        _, lse = problem.call(backend=backend)
        layouts = (ones, ones[:1, :1, :1].expand_as(ones), ones.transpose(1, 2).contiguous().transpose(1, 2))
        plain, *others = (torch.autograd.grad(lse, leaves[:2], x, retain_graph=True) for x in layouts)
    for other in others:
        assert all(torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-3) for a, b in zip(plain, other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_may_be_strided_and_of_any_dtype(backend, dtype, seed):
    problem = cases.make(PADDED["seqused_sink"], seed)
    wide = torch.zeros(4, dtype=dtype)
    wide[::2] = problem.inputs.sink
    with chip(backend, seed):
        out, lse = problem.call(learnable_sink=wide[::2], backend=backend)
    cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")


EMPTY = {
    "no_keys": Case("no_keys", batch=2, seqlen_q=9, seqlen_k=0, sink=True),
    "no_keys_packed": Case(
        "no_keys_packed", lengths=((9, 0), (0, 0), (5, 0)), seqused=((8, 0), (0, 0), (5, 0)), sink=True
    ),
    "no_keys_no_sink": Case("no_keys_no_sink", lengths=((9, 0), (5, 0))),
    "no_queries": Case("no_queries", lengths=((0, 9), (0, 5)), sink=True),
    "nothing": Case("nothing", batch=0, sink=True),
}  # fmt: skip


@pytest.mark.parametrize("case", EMPTY.values(), ids=str)
def test_an_empty_problem_is_no_launch_and_reads_no_length(case, monkeypatch, seed):
    problem = cases.make(case, seed)

    def launch(*_):
        raise AssertionError("launched")

    monkeypatch.setattr(fallback.Plan, "forward", launch)
    monkeypatch.setattr(fallback.Plan, "backward", launch)
    out, lse, grads = problem.call_with_gradients()
    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
    cases.assert_right(judgements, f"seed {seed}")


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_that_are_not_positive(backend, scale, seed):
    problem = cases.make(Case("scale", seqlen_q=70, seqlen_k=90, softmax_scale=scale, causal=True), seed)
    with chip(backend, seed):
        out, lse, grads = problem.call_with_gradients(backend=backend)
    judgements = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, grads)
    cases.assert_right(judgements, f"seed {seed}")
    if scale == 0:
        assert not grads.dq.any() and not grads.dk.any()


def test_explain_sees_the_lengths():
    """Pairs of CTAs are for many queries; of a few, keys are cut into parts."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    from fa4.runtime.device import chip_by_number, emulating

    def explained(rows, **flags):
        q, k = torch.empty(1, rows, 8, 128, dtype=torch.bfloat16), torch.empty(1, 4096, 8, 128, dtype=torch.bfloat16)
        return fa4.explain(q.requires_grad_(flags.pop("trains", False)), k, k, **flags)

    with emulating(chip_by_number(100, emulated=True)):
        many, trained, some, few = explained(4096), explained(200, trains=True), explained(200), explained(1)
    assert many.chosen == trained.chosen == some.chosen == few.chosen == "sm100"
    assert "pairs" in many.tiles and "parts" not in many.tiles
    assert "pairs" not in trained.tiles and "parts" not in trained.tiles
    assert "one CTA: 256 x 128" in some.tiles and "parts" in some.tiles
    assert "few queries: 128 x 64" in few.tiles and "parts" in few.tiles


@pytest.mark.parametrize(
    "changes, idle_q, idle_k",
    [
        (dict(), False, False),
        (dict(varlen=True), True, True),  # rows past the last sequence
        (dict(has_seqused_q=True), True, False),
        (dict(has_seqused_k=True), False, True),
        (dict(has_sink=True), False, False),
    ],
    ids=str,
)
def test_rows_that_kernels_may_leave_alone_are_set(changes, idle_q, idle_k):
    """Fresh memory is NaN here. What only keys leave unused costs out and dq no filling, and the other way round."""
    problem = cases.make(Case("set", batch=2, seqlen_q=5, seqlen_k=7, head_dim=8, head_dim_v=16), 0)
    spec = replace(problem.spec, **changes)
    out, lse = run.forward(problem.inputs, spec, Idler(problem, spec))
    assert out.shape == (2, 5, 2, 16) and out.dtype == torch.bfloat16
    assert lse.shape == (2, 2, 5) and lse.dtype == torch.float32
    assert (out == 0).all() and (lse == -torch.inf).all() if idle_q else out.isnan().all() and lse.isnan().all()
    plan = Idler(problem, spec, splits=3)
    with pytest.raises(NotImplementedError):
        run.forward(problem.inputs, spec, plan)
    parts, part_lse = plan.results
    assert parts.shape == (3, 2, 5, 2, 16) and part_lse.shape == (3, 2, 2, 5)
    assert parts.dtype == part_lse.dtype == torch.float32 and parts.isnan().all()
    assert (part_lse == allocate.UNWRITTEN).all() if idle_q else part_lse.isnan().all()
    dq, dk, dv, dsink = allocate.gradient_maker(problem.inputs, spec, Idler(problem, spec))(problem.inputs)
    assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in problem.inputs[:3]] and dsink is None
    for x, padding_rows in ((dq, idle_q), (dk, idle_k), (dv, idle_k)):
        assert (x == 0).all() if padding_rows else x.isnan().all()


class Idler(Plan):
    """Writes nothing, and notes what it was given to write; with splits, stops there."""

    layout, compiled = Layout.ANY, False

    def __init__(self, problem: cases.Problem, spec, splits: int = 1) -> None:
        super().__init__(spec, problem.inputs.extent, None)
        self.splits = splits

    def forward(self, inputs, *results) -> None:
        self.results = results
        if self.splits > 1:
            raise NotImplementedError


@pytest.mark.parametrize(
    "case, used",
    [
        (Case("dense", batch=2, seqlen_q=3), [[[True] * 3]] * 2),
        (
            Case("dense_seqused", batch=2, seqlen_q=3, seqused=((2, 9), (0, 9))),
            [[[True, True, False]], [[False] * 3]],
        ),
        (Case("packed", lengths=((2, 9), (0, 9), (3, 9)), padding=2), [True] * 5 + [False] * 2),
        (
            Case("packed_seqused", lengths=((2, 9), (0, 9), (3, 9)), seqused=((1, 9), (0, 9), (2, 8)), padding=2),
            [True, False, True, True, False, False, False],
        ),
    ],
    ids=str,
)
def test_which_rows_are_in_use(case, used):
    found = allocate.used_rows(cases.make(case, 0).inputs)
    assert found.tolist() == used
    elsewhere = cases.make(case, 0, "meta").inputs
    assert allocate.used_rows(elsewhere).device == elsewhere.q.device


STRIDES = {
    "contiguous": ((2, 3, 4, 8), (96, 32, 8, 1), True, True),
    "heads_first": ((2, 3, 4, 8), (96, 8, 24, 1), True, True),
    "expanded_heads": ((2, 3, 4, 8), (96, 32, 0, 1), True, False),
    "one_batch_at_an_odd_distance": ((1, 3, 4, 8), (7, 32, 8, 1), True, True),
    "odd_rows": ((2, 3, 4, 8), (108, 36, 8, 1), False, False),
    "odd_batches": ((2, 3, 4, 8), (100, 32, 8, 1), False, False),
    "odd_heads": ((2, 3, 4, 8), (256, 64, 12, 1), False, False),
}


@pytest.mark.parametrize("shape, strides, fits_rows, fits_tma", STRIDES.values(), ids=STRIDES)
def test_only_what_a_layout_cannot_take_is_copied(shape, strides, fits_rows, fits_tma, seed):
    """Eight elements of two bytes are the 16 bytes that steps have to be multiples of; four of float32."""
    problem = cases.make(Case("layout", batch=shape[0], seqlen_q=3, seqlen_k=3, head_dim=8), seed)
    memory = torch.randn(512).to(torch.bfloat16)
    for layout, fits in ((Layout.ANY, True), (Layout.ROWS, fits_rows), (Layout.TMA, fits_tma)):
        view = memory.as_strided(shape, strides)
        for name in "qkv":
            ready = prepare.inputs_for(layout, problem.inputs._replace(**{name: view}), problem.spec)
            got = getattr(ready, name)
            assert (got is view) == fits and torch.equal(got, view) and (fits or got.is_contiguous())
        saved = Saved(view, problem.dlse, view, None)
        ready = prepare.saved_for(layout, saved)
        assert (ready.out is view) == (ready.dout is view) == fits and ready.dlse is None
    odd_address = memory[1:].as_strided(shape, strides)
    assert prepare.inputs_for(Layout.ANY, problem.inputs._replace(v=odd_address), problem.spec).v is odd_address
    assert prepare.inputs_for(Layout.ROWS, problem.inputs._replace(v=odd_address), problem.spec).v is not odd_address
    wide = torch.randn(512).as_strided((2, 3, 4, 8), (108, 36, 12, 1))
    assert prepare.inputs_for(Layout.TMA, problem.inputs._replace(k=wide), problem.spec).k is wide


def test_values_of_rows_are_handed_on_contiguous():
    problem = cases.make(Case("rows", batch=2, seqlen_q=5, head_dim=8, heads_q=4, sink=True), 0)
    strided = problem.dlse.transpose(1, 2).contiguous().transpose(1, 2)
    ready = prepare.saved_for(Layout.ROWS, Saved(problem.dout, strided, problem.dout + 1, strided + 1))
    assert ready.lse.is_contiguous() and ready.dlse.is_contiguous() and not strided.is_contiguous()
    assert torch.equal(ready.lse, strided) and torch.equal(ready.dlse, strided + 1)
    assert torch.equal(ready.out, problem.dout) and torch.equal(ready.dout, problem.dout + 1)


@pytest.mark.parametrize("scale, sign", [(0.3, 1), (-0.3, -1), (0.0, 1)])
def test_queries_take_the_sign_of_the_scale(scale, sign):
    problem = cases.make(Case("sign", seqlen_q=5, head_dim=8, softmax_scale=scale), 0)
    ready = prepare.inputs_for(Layout.TMA, problem.inputs, problem.spec)
    assert torch.equal(ready.q, sign * problem.inputs.q) and (ready is problem.inputs) == (sign > 0)


@pytest.mark.parametrize(
    "extent, rows, varlen, empty",
    [
        ((2, 3, 4), (6, 8), False, False),
        ((0, 3, 4), (6, 8), False, True),
        ((2, 0, 4), (6, 8), False, True),
        ((2, 3, 0), (6, 8), False, True),
        ((2, 3, 4), (6, 8), True, False),
        ((2, 3, 4), (0, 8), True, True),  # an upper bound says nothing about the rows there are
        ((2, 3, 4), (6, 0), True, True),
    ],
)
def test_a_problem_is_empty_if_any_of_its_sizes_is(extent, rows, varlen, empty):
    problem = cases.make(Case("empty", head_dim=8), 0)
    q, k = (problem.inputs.q.new_zeros(n, 2, 8) for n in rows)
    plan = Plan(replace(problem.spec, varlen=varlen), ProblemSize(*extent), chip_of(q.device))
    assert plan.is_empty(problem.inputs._replace(q=q, k=k)) == empty


def test_memory_on_cuda_comes_by_the_short_way_if_there_is_one(monkeypatch):
    asked = []
    monkeypatch.setattr(memory.guards, "_empty_strided_cuda", lambda *arguments: asked.append(arguments))
    assert memory.empty((2, 3, 4), torch.float16, torch.device("cpu")).shape == (2, 3, 4) and not asked
    memory.empty(torch.Size((2, 3, 4)), torch.float16, torch.device("cuda", 0))
    assert asked == [((2, 3, 4), (12, 4, 1), torch.float16)] and type(asked[0][0]) is tuple
    monkeypatch.setattr(memory, "_has_fast_allocation", False)
    assert memory.empty((2, 3), torch.float32, torch.device("meta")).is_meta


def test_launches_land_on_the_current_device(monkeypatch):
    monkeypatch.setattr(prepare, "current_cuda_device", lambda: 1)
    assert [prepare.is_other_device(index) for index in (0, 1, 2)] == [True, False, True]


class _Launching(fallback.Plan):
    """Takes what kernels take, and notes the kinds of what it gets."""

    layout, compiled = Layout.TMA, True

    def __init__(self, *problem):
        super().__init__(*problem)
        self.got = []

    def forward(self, inputs, out, lse):
        assert all(x.data_ptr() % prepare.ALIGNMENT == 0 for x in inputs[:3]) and 0 not in self.extent
        self.got.append(type(inputs))
        super().forward(AttentionInputs(*inputs[:8], *self.extent[1:]), out, lse)


def test_tensors_alone_are_launched_as_they_are_or_go_the_longer_way(seed):
    problem = cases.make(Case("alone", batch=2, seqlen_q=20, seqlen_k=33, causal=True), seed)
    inputs, plan = problem.inputs, _Launching(problem.spec, problem.inputs.extent, chip_of(problem.inputs.q.device))
    forward = run.ForwardExecutor(inputs, problem.spec, plan)
    expected = forward(inputs)
    given = [inputs, *(inputs._replace(**{name: _at_odd_address(getattr(inputs, name))}) for name in "qkv")]
    for of_call in given:
        got = forward.call_with_tensors(tuple(of_call[:8]))
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert plan.got == [AttentionInputs, tuple, *[AttentionInputs] * 3]


def _at_odd_address(x):
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    "case",
    [
        Case("negative", seqlen_q=20, seqlen_k=33, softmax_scale=-0.3),
        Case("no_keys", seqlen_q=5, seqlen_k=0),
        Case("seqused", batch=2, seqlen_q=20, seqlen_k=33, seqused=((None, 7), (None, 0))),
        Case("packed", lengths=((7, 9), (0, 4)), padding=3),
    ],
    ids=str,
)
def test_tensors_alone_go_the_longer_way_where_there_is_more_to_do(case, seed, monkeypatch):
    problem = cases.make(case, seed)
    spec, inputs = problem.spec.with_positive_scale(), problem.inputs
    plan = _Launching(spec, inputs.extent, chip_of(inputs.q.device))
    if case.lengths:  # idle rows are set without a kernel
        monkeypatch.setattr(allocate, "padding_setter", lambda *_: functools.partial(allocate._fill_all, -torch.inf))
    forward = run.ForwardExecutor(inputs, problem.spec, plan)
    got, expected = forward.call_with_tensors(tuple(inputs[:8])), forward(inputs)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    cases.assert_right(cases.judge_forward(problem, *got), f"seed {seed}")
