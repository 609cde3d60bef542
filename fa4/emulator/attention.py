"""Attention of a package on a few emulated multiprocessors, timed: what `predict` extends to a whole chip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from warpcheck.context import emulate
from warpcheck.machine import Checks
from warpcheck.machine.record import Record

from fa4.emulator import cudnn
from fa4.oracle.cases import in_blocks
from fa4.runtime import dispatch
from fa4.runtime.device import Chip, chip_of
from fa4.runtime.spec import AttentionInputs, AttentionSpec, Operands, ProblemSize, Saved
from fa4.torch_ops import run
from fa4.torch_ops.descales import Descales, ones, operand_factors
from fa4.torch_ops.low_precision import Precision

Attend = Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]


@dataclass(frozen=True)
class Problem:
    """direction: "fwd" or "bwd". operands: e4m3 or e2m1 q, k and v; None for bfloat16. keys: of a sequence, if they are
    not as many as its queries."""

    direction: str
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    head_dim_v: int
    causal: bool
    deterministic: bool = False
    operands: Operands | None = None
    keys: int | None = None

    @property
    def pairs(self) -> float:
        """Visible pairs of a query and a key, over all heads. A causal mask is aligned to the end of both sides."""
        keys = self.seqlen if self.keys is None else self.keys
        of_head = self.seqlen * (keys - (self.seqlen - 1) / 2) if self.causal else float(self.seqlen) * keys
        return self.batch * self.heads * of_head

    @property
    def flops(self) -> float:
        """Over the visible pairs."""
        columns = self.head_dim + self.head_dim_v
        if self.direction == "bwd":
            columns = 3 * self.head_dim + 2 * self.head_dim_v
        return 2.0 * self.pairs * columns


class Shape(NamedTuple):
    """What is emulated: one sequence."""

    queries: int
    keys: int
    heads: int


@dataclass(frozen=True)
class Package:
    """attend: q, k, v, causal, deterministic -> out. options: of `emulate`. exchanged: by head dim, bytes for each pair
    of a query and a key that each main kernel of the backward writes to device memory, or reads from there. kernels_of:
    the context in which short launches take the kernels of a sequence length, which differ from `long` tokens on."""

    attend: Attend
    options: dict[str, Any] = field(default_factory=dict)
    exchanged: dict[int, tuple[int, ...]] = field(default_factory=dict)
    kernels_of: Callable[[int], AbstractContextManager[Any]] = nullcontext
    long: int | None = None


def _fa4(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool, precision: Precision | None = None
) -> Tensor:
    import fa4

    return fa4.flash_attn_func(q, k, v, causal=causal, deterministic=deterministic, precision=precision)


def _of_blocks(q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool) -> Tensor:
    """Our forward on e4m3 tensors with scales of blocks, all of them 1."""
    import fa4

    descales = ones(AttentionInputs(q, k, v), Operands.MXFP8)
    return fa4.flash_attn_func(q, k, v, causal=causal, **descales._asdict())


def _in_e2m1(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Descales]:
    """q, k and v in NVFP4."""
    tensors, scales = zip(*in_blocks("nvfp4", q, k, v))
    return tensors, Descales(*scales)


def _of_e2m1(q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool) -> Tensor:
    """Our forward on tensors in NVFP4."""
    import fa4

    tensors, descales = _in_e2m1(q, k, v)
    return fa4.flash_attn_func(*tensors, causal=causal, **descales._asdict())


def _flash_attn_4(q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool) -> Tensor:
    from flash_attn.cute.interface import flash_attn_func

    try:
        out = flash_attn_func(q, k, v, causal=causal, deterministic=deterministic)
    except AssertionError as error:  # how it refuses head dims
        raise ValueError(str(error)) from None
    return out[0] if isinstance(out, tuple) else out


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool) -> Tensor:
    return cudnn.Attention.apply(q, k, v, causal)


# Host code of other packages asks where tensors are, and flash-attn-4 initialises a barrier twice.
_FOREIGN = {"tells_devices_apart": True, "on_finding": "collect"}
PACKAGES = {
    "fa4": Package(_fa4),
    "flash-attn-4": Package(_flash_attn_4, _FOREIGN),
    # Its backward writes dS in 16 bits; matrix products over dS are dK and dQ. Head dims above 256: also S, for dV.
    "cudnn-frontend": Package(
        _cudnn, _FOREIGN, {256: (2, 2, 2), 512: (4, 2, 2, 2)}, kernels_of=cudnn.kernels_of, long=cudnn.LONG
    ),
}


def spec_of(problem: Problem) -> AttentionSpec:
    """What our kernels are asked for."""
    return AttentionSpec(
        torch.bfloat16, problem.head_dim, problem.head_dim_v, problem.heads, problem.heads, problem.head_dim**-0.5,
        window_right=0 if problem.causal else None, deterministic=problem.deterministic,
        needs_backward=problem.direction == "bwd", operands=problem.operands,
    )  # fmt: skip


def own_plan(problem: Problem, chip: Chip, queries: int, keys: int, tiles: Any = None, backend: str = "auto") -> Any:
    """Return our plan. tiles: a row of the table of the problem's direction, instead of the problem's own."""
    what = spec_of(problem), ProblemSize(problem.batch, queries, keys), chip
    plan: Any = dispatch.plan(*what, backend)
    if tiles is None:
        return plan
    if problem.direction == "fwd":
        return type(plan)(*what, forward_tiles=tiles)
    made = type(plan)(*what)
    made.take_backward(SimpleNamespace(_backward=type(plan._backward)(*what, tiles)))
    return made


def _call(problem: Problem, tiles: Any, backend: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[AttentionInputs, Any]:
    """Return the arguments of `run`, and our plan of one sequence with the given row of the table."""
    problem = replace(problem, batch=1, heads=q.shape[2])
    inputs = AttentionInputs(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    return inputs, own_plan(problem, chip_of(q.device), q.shape[1], k.shape[1], tiles, backend)


def _forward_of_plan(problem: Problem, tiles: Any, backend: str = "auto") -> Attend:
    """Our forward with a row of its table that another extent would not get."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool) -> Tensor:
        inputs, plan = _call(problem, tiles, backend, q, k, v)
        operands, descales = plan.spec.operands, Descales()
        if operands is Operands.NVFP4:
            (q, k, v), descales = _in_e2m1(q, k, v)
            inputs = inputs._replace(q=q, k=k, v=v)
        factors = None if operands is None else operand_factors(inputs, descales, operands)
        return run.forward(inputs, plan.spec, plan, cache=factors)[0]

    return attend


def _backward_of_plan(
    problem: Problem, tiles: Any, backend: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> None:
    """Run our backward with a row of its table, after any forward: values take no time."""
    inputs, plan = _call(problem, tiles, backend, q, k, v)
    lse = torch.full((1, q.shape[2], q.shape[1]), 8.0)
    run.backward(inputs, plan.spec, plan, Saved(torch.randn_like(dout), lse, dout))


@functools.lru_cache(maxsize=64)
def recorded(
    chip: str, package: str, problem: Problem, sms: int, shape: Shape, tiles: Any = None, backend: str = "auto"
) -> tuple[Record, ...]:
    """Each launch of the problem's direction. Of `problem` its batch and heads do not matter, and its seqlen only if
    the package has kernels for long sequences. tiles: row of our table of the direction [default: the shape's].
    backend: ours, with tiles."""
    attend, extra = PACKAGES[package].attend, PACKAGES[package].options
    if tiles is not None and problem.direction == "fwd":
        attend = _forward_of_plan(problem, tiles, backend)
    generator = torch.Generator().manual_seed(0)
    is_backward = problem.direction == "bwd"
    if is_backward and problem.operands is not None:
        attend = functools.partial(_fa4, precision="fp8" if problem.operands is Operands.E4M3 else "mxfp8")
    elif problem.operands is Operands.MXFP8 and package == "fa4":
        attend = _of_blocks
    elif problem.operands is Operands.NVFP4 and package == "fa4" and tiles is None:
        attend = _of_e2m1
    options = {"sms": sms, "checks": Checks(races=False, poison=False), **extra}

    def normal(seqlen: int, columns: int) -> Tensor:
        is_8bit = problem.operands is not None and problem.operands.bits == 8 and not is_backward
        dtype = torch.float8_e4m3fn if is_8bit else torch.bfloat16
        made = torch.randn(1, seqlen, shape.heads, columns, generator=generator).to(dtype)
        return (made.cuda() if extra else made).requires_grad_(is_backward)

    if is_backward and tiles is not None:
        with emulate(chip, timing=True, **options) as gpu:
            q, k = normal(shape.queries, problem.head_dim), normal(shape.keys, problem.head_dim)
            v, dout = normal(shape.keys, problem.head_dim_v), normal(shape.queries, problem.head_dim_v)
            _backward_of_plan(problem, tiles, backend, *(x.detach() for x in (q, k, v, dout)))
        return tuple(launch.record for launch in gpu.launches if launch.record is not None)
    with emulate(chip, timing=not is_backward, **options) as gpu:
        q, k = normal(shape.queries, problem.head_dim), normal(shape.keys, problem.head_dim)
        v = normal(shape.keys, problem.head_dim_v)
        out = attend(q, k, v, problem.causal, problem.deterministic)
        dout = torch.ones_like(out)
    if is_backward:
        with emulate(chip, timing=True, **options) as gpu, PACKAGES[package].kernels_of(problem.seqlen):
            torch.autograd.grad(out, (q, k, v), dout)
    return tuple(launch.record for launch in gpu.launches if launch.record is not None)
