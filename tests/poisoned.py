"""Memory and rows that nothing may depend on, filled with NaN."""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import torch

from fa4.oracle import cases

_POISON_BYTE = 0x5A  # as int32 1,515,870,810: no length, index or offset of any test


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a fresh tensor with NaN; integers with a pattern that no computation gives, bool with True."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    with torch.no_grad():
        values = tensor.detach()
        if tensor.dtype is torch.float4_e2m1fn_x2:  # it has no NaN, and torch cannot fill it
            values = values.view(torch.uint8)
        if values.dtype.is_floating_point or values.dtype.is_complex:
            values.fill_(torch.nan)
        elif values.dtype is torch.bool:
            values.fill_(True)
        else:
            values.fill_(int.from_bytes(bytes([_POISON_BYTE]) * tensor.element_size(), "little"))
    return tensor


def _poisoning(allocate):
    @functools.wraps(allocate)
    def allocate_and_poison(*args, **kwargs):
        return poison(allocate(*args, **kwargs))

    return allocate_and_poison


@contextlib.contextmanager
def fresh_memory_is_poison() -> Iterator[None]:
    """`torch.empty` and its like, and the allocation call that fa4.runtime.memory makes, give poison."""
    places = [(torch, name) for name in ("empty", "empty_like", "empty_strided")] + [(torch.Tensor, "new_empty")]
    guards = getattr(torch._C._dynamo, "guards", None)
    if hasattr(guards, "_empty_strided_cuda"):
        places.append((guards, "_empty_strided_cuda"))
    with contextlib.ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, _poisoning(getattr(owner, name))))
        yield


def poison_unused(problem: cases.Problem) -> cases.Problem:
    """Fill rows that no sequence uses with NaN: they must not reach any result."""
    i = problem.inputs
    for x, used, starts in (
        (i.q, i.seqused_q, i.cu_seqlens_q),
        (i.k, i.seqused_k, i.cu_seqlens_k),
        (i.v, i.seqused_k, i.cu_seqlens_k),
    ):
        for b, count in enumerate([] if used is None else used.tolist()):
            if starts is None:
                x[b, count:] = torch.nan
            else:
                x[starts[b] + count : starts[b + 1]] = torch.nan
    return problem


def poison_past_the_end(problem: cases.Problem) -> cases.Problem:
    """The same of packed rows that follow the last sequence."""
    i = problem.inputs
    for x, starts in ((i.q, i.cu_seqlens_q), (i.k, i.cu_seqlens_k), (i.v, i.cu_seqlens_k)):
        if starts is not None:
            x[int(starts[-1]) :] = torch.nan
    return problem
