"""Training calls on the emulated Blackwell chip whose backward multiplies 8-bit numbers: gradients and judge."""

from dataclasses import replace

import torch
from warpcheck.machine import SCHEDULES

from fa4.emulator import emulate
from fa4.oracle import cases, reference
from fa4.runtime.spec import Gradients, Saved
from fa4.torch_ops import low_precision
from fa4.torch_ops.descales import dequantized
from tests.fp8.heads import noting_kernels


def saved_of(problem, has_dlse):
    return Saved(problem.dout, problem.dlse, problem.dout, problem.dlse if has_dlse else None)


def as_multiplied(problem, precision, has_dlse=True):
    """The problem on the numbers that the call multiplies."""
    eight, descales = low_precision.rounded(problem.inputs, precision)
    inputs = dequantized(eight, descales, torch.float32)
    dout, operands = low_precision.gradient_operands(saved_of(problem, has_dlse), eight, descales)
    spec = replace(problem.spec, operands=low_precision.PRECISIONS[precision])
    rounding = dict(ds_factors=operands.ds_factors(problem.spec.group))
    return replace(problem, inputs=inputs, spec=spec, dout=dout, rounding=rounding)


def gradients(problem, seed, precision, has_dlse=True):
    """Of a call, from a kernel of 8 bits."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.tensors().items()}
    chip = emulate("sm_100a", sms=4, seed=seed, schedule=SCHEDULES[seed % len(SCHEDULES)])
    with chip, noting_kernels() as taken:
        out, lse = problem.call(**leaves, precision=precision)
        dlse = problem.dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
        results, dresults = ((out, lse), (problem.dout, dlse)) if has_dlse else ((out,), (problem.dout,))
        grads = Gradients(*torch.autograd.grad(results, list(leaves.values()), dresults))
    assert taken["native_backward"] is low_precision.PRECISIONS[precision]
    return grads


def assert_right(problem, seed, precision):
    """The gradients of a call are right by the oracle, on the numbers that it multiplies."""
    grads = gradients(problem, seed, precision)
    assert all(x is None or x.dtype == problem.spec.dtype for x in grads[:3])
    exact = as_multiplied(problem, precision)

    def references(of, precise):
        names = "ds_factors", "sequential", "key_order"
        options = {name: of.rounding[name] for name in names if name in of.rounding}
        return reference.backward(of.inputs, of.spec, of.dout, of.dlse, precise=precise, **options)

    verdict = cases.judge_by_draws(grads._asdict(), references, exact, (), cases.roundings(exact))
    cases.assert_right(verdict, f"{problem.case.name}, {precision}, seed {seed}")
