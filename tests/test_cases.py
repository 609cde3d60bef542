"""The judge is judged: it accepts what is right, and refuses results that are wrong in one place or everywhere."""

from dataclasses import replace

import pytest
import torch

from fa4.oracle import cases, reference
from fa4.oracle.cases import CASES, Case, judge_backward, judge_forward, make
from fa4.runtime.spec import Gradients

PLAIN = Case("plain", batch=2, seqlen_q=20, seqlen_k=30, heads_q=4, head_dim=16, causal=True)
FLOAT32 = replace(PLAIN, name="float32", dtype=torch.float32)
SINK = replace(PLAIN, name="sink", sink=True)
MASKED = Case("masked", seqlen_q=30, seqlen_k=12, heads_q=4, head_dim=16, causal=True)
LARGE_LOGITS = Case("large_logits", seqlen_q=30, seqlen_k=30, head_dim=16, logits=100.0)
SEQUSED = Case("seqused", lengths=((10, 14), (6, 6)), seqused=((7, 13), (6, 0)), head_dim=16, causal=True)


def _right(case: Case, seed: int):
    """The oracle's results in the dtypes that a kernel returns."""
    problem = make(case, seed)
    out, lse = reference.forward(problem.inputs, problem.spec)
    grads = reference.backward(problem.inputs, problem.spec, problem.dout, problem.dlse)
    rounded = Gradients(*(None if x is None else x.to(case.dtype) for x in grads))
    return problem, out.to(case.dtype), lse.float(), rounded


def _wrong_names(judgements) -> set[str]:
    return {judgement.name for judgement in judgements if not judgement.right}


def _judged(problem, **named: torch.Tensor):
    """Judgements of results and gradients given by name."""
    of_forward = [named.pop(name, None) for name in ("out", "lse")]
    judgements = [] if of_forward[0] is None else judge_forward(problem, *of_forward)
    return judgements + (judge_backward(problem, Gradients(**named)) if named else [])


@pytest.mark.parametrize("case", [PLAIN, FLOAT32, SINK, MASKED, SEQUSED, CASES["no_keys"]], ids=str)
def test_the_oracle_rounded_is_right(case, seed):
    problem, out, lse, grads = _right(case, seed)
    judgements = judge_forward(problem, out, lse) + judge_backward(problem, grads)
    assert not _wrong_names(judgements)
    cases.assert_right(judgements, "nothing is wrong")
    assert {judgement.name for judgement in judgements} >= {"out", "lse", "dq", "dk", "dv"}
    assert ("dsink" in {judgement.name for judgement in judgements}) == case.sink


@pytest.mark.parametrize("case", [PLAIN, FLOAT32], ids=str)
def test_another_draw_of_the_same_precision_is_right(case, seed):
    """Sums in another order and operands rounded to the input dtype err as the reference errs."""
    problem = make(case, seed)
    columns = torch.randperm(case.head_dim, generator=torch.Generator().manual_seed(seed + 1))
    inputs = problem.inputs._replace(q=problem.inputs.q[..., columns], k=problem.inputs.k[..., columns])
    out, lse = reference.forward(inputs, problem.spec, precise=False)
    cases.assert_right(judge_forward(problem, out, lse), f"seed {seed}")


def _row(x: torch.Tensor) -> None:
    x[-1, 1] = 0.0  # of lse a head


def _head(x: torch.Tensor) -> None:
    x.select(-2, 1).zero_()


def _swapped_heads(x: torch.Tensor) -> None:
    x.copy_(x.flip(-2))


def _element(x: torch.Tensor) -> None:
    x.view(-1)[x.numel() // 2] += 0.1 * x.abs().max()


def _factor(x: torch.Tensor) -> None:
    x.mul_(1.03)


def _sign(x: torch.Tensor) -> None:
    x.neg_()


def _last(value: float):
    def spoil(x: torch.Tensor) -> None:
        x.view(-1)[-1] = value

    spoil.__name__ = f"_{value}"
    return spoil


WRONG = (_element, _row, _head, _swapped_heads, _factor, _sign, _last(torch.nan), _last(torch.inf), _last(-torch.inf))
CASE_AND_WRONG = [*((PLAIN, spoil) for spoil in WRONG), (FLOAT32, _element), (FLOAT32, _last(torch.nan))]


@pytest.mark.parametrize(
    ("case", "spoil"), CASE_AND_WRONG, ids=[f"{case}{spoil.__name__}" for case, spoil in CASE_AND_WRONG]
)
def test_a_wrong_result_is_refused_by_its_name(case, spoil, seed):
    problem, out, lse, grads = _right(case, seed)
    for named in ({"out": out, "lse": lse}, grads._asdict()):
        for name in named.keys() - {"dsink"}:
            spoilt = named[name].clone()
            spoil(spoilt)
            judgements = _judged(problem, **{**named, name: spoilt})
            assert _wrong_names(judgements) == {name}
            with pytest.raises(AssertionError, match=rf"^by its name: {name}: error [^;]*, allowed [0-9.e+-]+$"):
                cases.assert_right(judgements, "by its name")


@pytest.mark.parametrize("spoil", [_sign, _last(torch.nan), lambda x: x.zero_()], ids=["sign", "nan", "zero"])
def test_a_wrong_gradient_of_the_sink_is_refused(spoil, seed):
    problem, _, _, grads = _right(SINK, seed)
    spoil(grads.dsink)
    assert _wrong_names(judge_backward(problem, grads)) == {"dsink"}


def _with_large_gradients(case: Case, seed: int):
    """A problem and its right gradients, whose scale and errors are larger than those of other draws of the case."""
    problem = make(case, seed)
    problem = replace(problem, dout=problem.dout * 256)
    exact = reference.backward(problem.inputs, problem.spec, problem.dout, problem.dlse)
    return problem, exact, Gradients(*(None if x is None else x.to(case.dtype) for x in exact))


ONE_SINK = replace(SINK, name="one_sink", heads_q=1, heads_kv=1, causal=False)
TWO_KEYS = Case("two_keys", seqlen_q=1, seqlen_k=300, heads_q=1, heads_kv=1, head_dim=8, window_size=(1, 0))


@pytest.mark.parametrize(
    ("case", "name", "drawn", "key_order"),
    [(ONE_SINK, "dsink", 104, 64), (ONE_SINK, "dsink", 249, 65), (TWO_KEYS, "dk", 127, 64), (TWO_KEYS, "dk", 237, 65)],
    ids=str,
)
def test_few_numbers_are_right_if_one_reference_errs_little(case, name, drawn, key_order):
    """A single sum, and the gradients of a single query, of a reference that rounds P in another order of keys."""
    problem, exact, grads = _with_large_gradients(case, drawn)
    of = problem.inputs, problem.spec, problem.dout, problem.dlse
    floor, got = (getattr(reference.backward(*of, precise=False, key_order=x), name) for x in (None, key_order))
    assert key_order >= cases.DRAWS and not cases.judge(name, got, getattr(exact, name), floor).right
    cases.assert_right(judge_backward(problem, grads._replace(**{name: got})), case.name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wrong_sum_is_refused(dtype, seed):
    """A sum without the term of one row; in float16, where that is more than rounding, a sum that is 1 % too large."""
    case = replace(SINK, batch=1, heads_q=8, causal=False, dtype=dtype)
    problem, exact, grads = _with_large_gradients(case, seed)
    out, lse = reference.forward(problem.inputs, problem.spec)
    d = (problem.dout.double() * out).sum(-1).transpose(1, 2) - problem.dlse.double()
    terms = (-torch.exp(problem.inputs.sink.double()[:, None] - lse) * d).transpose(0, 1).flatten(1)
    torch.testing.assert_close(terms.sum(1), exact.dsink)
    largest = torch.where(terms.abs() == terms.abs().max(), terms, 0.0).sum(1)
    for dsink in (exact.dsink - largest, *([exact.dsink * 1.01] if dtype == torch.float16 else [])):
        assert _wrong_names(judge_backward(problem, grads._replace(dsink=dsink.to(dtype)))) == {"dsink"}


def test_a_row_that_sees_nothing_must_say_so(seed):
    """lse is -inf there and nothing else: neither a finite number nor NaN, and no other row may be -inf."""
    problem, out, lse, _ = _right(MASKED, seed)
    hidden, seen = (0, 0, 0), (0, 0, MASKED.seqlen_q - 1)
    assert lse[hidden] == -torch.inf and lse[seen].isfinite()
    for place, value in ((hidden, -1e30), (hidden, torch.nan), (hidden, torch.inf), (seen, -torch.inf)):
        spoilt = lse.clone()
        spoilt[place] = value
        assert _wrong_names(judge_forward(problem, out, spoilt)) == {"lse"}
    out[0, 0] = 0.1
    assert _wrong_names(judge_forward(problem, out, lse)) == {"out"}


UNREACHED = (
    ("out", MASKED, (0, 0, 0, 3)),  # a query before all keys
    ("dq", MASKED, (0, 17, 3, 15)),  # the last of them
    ("dk", Case("few", seqlen_q=5, seqlen_k=12, head_dim=16, window_size=(2, 0)), (0, 4, 1, 0)),  # a key before all
    ("out", replace(MASKED, sink=True), (0, 2, 1, 0)),  # lse is finite there, being the sink
    ("out", SEQUSED, (7, 0, 1)),  # a row that is not in use
    ("dv", SEQUSED, (14, 0, 1)),  # a key of queries that see none
    ("dq", CASES["packed_rows_past_the_end"], (-1, 0, 0)),
    ("out", CASES["no_keys"], (0, 4, 1, 63)),
    ("dv", CASES["no_queries"], (0, 0, 0, 0)),
)


@pytest.mark.parametrize(
    ("name", "case", "place"), UNREACHED, ids=[f"{name}-{case}{place}" for name, case, place in UNREACHED]
)
def test_a_row_that_nothing_reaches_is_exactly_zero(name, case, place, seed):
    """Far less than what rows may err is refused, and so is NaN; where something is seen it is not."""
    problem, out, lse, grads = _right(case, seed)
    named = {"out": out, "lse": lse, **grads._asdict()}
    assert named[name][place] == 0
    for value in (1e-30, torch.nan):
        spoilt = named[name].clone()
        spoilt[place] = value
        judgements = _judged(problem, **{**named, name: spoilt})
        assert _wrong_names(judgements) == {name}
        with pytest.raises(AssertionError, match="1 rows that no score reaches are not 0"):
            cases.assert_right(judgements, "a stray")
    spoilt = named[name] + 1e-30 * (named[name] != 0)
    assert not _wrong_names(_judged(problem, **{**named, name: spoilt}))


def test_a_result_of_another_shape_is_refused(seed):
    problem, out, lse, _ = _right(PLAIN, seed)
    with pytest.raises(ValueError, match=r"out has shape \(2, 20, 4, 1\), expected \(2, 20, 4, 16\)"):
        judge_forward(problem, out[..., :1], lse)


def test_large_logits_widen_what_is_allowed_a_little(seed):
    """More draws than one bound the error, but a factor of 1.1 is still seen."""
    problem, out, lse, _ = _right(LARGE_LOGITS, seed)
    assert not _wrong_names(judge_forward(problem, out, lse))
    assert _wrong_names(judge_forward(problem, out * 1.1, lse * 1.1)) == {"out", "lse"}


def test_equal_seeds_give_equal_problems_and_others_others():
    one, same, other = (make(CASES["varlen"], seed) for seed in (3, 3, 4))
    for name, x in one.tensors().items():
        assert torch.equal(x, same.tensors()[name]) and not torch.equal(x, other.tensors()[name])
    assert torch.equal(one.dout, same.dout) and torch.equal(one.dlse, same.dlse)
    assert not torch.equal(one.inputs.q[:, :2], one.dout[:, :2])  # drawn one after the other, not twice the same


def test_a_case_is_what_its_name_says():
    assert all(name == case.name == str(case) for name, case in CASES.items())
    problem = make(Case("x", lengths=((3, 7), (5, 2)), seqused=((2, 7), (5, 1)), heads_q=6, head_dim_v=24), 0)
    i = problem.inputs
    assert i.q.shape == (8, 6, 64) and i.k.shape == (9, 2, 64) and i.v.shape == (9, 2, 24)
    assert i.cu_seqlens_q.tolist() == [0, 3, 8] and i.cu_seqlens_k.tolist() == [0, 7, 9]
    assert i.seqused_q.tolist() == [2, 5] and i.seqused_k.tolist() == [7, 1]
    assert (i.max_seqlen_q, i.max_seqlen_k) == (5, 7)
    assert problem.dout.shape == (8, 6, 24) and problem.dlse.shape == (6, 8)
    assert problem.spec.softmax_scale == 64**-0.5


@pytest.mark.parametrize(("error", "is_right"), [(1.5e-7, True), (3e-7, False)])
def test_a_reference_that_errs_nothing_by_luck_is_drawn_again(error, is_right):
    """What it allows is twice 0 at first, and no factor of that says that a result is hopeless."""

    def references(draw, precise):
        return [torch.full((2,), 0.0 if precise else (0.0, 1e-7)[draw], dtype=torch.float64)]

    verdict = cases.judge_by_draws({"dq": torch.tensor([0.0, error])}, references, 0, [0, 1, 1])
    assert [one.right for one in verdict] == [is_right]


def test_roundings_of_the_same_problem_count_for_every_result():
    """Other data count for few elements only, or in float32."""

    def references(draw, precise):
        return [torch.full((300,), 0.0 if precise else draw, dtype=torch.float64)]

    def is_right(*others):
        return cases.judge_by_draws({"dq": torch.full((300,), 0.15).half()}, references, 0.0, *others)[0].right

    assert is_right([], [0.0, 0.1])
    assert not is_right([0.0, 0.1]) and not is_right([0.1], [0.05, 0.07])
