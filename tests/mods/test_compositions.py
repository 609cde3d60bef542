"""Operators that are compositions of a graph's, tensors that functions change in place or make of numbers."""

import pytest
import torch

import fa4
from fa4.mods.frontend.trace import trace_mask, trace_score
from fa4.mods.ir.tensors import evaluation

from .programs import torchs_answer
from .test_flex import assert_same, gradients, problem

ON_A_GRID = torch.cat(
    (torch.linspace(-3, 3, 37), torch.tensor([0, 0.5, 1.5, 2.5, -0.5, -1.5, 1e-9, -1e-9, 40, -40, 1e4]))
).double()
COMPOSED = {
    name: getattr(torch, name)
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erfc", "expm1", "log10", "round", "sinh", "tan",
    )
} | {
    "round to a decimal": lambda x: torch.round(x, decimals=1),
    "round to tens": lambda x: torch.round(x * 7, decimals=-1),
    "fmod": lambda x: torch.fmod(x, 1.3),
    "fmod of a negative": lambda x: torch.fmod(x, -0.7),
    "remainder": lambda x: torch.remainder(x, 1.3),
    "remainder of a negative": lambda x: torch.remainder(x, -0.7),
    "both of fmod": lambda x: torch.fmod(x, x * x * 0.1 + 0.3),
    "hypot": lambda x: torch.hypot(x, x * 0.5 + 1.0),
    "hypot of zeros": lambda x: torch.hypot(x, torch.zeros((), dtype=x.dtype)),
    "copysign": lambda x: torch.copysign(x * x, x - 0.25),
    "copysign of a number": lambda x: torch.copysign(x, -2.0),
    "copysign of -0": lambda x: torch.copysign(x, torch.tensor(-0.0, dtype=x.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSED)
def test_operators_that_are_compositions(name):
    """Values and derivatives to the last digits, where results are small too; erfc has an absolute error alone."""
    function = COMPOSED[name]
    traced = trace_score(lambda score, b, h, q_idx, kv_idx: function(score))
    x = ON_A_GRID.clone().requires_grad_()
    expected = function(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    zero, one = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.float64)
    inputs = {"score": ON_A_GRID, "b": zero, "h": zero, "q_idx": zero, "kv_idx": zero, "grad": one}
    done = evaluation(traced.graph, traced.tensors, traced.numbers, inputs, torch.float64)
    for node, exact in ((traced.graph.result, expected.detach()), (traced.graph.dscore, slope)):
        got = torch.broadcast_to(done.value(node), exact.shape)
        # Whole periods are subtracted at once, and so is what is rounded off them.
        period = 1e-12 if name.startswith(("fmod", "remainder", "both")) else 1e-15
        torch.testing.assert_close(got, exact, rtol=1e-13, atol=period, equal_nan=True)


def test_integers_are_divided_towards_zero_as_by_torch():
    numbers = torch.arange(-9, 10)
    for divisor in (3, -4, 1, -1, 8):

        def mask_mod(b, h, q_idx, kv_idx, divisor=divisor):
            whole = torch.div(q_idx - kv_idx, divisor, rounding_mode="trunc")
            return whole * 100 + torch.fmod(q_idx - kv_idx, divisor) == kv_idx

        traced = trace_mask(mask_mod)
        expected = mask_mod(0, 0, numbers[:, None], numbers)
        zero = torch.zeros((), dtype=torch.int64)
        inputs = {"b": zero, "h": zero, "q_idx": numbers[:, None], "kv_idx": numbers}
        done = evaluation(traced.graph, traced.tensors, traced.numbers, inputs, torch.float64)
        assert torch.equal(done.value(traced.graph.result), expected), divisor


TABLE = [1.0, 5.0, 2.0, -1.0, 4.0, 0.25]


def _table_that_changes(score, b, h, q_idx, kv_idx):
    """An element of a table is what it is when it is read."""
    table = torch.zeros(90)
    table[2] = 7.0
    before = table[kv_idx]
    table[2] = 9.0
    return score * table[kv_idx] + before


def _summed_up(score, b, h, q_idx, kv_idx):
    """Numbers that become what is computed."""
    total, row = torch.zeros((), dtype=score.dtype), torch.ones(3, dtype=score.dtype)
    total += score
    row *= score
    total.mul_(total)
    return total + (row * torch.arange(3)).sum()


# Functions that torch takes, and what they are without a change in place or a table, for gradients.
MADE_OR_CHANGED = {
    "tanh_": (lambda s, b, h, i, j: s.tanh_().mul_(20), lambda s, b, h, i, j: s.tanh() * 20),
    "exp_": (lambda s, b, h, i, j: s.exp_().add_(1), lambda s, b, h, i, j: s.exp() + 1),
    "mul_ by itself": (lambda s, b, h, i, j: s.mul_(s), lambda s, b, h, i, j: s * s),
    "sigmoid_": (lambda s, b, h, i, j: s.sigmoid_().pow_(3), lambda s, b, h, i, j: s.sigmoid() ** 3),
    "detached": (lambda s, b, h, i, j: s.detach() * s.mul_(2), lambda s, b, h, i, j: (s * 2).detach() * s * 2),
    "inplace": (
        lambda s, b, h, i, j: torch.nn.functional.leaky_relu(s.mul_(2), inplace=True),
        lambda s, b, h, i, j: torch.nn.functional.leaky_relu(s * 2),
    ),
    "summed up": (_summed_up, lambda s, b, h, i, j: s * s + 3 * s),
    "heaviside": (
        lambda s, b, h, i, j: s * torch.heaviside(s, torch.ones((), dtype=s.dtype)),
        lambda s, b, h, i, j: torch.where(s < 0, 0.0, s),
    ),
    "linspace": (lambda s, b, h, i, j: s + torch.linspace(0, 44.5, 90)[j], lambda s, b, h, i, j: s + 0.5 * j),
    "range times two": (lambda s, b, h, i, j: s + (torch.arange(90) * 2)[j], lambda s, b, h, i, j: s + 2 * j),
    "from the end": (lambda s, b, h, i, j: s + torch.arange(90)[j - 90], lambda s, b, h, i, j: s + j),
    "slice": (lambda s, b, h, i, j: s + torch.arange(100)[10:][j], lambda s, b, h, i, j: s + j + 10),
    "one number": (lambda s, b, h, i, j: s * torch.full((4, 90), 3.0)[h, j], lambda s, b, h, i, j: s * 3),
    "two axes": (lambda s, b, h, i, j: s + torch.arange(360).view(4, 90)[h, j], lambda s, b, h, i, j: s + 90 * h + j),
    "in part": (lambda s, b, h, i, j: s + torch.arange(360).view(4, 90)[h][j], lambda s, b, h, i, j: s + 90 * h + j),
    "squares": (
        lambda s, b, h, i, j: s * (torch.arange(90, dtype=torch.float64) ** 2)[j] * 0.01,
        lambda s, b, h, i, j: s * j**2 * 0.01,
    ),
    "table": (
        lambda s, b, h, i, j: s * torch.tensor(TABLE, dtype=torch.float64)[j % 6],
        lambda s, b, h, i, j: s * torch.stack([torch.where(j % 6 == n, x, 0.0) for n, x in enumerate(TABLE)]).sum(0),
    ),
    "bools": (
        lambda s, b, h, i, j: torch.where((torch.arange(90) % 3 == 0)[j], s, s * 2),
        lambda s, b, h, i, j: torch.where(j % 3 == 0, s, s * 2),
    ),
    "table that changes": (
        _table_that_changes,
        lambda s, b, h, i, j: s * torch.where(j == 2, 9.0, 0.0) + torch.where(j == 2, 7.0, 0.0),
    ),
    "whole": (lambda s, b, h, i, j: s * torch.arange(6).sum(), lambda s, b, h, i, j: s * 15),
}


@pytest.mark.parametrize("name", MADE_OR_CHANGED)
def test_what_is_changed_in_place_or_made_of_numbers(name, seed):
    leaves, dout = problem(seed)
    written, plain = MADE_OR_CHANGED[name]
    results = []
    for attend, score_mod in (
        (lambda *x: fa4.flex_attention(*x, enable_gqa=True, return_lse=True), written),
        (torchs_answer, plain),
    ):
        out, lse = attend(*leaves, score_mod)
        results.append((out, lse, *gradients(out, lse, leaves, dout)))
    assert_same(*results, f"{name}, seed {seed}")
