"""python -m tests.gpu.residency CONDITION: attention with part of the SMs, compared with the results of a whole chip.

    green N      on a stream of a green context of N SMs
    polls N      beside a kernel that holds N SMs and polls until the attention has ended
    streams      two backwards at a time, on streams of different priority, many times, with many heads and with few
    compile D    compiles the kernels of head_dim D for the others

A line of JSON for each case: its name, its time alone and there in ms, and what differs ("" if nothing).
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import fa4
from bench.held import Holder

HEAD_DIMS = (64, 96, 128, 192, 256)
SEQLEN = 132 * 128  # a key block of 128 for each SM of an H100
HEADS, FEW_HEADS = 8, 2  # without a mask an ordered backward of few heads adds to several sums of dQ
REPEATS, FEW_REPEATS = 200, 50
PLAIN = [
    f"{head_dim} {mask} {order}"
    for head_dim in HEAD_DIMS
    for mask in ("full", "causal")
    for order in ("default", "deterministic")
]
CASES = [*PLAIN, *(f"128 {kind} deterministic" for kind in ("group", "packed", "blocks"))]
IN_STREAMS = {f"{name}, {heads} heads": (name, heads) for heads in (HEADS, FEW_HEADS) for name in CASES}
SPLIT = "split keys"
TOLERANCE = 1e-2  # of a gradient's norm, where additions have no order


class Call:
    """One attention with gradients. Its name has three parts: head_dim; full, causal, or causal with a group of query
    heads, with packed sequences or by a block mask; default or deterministic."""

    def __init__(self, name: str, heads: int = HEADS) -> None:
        head_dim, kind, order = name.split()
        heads_kv = max(heads // 4, 1) if kind == "group" else heads
        generator = torch.Generator("cuda").manual_seed(7)
        leading = (SEQLEN,) if kind == "packed" else (1, SEQLEN)
        *self.qkv, self.dout = (
            torch.randn(*leading, n, int(head_dim), device="cuda", dtype=torch.bfloat16, generator=generator)
            for n in (heads, heads_kv, heads_kv, heads)
        )
        self.qkv = [x.requires_grad_() for x in self.qkv]
        self.attend: Callable[..., torch.Tensor] = fa4.flash_attn_func
        self.flags: dict[str, Any] = {"deterministic": True if order == "deterministic" else None}
        if kind == "blocks":
            self.flags["block_mask"] = fa4.create_block_mask(fa4.masks.causal, 1, 1, SEQLEN, SEQLEN, device="cuda")
        else:
            self.flags["causal"] = kind != "full"
        if kind == "packed":
            self.attend = fa4.flash_attn_varlen_func
            lengths = torch.tensor([0, SEQLEN // 3, 90, 0, SEQLEN - SEQLEN // 3 - 90])
            begins, longest = lengths.cumsum(0).int().to("cuda"), int(lengths.max())
            self.flags |= {"cu_seqlens_q": begins, "cu_seqlens_k": begins}
            self.flags |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        self.is_ordered = "lower launch index" in fa4.explain(*self.qkv, **self.flags).progress
        self.out: torch.Tensor | None = None

    def forward(self) -> None:
        """The backward runs on the stream of the forward."""
        self.out = self.attend(*self.qkv, **self.flags)

    def run(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.out, self.qkv, self.dout, retain_graph=True)


class Split:
    """One row of queries for each of two sequences, their keys in parts."""

    is_ordered = True

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(7)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        self.given = normal(2, 1, 8, 128), normal(2, SEQLEN, 8, 128), normal(2, SEQLEN, 8, 128)

    def forward(self) -> None: ...

    def run(self) -> tuple[torch.Tensor, ...]:
        return (fa4.flash_attn_with_kvcache(*self.given, num_splits=33),)


def made(name: str) -> Call | Split:
    return Split() if name == SPLIT else Call(name)


def timed(run: Callable[[], tuple], stream: torch.cuda.Stream) -> tuple[float, tuple]:
    stream.synchronize()
    started = time.perf_counter()
    results = run()
    stream.synchronize()
    return (time.perf_counter() - started) * 1e3, results


def difference(call: Call | Split, found: tuple, expected: tuple) -> str:
    for which, a, b in zip(("dq", "dk", "dv"), found, expected):
        if call.is_ordered and not torch.equal(a, b):
            return f"{which} has other bits in {int((a != b).sum())} places"
        error = float((a.double() - b.double()).norm() / b.double().norm())
        if not error < TOLERANCE:
            return f"{which} is off by {error:.2e}"
    return ""


def say(name: str, alone: float, there: float, what: str) -> None:
    print(json.dumps([name, round(alone, 3), round(there, 3), what]), flush=True)


def alone(call: Call | Split) -> tuple[float, tuple]:
    """The shortest of three times, and results."""
    call.forward()
    runs = [timed(call.run, torch.cuda.current_stream()) for _ in range(3)]
    return min(took for took, _ in runs), runs[-1][1]


def green(sms: int) -> None:
    from torch.cuda.green_contexts import GreenContext

    calls = {name: made(name) for name in (*CASES, SPLIT)}
    expected = {name: alone(call) for name, call in calls.items()}
    torch.cuda.synchronize()
    context = GreenContext.create(num_sms=sms, device_id=0)
    context.set_context()
    stream = context.Stream() if hasattr(context, "Stream") else torch.cuda.Stream()
    for name, call in calls.items():
        with torch.cuda.stream(stream):
            call.forward()
            there, found = timed(call.run, stream)
        say(name, expected[name][0], there, difference(call, found, expected[name][1]))


def polls(sms: int) -> None:
    holder, own = Holder(), torch.cuda.Stream()
    for name in (*CASES, SPLIT):
        call = made(name)
        took, expected = alone(call)
        with torch.cuda.stream(own):  # all memory and kernels are there before SMs are held
            call.forward()
            call.run()
            with holder.holding(sms):
                started = time.perf_counter()
                found = call.run()
                own.synchronize()
                there = (time.perf_counter() - started) * 1e3
        say(name, took, there, difference(call, found, expected))


def streams() -> None:
    """Each of the two has as many key blocks as an H100 has SMs, or more."""
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    for title, (name, heads) in IN_STREAMS.items():
        call = Call(name, heads)
        repeats = REPEATS if call.is_ordered and heads == HEADS else FEW_REPEATS
        took, expected = alone(call)
        torch.cuda.synchronize()
        started, what = time.perf_counter(), ""
        for i in range(repeats):
            found = []
            for stream in (low, high) if i % 2 else (high, low):
                with torch.cuda.stream(stream):
                    call.forward()
                    found.append(call.run())
            if i % 20 == 0:
                torch.cuda.synchronize()
                what = what or "".join(difference(call, x, expected) for x in found)
        torch.cuda.synchronize()
        say(title, took, (time.perf_counter() - started) * 1e3 / (2 * repeats), what)


def compile_for(head_dim: int) -> None:
    for name in CASES:
        if name.split()[0] == str(head_dim):
            alone(Call(name))
            alone(Call(name, FEW_HEADS))
    if head_dim == 128:
        alone(Split())
    torch.cuda.synchronize()


if __name__ == "__main__":
    kind, *number = sys.argv[1:]
    {"green": green, "polls": polls, "streams": streams, "compile": compile_for}[kind](*map(int, number))
