"""Ways in which a call's tensors lie in memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fa4.oracle import cases


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def padded(x: Tensor) -> Tensor:
    """A part of a larger buffer, whose other numbers are NaN or, where there is none, as large as can be."""
    if x.dtype is torch.float4_e2m1fn_x2:
        return padded(x.view(torch.uint8)).view(x.dtype)
    *lead, rows, heads, dim = x.shape
    nothing = torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).max
    buffer = torch.zeros(*lead, rows + 3, heads + 1, dim + 16, device=x.device).fill_(nothing).to(x.dtype)
    part = buffer[..., 2 : 2 + rows, :heads, :dim]
    return part.copy_(x)


def _unaligned(x: Tensor) -> Tensor:
    """One element past where vectors may begin."""
    if x.dtype is torch.float4_e2m1fn_x2:
        buffer = torch.full((x.numel() + 1,), 255, dtype=torch.uint8, device=x.device)
        return buffer[1:].view(x.shape).copy_(x.view(torch.uint8)).view(x.dtype)
    buffer = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    return buffer[1:].view(x.shape).copy_(x)


_LAID = {"contiguous": lambda x: x, "heads_first": _heads_first, "padded": padded, "unaligned": _unaligned}


def _expanded(x: Tensor) -> Tensor:
    """The same numbers for all sequences, or where sequences are packed for all heads."""
    axis = 0 if x.ndim == 4 else 1
    return x.narrow(axis, 0, min(1, x.shape[axis])).expand(x.shape) if x.shape[axis] else x


def laid_out(problem: cases.Problem, kind: str, generator: torch.Generator) -> cases.Problem:
    """The problem with its tensors so. Those that are expanded have other numbers."""
    i = problem.inputs
    if kind != "expanded":
        lay = _LAID[kind]
        return replace(problem, inputs=i._replace(q=lay(i.q), k=lay(i.k), v=lay(i.v)), dout=lay(problem.dout))
    dout = torch.randn((), generator=generator).to(problem.dout.device, problem.dout.dtype).expand(problem.dout.shape)
    if i.seqused_k is not None:  # rows of one sequence that another does not use are NaN
        return replace(problem, dout=dout)
    return replace(problem, inputs=i._replace(k=_expanded(i.k), v=_expanded(i.v)), dout=dout)
