"""Tensors as callers lay them out: results are those of contiguous copies, to the bit, on every backend."""

import contextlib
import mmap

import pytest
import torch

import fa4
from fa4.oracle import cases
from fa4.oracle.cases import Case

CASE = Case("layouts", batch=2, seqlen_q=20, seqlen_k=33, causal=True, deterministic=True)
CHIPS = {"torch": None, "sm80": "sm_80", "sm100": "sm_100a"}


def chip(backend: str, seed: int):
    """CPU tensors live on a chip of the backend inside."""
    if backend == "torch":
        return contextlib.nullcontext()
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    pytest.importorskip("warpcheck.machine._core", reason="the emulator has a part in C++")
    from fa4.emulator import emulate

    return emulate(CHIPS[backend], seed=seed)


def _projection(x: torch.Tensor) -> torch.Tensor:
    """A third of what a Linear gives for q, k and v together."""
    return torch.stack((x, x, x), dim=2)[:, :, 1]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _every_second_row(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=1)[:, ::2]


def _odd_address(x: torch.Tensor) -> torch.Tensor:
    """Rows start at multiples of 2 bytes, not of 16."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


def _odd_row(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(*x.shape[:-1], x.shape[-1] + 1)[..., :-1].copy_(x)


def _odd_batch(x: torch.Tensor) -> torch.Tensor:
    """Only the longest stride is no multiple of 16 bytes."""
    step = x[0].numel() + 1
    return x.new_zeros(2 * step).as_strided(x.shape, (step, *x.stride()[1:])).copy_(x)


def _far(x: torch.Tensor) -> torch.Tensor:
    """The second sequence starts beyond 2**31 elements. Pages that nobody touches take no memory."""
    step = 2**31 + 64
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (step + x[0].numel())), dtype=x.dtype)
    return memory.as_strided(x.shape, (step, *x.stride()[1:])).copy_(x)


# The layouts of q, k, v and of the gradient of out.
LAYOUTS = {
    "views": (_projection, _heads_first, _every_second_row, _heads_first),
    "odd": (_odd_address, _odd_row, _odd_batch, _odd_address),
    "odd_in_other_places": (_odd_row, _odd_batch, _odd_address, _odd_batch),
    "far": (_far, _far, _far, _far),
}


def _results(tensors: dict[str, torch.Tensor], upstream: torch.Tensor, backend: str) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv; gradients come back contiguous."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out, lse = fa4.flash_attn_func(**leaves, **CASE.flags(), return_lse=True, backend=backend)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, list(leaves.values()), upstream)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("backend", CHIPS)
def test_a_layout_changes_no_bit(backend, name, seed):
    """Of the inputs and of the gradient of out."""
    problem = cases.make(CASE, seed)
    of_q, of_k, of_v, of_dout = LAYOUTS[name]
    i = problem.inputs
    with chip(backend, seed):
        expected = _results(problem.tensors(), problem.dout, backend)
        got = _results(dict(q=of_q(i.q), k=of_k(i.k), v=of_v(i.v)), of_dout(problem.dout), backend)
    for result, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected):
        assert torch.equal(a, b), f"{result} (seed {seed})"


@pytest.mark.parametrize(
    "layout", dict.fromkeys(x for mix in LAYOUTS.values() for x in mix), ids=lambda layout: layout.__name__[1:]
)
def test_a_layout_keeps_values_and_is_no_plain_one(layout):
    x = torch.randn(2, 5, 3, 16, dtype=torch.bfloat16)
    y = layout(x)
    assert torch.equal(x, y) and y.stride(-1) == 1
    assert not (y.is_contiguous() and y.data_ptr() % 16 == 0)


@pytest.mark.parametrize("backend", CHIPS)
def test_a_shared_head_and_a_shared_gradient_have_stride_0(backend, seed):
    """k and v of one head for all, and the gradient of out.sum()."""
    problem = cases.make(CASE, seed)
    tensors = problem.tensors()
    shared = {name: x if name == "q" else x[:, :, :1].expand_as(x) for name, x in tensors.items()}
    ones = torch.ones((), dtype=CASE.dtype)
    with chip(backend, seed):
        got = _results(shared, ones.expand_as(problem.dout), backend)
        expected = _results(
            {name: x.contiguous() for name, x in shared.items()}, torch.ones_like(problem.dout), backend
        )
    assert all(torch.equal(a, b) for a, b in zip(got, expected)), f"seed {seed}"
