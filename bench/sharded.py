"""Attention over sequences that are split over ranks: its cases, who computes it, and the checks of their results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4
from fa4 import distributed as cp
from fa4.torch_ops.flops import unmasked_pairs

from .check import Judge
from .suites import BenchCase, made_tensors

KINDS = ("causal", "full", "packed", "window")
_PACKED = (2, 4, 8, 8)  # a packed sequence is one over so much of all tokens


@dataclasses.dataclass(frozen=True)
class ShardedCase(BenchCase):
    """lengths: of packed sequences, seqlen_q tokens in all."""

    lengths: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return "packed" if self.lengths else super().kind

    @property
    def flops(self) -> int:
        right = 0 if self.causal else None
        pairs = sum(unmasked_pairs(n, n, self.window, right) for n in self.lengths or (self.seqlen_q,))
        per_pair = (2 if self.direction == "fwd" else 5) * self.head_dim
        return 2 * self.batch * self.heads_q * pairs * per_pair

    def shortened(self, tokens: int) -> ShardedCase:
        """The same kind of case with at most so many tokens."""
        tokens = min(self.seqlen_q, tokens)
        lengths = tuple(n * tokens // self.seqlen_q for n in self.lengths)
        window = None if self.window is None else min(self.window, tokens // 4)
        return dataclasses.replace(self, seqlen_q=tokens, seqlen_k=tokens, lengths=lengths, window=window)

    def tensors(self, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """q, k, v and dout of all ranks: (batch, rows, heads, head_dim), or (rows, heads, head_dim) of packed ones."""
        tensors = made_tensors(self, device, seed)
        return tuple(x.detach()[0] for x in tensors) if self.lengths else tensors

    def bounds(self, device: torch.device) -> dict[str, Tensor]:
        """cu_seqlens, for packed sequences."""
        if not self.lengths:
            return {}
        return {"cu_seqlens": torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)}

    @property
    def axis(self) -> int:
        """Of rows."""
        return 0 if self.lengths else 1

    def shard(self, x: Tensor) -> Tensor:
        return cp.shard(x, dim=self.axis, **self.bounds(x.device))

    def unshard(self, x: Tensor) -> Tensor:
        return cp.unshard(x, dim=self.axis, **self.bounds(x.device))


def cases(kinds: str, heads: str, seqlens: str, head_dim: int, window: int) -> list[ShardedCase]:
    """Comma-separated lists; of each kind, all heads ("16/16": of queries and keys) and lengths.

    Raises:
        ValueError: a kind is unknown, or a number is none.
    """
    found = []
    for kind, of_heads, seqlen in itertools.product(kinds.split(","), heads.split(","), map(int, seqlens.split(","))):
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
        heads_q, heads_kv = (int(n) for n in of_heads.split("/"))
        lengths = tuple(seqlen // n for n in _PACKED) if kind == "packed" else ()
        for direction in ("fwd", "bwd"):
            shape = direction, 1, seqlen, seqlen, heads_q, heads_kv, head_dim, head_dim, kind != "full"
            found.append(ShardedCase(*shape, lengths=lengths, window=window if kind == "window" else None))
    return found


class Provider(NamedTuple):
    """attend: of q, k, v, a rank's parts or, of one GPU, all. within: what has to be entered around it, forward and
    backward. kinds: the kinds of cases that it computes."""

    name: str
    attend: Callable[[ShardedCase, Tensor, Tensor, Tensor], Tensor]
    within: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    whole: bool = False
    kinds: tuple[str, ...] = KINDS

    def takes(self, case: ShardedCase) -> bool:
        return case.kind.split()[0] in self.kinds


def providers(mesh: DeviceMesh, deterministic: bool) -> list[Provider]:
    def by_method(method: str, case: ShardedCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = dict(case.bounds(q.device), max_seqlen=max(case.lengths)) if case.lengths else {}
        window = {} if case.window is None else {"window_size": (case.window, None)}
        return cp.context_parallel_attention(
            q, k, v, causal=case.causal, method=method, deterministic=deterministic, **packed, **window
        )

    def alone(case: ShardedCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.lengths:
            bounds, longest = case.bounds(q.device)["cu_seqlens"], max(case.lengths)
            lengths = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest)
            return fa4.flash_attn_varlen_func(q, k, v, causal=case.causal, deterministic=deterministic, **lengths)
        window = (case.window, None)
        return fa4.flash_attn_func(q, k, v, causal=case.causal, window_size=window, deterministic=deterministic)

    def of_torch(case: ShardedCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=case.causal, **grouped).transpose(1, 2)

    plain = {"kinds": ("causal",)}  # torch balances causal sequences alone; its error leaves its context open
    return [
        Provider("fa4, one GPU", alone, whole=True),
        Provider("fa4 ring", functools.partial(by_method, "ring"), kinds=("causal", "full", "packed")),
        Provider("fa4 all-gather", functools.partial(by_method, "all-gather")),
        Provider("torch flash", of_torch, lambda: _in_torchs(mesh, SDPBackend.FLASH_ATTENTION), **plain),
        Provider("torch cuDNN", of_torch, lambda: _in_torchs(mesh, SDPBackend.CUDNN_ATTENTION), **plain),
        Provider("torch on fa4", of_torch, lambda: _in_torchs(mesh, SDPBackend.FLASH_ATTENTION, "fa4"), **plain),
    ]


@contextlib.contextmanager
def _in_torchs(mesh: DeviceMesh, kernels: SDPBackend, implementation: str | None = None) -> Iterator[None]:
    from torch.distributed.tensor.experimental import context_parallel

    of_lengths = torch.zeros(2 * mesh.size(), device=mesh.device_type)  # it wants something to cut
    with contextlib.ExitStack() as stack:
        if implementation is not None:
            torch.nn.attention.activate_flash_attention_impl(implementation)
            stack.callback(torch.nn.attention.restore_flash_attention_impl)
        stack.enter_context(sdpa_kernel(kernels))
        stack.enter_context(context_parallel(mesh, buffers=[of_lengths], buffer_seq_dims=[0]))
        yield


class Work(NamedTuple):
    """What a provider does with a case. results: as they lie on the ranks."""

    provider: Provider
    run: Callable[[], object]
    results: dict[str, Tensor]

    def within(self) -> contextlib.ExitStack:
        """The context of `run`."""
        stack = contextlib.ExitStack()
        stack.enter_context(self.provider.within())
        stack.enter_context(torch.set_grad_enabled("out" not in self.results))
        return stack


def work_of(provider: Provider, case: ShardedCase, tensors: tuple[Tensor, ...]) -> Work:
    """A forward, or a backward from a forward run once."""
    backward = case.direction == "bwd"
    parts = tensors if provider.whole else tuple(case.shard(x) for x in tensors)
    q, k, v = (x.detach().requires_grad_(backward) for x in parts[:3])
    with provider.within(), torch.set_grad_enabled(backward):
        out = provider.attend(case, q, k, v)
        if not backward:
            return Work(provider, lambda: provider.attend(case, q, k, v), {"out": out})

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (q, k, v), parts[3], retain_graph=True)

        return Work(provider, run, dict(zip(("dq", "dk", "dv"), run())))


def checked(work: Work, case: ShardedCase, tensors: tuple[Tensor, ...]) -> dict[str, dict[str, float]]:
    """Errors and what is allowed, by name; of packed sequences those of the one with the largest error.

    Raises:
        ArithmeticError: a result is wrong.
    """
    got = {n: x.detach() if work.provider.whole else case.unshard(x) for n, x in work.results.items()}
    judgements, first = [], 0
    for length in case.lengths or (case.seqlen_q,):
        rows = slice(first, first + length)
        one = dataclasses.replace(case, seqlen_q=length, seqlen_k=length)
        its_tensors = tuple(x[None, rows] for x in tensors) if case.lengths else tensors
        its_results = {name: x[None, rows] for name, x in got.items()} if case.lengths else got
        judgements += Judge(one, its_tensors).judgements(its_results)
        first += length
    wrong = [str(j) for j in judgements if not j.right]
    if wrong:
        raise ArithmeticError("wrong result: " + "; ".join(wrong))
    judgements.sort(key=lambda j: j.error)
    return {j.name: {"error": j.error, "allowed": j.allowed} for j in judgements}
