"""What the tests of every chip's own kernels share: to run them on the emulated chip, and what holds of them all."""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from warpcheck.machine import SCHEDULES

import fa4
from fa4.emulator import emulate
from fa4.oracle import cases, reference
from fa4.oracle.cases import Case
from fa4.runtime import plan
from fa4.runtime.device import chip_of
from fa4.runtime.spec import Gradients, Saved
from fa4.torch_ops.run import ForwardExecutor, backward
from tests.poisoned import poison_unused

Result = tuple[torch.Tensor, torch.Tensor]

# Compiling takes most of a case's time. These have a kernel to themselves, or many tiles, and nothing in a forward that
# other cases lack; the soak runs them with all others.
SOAK_ONLY = {
    "decode",
    "deterministic_groups_of_three",
    "deterministic_groups_of_twelve",
    "full_d128",
    "head_dim_192_128",
    "head_dim_72_padded",
    "head_dim_8",
    "head_dim_96",
    "head_dim_v_smaller",
    "large_logits",
    "many_tiles",
    "packed_rows_past_the_end",
    "pair",
    "ragged_both",
    "seqused",
    "sink",
    "sink_gqa_window",
    "sink_varlen_gqa",
    "softcap",
    "varlen",
    "varlen_window_gqa",
    "window",
    "window_left_only",
}


@dataclass(frozen=True)
class Kernels:
    """The kernels of one backend, and the chip they run on."""

    backend: str
    chip: str
    plan: Callable[..., plan.Plan]

    def made(self, spec: Any, inputs: Any, **tiles: Any) -> plan.Plan:
        """The plan of a problem on the chip that is emulated now."""
        return self.plan(spec.with_positive_scale(), inputs.extent, chip_of(inputs.q.device), **tiles)

    def forward(
        self, problem: cases.Problem, seed: int, schedule: str = "round_robin", tiles: Any = None, sms: int = 2
    ) -> Result:
        """(out, lse), straight from the plan; raises on any finding.

        There are fewer multiprocessors than most cases have work tiles, so that CTAs go through them in laps, or run
        in waves. `tiles` replaces the row of the table.
        """
        with emulate(self.chip, sms=sms, seed=seed, schedule=schedule):
            made = self.made(problem.spec, problem.inputs, forward_tiles=tiles)
            # (as a call that comes again)
            return ForwardExecutor(problem.inputs, problem.spec, made).call_with_tensors(problem.inputs.tensors)

    def gradients(
        self,
        problem: cases.Problem,
        seed: int,
        schedule: str = "round_robin",
        tiles: Any = None,
        sms: int = 4,
        saved: Saved | None = None,
    ) -> Gradients:
        """The kernels' gradients from what `given` says, or from `saved`; raises on any finding."""
        saved = given(problem) if saved is None else saved
        spec = replace(problem.spec, needs_backward=True)
        with emulate(self.chip, sms=sms, seed=seed, schedule=schedule):
            return backward(problem.inputs, spec, self.made(spec, problem.inputs, backward_tiles=tiles), saved)


def given(problem: cases.Problem) -> Saved:
    """The same-precision reference's out and lse, and the upstream gradients, as a backward would get them."""
    out, lse = reference.forward(problem.inputs, problem.spec, precise=False)
    return Saved(out, lse, problem.dout, problem.dlse.masked_fill(lse == -torch.inf, 0.0))


def bits(grads: Gradients) -> tuple[bytes, ...]:
    return tuple(x.contiguous().view(torch.int16).numpy().tobytes() for x in grads if x is not None)


def judge_gradients(problem: cases.Problem, grads: Gradients, saved: Saved | None = None) -> list[cases.Judgement]:
    """For the upstream gradients that `Kernels.gradients` gives."""
    saved = given(problem) if saved is None else saved
    return cases.judge_backward(replace(problem, dlse=saved.dlse), grads)


def check_forward(kernels: Kernels, case: Case, seed: int) -> None:
    """One case is right under two of the schedules, with equal bits."""
    _check_forward(kernels, case, seed, [(schedule, seed) for schedule in random.Random(seed).sample(SCHEDULES, 2)])


def check_forward_under_many_interleavings(kernels: Kernels, case: Case, seed: int) -> None:
    """The same for four seeds of each schedule."""
    _check_forward(kernels, case, seed, [(schedule, seed + i) for i in range(4) for schedule in SCHEDULES])


def _check_forward(kernels: Kernels, case: Case, seed: int, interleavings: Iterable[tuple[str, int]]) -> None:
    problem = poison_unused(cases.make(case, seed))
    first = None
    for schedule, emulator_seed in interleavings:
        out, lse = kernels.forward(problem, emulator_seed, schedule)
        if first is None:
            first = out, lse
            cases.assert_right(cases.judge_forward(problem, out, lse), f"{case}, seed {seed}")
        where = f"{case} differs under {schedule}, seed {emulator_seed}"
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1]), where


def check_gradients(
    kernels: Kernels, problem: cases.Problem, seed: int, schedule: str, tiles: Any = None, sms: int = 4
) -> Gradients:
    """They are right; returns them."""
    saved = given(problem)
    grads = kernels.gradients(problem, seed, schedule, tiles, sms, saved)
    name = f"{problem.case}, {'' if tiles is None else f'{tiles}, '}{schedule}, {sms} multiprocessors, seed {seed}"
    cases.assert_right(judge_gradients(problem, grads, saved), name)
    return grads


def check_gradients_under_many_interleavings(
    kernels: Kernels, problems: Sequence[cases.Problem], seed: int, tiles: Any = None
) -> None:
    """The problems take turns."""
    for i in range(10):
        schedule, sms = SCHEDULES[i % 3], (2, 3, 4, 7)[i % 4]
        check_gradients(kernels, problems[i % len(problems)], seed + i, schedule, tiles, sms)


def check_small_logits_under_a_softcap(kernels: Kernels, seed: int) -> None:
    """One key a row, so that lse is its logit, and scores that are single products: each logit is as exact as float32
    allows, however much larger the cap is, and has the same bits beside large ones and a NaN."""
    cap, rows, spoilt = 50.0, 64, 3
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(rows, generator=generator) * 2.0 ** torch.arange(rows).remainder(11).sub(5)).bfloat16()
    k = scores.view(1, 1, 1, rows)
    q = torch.eye(rows, dtype=torch.bfloat16)
    q[spoilt, 0] = torch.nan
    is_small = (scores.abs() < 0.4 * cap) & (torch.arange(rows) != spoilt)
    lses = []
    for x in (q, torch.where(is_small[:, None], q, 0.0)):
        with emulate(kernels.chip, sms=2, seed=seed):
            call = dict(softcap=cap, softmax_scale=1.0, return_lse=True, backend=kernels.backend)
            lses.append(fa4.flash_attn_func(x.view(1, rows, 1, rows), k, k, **call)[1].flatten())
    exact = cap * torch.tanh(scores.double() / cap)
    off = (lses[0].double() / exact - 1).abs()
    assert off[spoilt].isnan()
    off[spoilt] = 0.0
    # Four or five roundings to float32, and tanh's; those of a tanh that errs as much of 1 are 10 to 1000 times that.
    assert off.max() < 8e-7, f"a logit is {off.max():.2e} of itself off, seed {seed}"
    assert torch.equal(lses[0][is_small], lses[1][is_small]), f"seed {seed}"


class SharedForwardTests:
    """Tests of the forward of every chip with kernels of its own. row: name of the tiles of the case "causal"."""

    kernels: Kernels
    row: str

    def test_a_nan_in_a_query_shows_in_its_row_alone(self, seed: int) -> None:
        """In out and in lse, also where rows may be unused and unused rows are zero whatever they hold."""
        case = Case("nan", batch=2, seqlen_q=150, seqlen_k=200, seqused=((150, 200), (140, 130)), sink=True)
        problem = cases.make(case, seed)
        clean = self.kernels.forward(problem, seed)
        q = problem.inputs.q.clone()
        q[0, 77, 1, 5] = torch.nan
        spoilt = self.kernels.forward(replace(problem, inputs=problem.inputs._replace(q=q)), seed)
        assert spoilt[0][0, 77, 1].isnan().all() and spoilt[1][0, 1, 77].isnan()
        for x, expected, place in ((spoilt[0], clean[0], (0, 77, 1)), (spoilt[1], clean[1], (0, 1, 77))):
            x[place] = expected[place]
            assert torch.equal(x, expected), f"seed {seed}"

    def test_strided_and_expanded_inputs(self, seed: int) -> None:
        """Heads-first memory, a k and v that share one tensor, a batch axis of stride 0."""
        problem = cases.make(Case("strided", batch=2, seqlen_q=130, seqlen_k=140, head_dim=64), seed)
        inputs = problem.inputs
        kv = torch.cat((inputs.k, inputs.v), dim=-1)
        q = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
        k, v = kv[..., :64], kv[..., 64:][:1].expand(2, -1, -1, -1)
        problem = replace(problem, inputs=inputs._replace(q=q, k=k, v=v))
        out, lse = self.kernels.forward(problem, seed, "random")
        cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")

    def test_public_function_dispatches_here(self, seed: int) -> None:
        """`flash_attn_func` on CPU tensors inside the emulator takes this backend, and says so and by which row."""
        problem = cases.make(cases.CASES["causal"], seed)
        with emulate(self.kernels.chip, sms=2, seed=seed):
            out, lse = problem.call(backend=self.kernels.backend)
            auto, _ = problem.call()
            explanation = fa4.explain(problem.inputs.q, problem.inputs.k, problem.inputs.v, causal=True)
        cases.assert_right(cases.judge_forward(problem, out, lse), f"seed {seed}")
        assert torch.equal(out, auto)
        assert explanation.chosen == self.kernels.backend and self.row in explanation.tiles

    def test_rows_that_one_key_rules(self, seed: int) -> None:
        """The weight of the key that rules a row is no power of two where O tolerates that the maximum has grown. Its
        rounding must not show: neither in out as a whole nor, so, in all of a row's dS, which are from
        dP - rowsum(dO * O).

        Of 320 keys two count, the first among the last to be visited; it weighs a little less than 32 (1 + 2^-8) times
        as much as the other, and is rounded down to 32.
        """
        first, other, growth = 10, 200, 5 + math.log2(1 + 0.98 / 256)
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.zeros(2, 64, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 320, 4, 64, dtype=torch.bfloat16)
        v = torch.randn(k.shape, generator=generator).to(torch.bfloat16)
        q[..., 0], k[..., 0] = 1, -8
        k[:, other, :, 0], k[:, first, :, 0] = 0, 1
        with emulate(self.kernels.chip, sms=2, seed=seed):
            options = dict(causal=True, softmax_scale=growth * math.log(2), backend=self.kernels.backend)
            out = fa4.flash_attn_func(q, k, v, **options).double()
        expected = (2**growth * v[:, first].double() + v[:, other].double())[:, None] / (2**growth + 1)
        exact = expected.to(torch.bfloat16).double()  # what rounding out itself does is no fault
        off = float(((out - exact) * expected).sum() / (expected * expected).sum().mul(64))
        # What is left of that is another for each of the 512 elements. The rounding of the weight is 2^-8.
        assert abs(off) < 2**-11, f"out is {off:.2e} off as a whole, seed {seed}"

    def test_small_logits_under_a_softcap(self, seed: int) -> None:
        check_small_logits_under_a_softcap(self.kernels, seed)


class SharedBackwardTests:
    """Tests of the backward of every chip with kernels of its own."""

    kernels: Kernels

    def test_gradients_through_autograd(self, seed: int) -> None:
        """Both directions by the public function."""
        case = cases.CASES["causal_d128"]
        problem = cases.make(case, seed)
        with emulate(self.kernels.chip, seed=seed):
            out, lse, grads = problem.call_with_gradients(backend=self.kernels.backend)
        judgements = cases.judge_forward(problem, out, lse) + judge_gradients(problem, grads)
        cases.assert_right(judgements, f"{case}, seed {seed}")
