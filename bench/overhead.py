"""python -m bench.overhead: what one call costs on the host, on shapes too small to keep a GPU busy.

Rows of host time per call, forward without gradients: the public calls, the part of the dense one behind checks and
choice, its kernel launch alone (inputs prepared, outputs allocated), and torch's scaled_dot_product_attention, on its
own flash attention and on fa4. Of forward and backward the same, and what torch's autograd takes for an operator of
three inputs that does nothing but allocate. They take turns, for the clock of a host changes from second to second.
Then calls that differ each time, beside the same ones repeated: decoding with growing lengths, packed batches, and
functions that capture another number. Then the first call of a fresh process, with an empty and with a filled disk
cache. Without a GPU, calls of fa4 whose kernels are loaded but not launched. Rows go to --out.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4
from fa4.runtime import dispatch
from fa4.runtime.device import chip_of
from fa4.runtime.plan import Plan
from fa4.runtime.spec import AttentionInputs, AttentionSpec, Flags, Gradients, Saved
from fa4.torch_ops import run

from . import machine
from .timing import Timing
from .without_gpu import loaded_only

_FIRST_CALL = """
import time, torch
q = torch.randn(1, 128, 1, 64, device="cuda", dtype=torch.bfloat16); torch.cuda.synchronize()
start = time.perf_counter(); import fa4; imported = time.perf_counter()
fa4.flash_attn_func(q, q, q); torch.cuda.synchronize()
print(imported - start, time.perf_counter() - imported)
"""


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


_Context = Callable[[], contextlib.AbstractContextManager]


def host_times(
    rows: dict[str, Callable[[], object]],
    calls: int = 200,
    rounds: int = 30,
    within: dict[str, _Context] | None = None,
) -> dict[str, Timing]:
    """Milliseconds per call until the host is free again, of rows that take turns; each turn begins with an idle
    device, and for rows in `within` inside that context, a few calls old."""
    # Without a GPU there is one thread, whose own time does not depend on other processes.
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    contexts = {name: (within or {}).get(name, contextlib.nullcontext) for name in rows}
    samples: dict[str, list[float]] = {name: [] for name in rows}
    for name, function in rows.items():
        with contexts[name]():
            for _ in range(calls):
                function()
    for _ in range(rounds):
        for name, function in rows.items():
            with contexts[name]():
                for _ in range(5):
                    function()
                _wait()
                start = clock()
                for _ in range(calls):
                    function()
                samples[name].append(1000 * (clock() - start) / calls)
    return {name: Timing.of(of_row) for name, of_row in samples.items()}


@contextlib.contextmanager
def _fa4_beneath_torch() -> Iterator[None]:
    torch.nn.attention.activate_flash_attention_impl("fa4")
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@contextlib.contextmanager
def _fa4_trained_beneath_torch() -> Iterator[None]:
    with torch.enable_grad(), _fa4_beneath_torch():
        yield


def _launch_alone(inputs: AttentionInputs, plan: Plan) -> Callable[[], object]:
    out, lse = torch.empty_like(inputs.q), torch.empty(1, 1, 1, device=inputs.q.device)
    return lambda: plan.forward(inputs, out, lse)


class _Allocates(torch.autograd.Function):
    """An operator that does nothing, with the results and the gradients of attention."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), q.new_empty(1, 1, 1, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def _forward_and_backward(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Rows of forward and backward; the last is torch's, on whatever kernels."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    flat = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]
    dout, flat_dout = torch.randn_like(q), torch.randn_like(flat[0])
    inputs = AttentionInputs(*(x.detach() for x in leaves), max_seqlen_q=1, max_seqlen_k=1)
    spec = AttentionSpec.of(inputs, Flags(0.125, window_right=0, needs_backward=True))
    plan = dispatch.plan(spec, inputs.extent, chip_of(q.device))
    forward = run.ForwardExecutor(inputs, spec, plan)
    saved = Saved(*forward(inputs), dout)
    grads = Gradients(*(torch.empty_like(x) for x in (q, k, v)))

    def ours() -> None:
        torch.autograd.grad(fa4.flash_attn_func(*leaves, causal=True), leaves, dout)

    def behind() -> None:
        forward(inputs)
        run.backward(inputs, spec, plan, saved)

    def launches() -> None:
        plan.forward(inputs, saved.out, saved.lse)
        plan.backward(inputs, saved, grads)

    def autograd() -> None:
        torch.autograd.grad(_Allocates.apply(*leaves), leaves, dout)

    def torch_s() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(*flat), flat, flat_dout)

    rows = {"fa4.flash_attn_func": ours, "run.Forward, run.backward": behind, "plan.forward, plan.backward": launches}
    rows |= {"autograd of an empty operator": autograd, "scaled_dot_product_attention (flash)": torch_s}
    return {f"{name}, forward and backward": row for name, row in rows.items()}


_DIFFERENT = 8000  # calls of a row that all differ; more than a measurement makes


def changing_calls(device: str) -> dict[str, Callable[[], object]]:
    """Rows of calls that repeat, and of the same ones that differ each time. Tensors are made in advance."""
    q, cache = torch.randn(1, 1, 2, 64), torch.randn(2, 1, _DIFFERENT + 64, 2, 64)
    q, cache = q.to(device, torch.bfloat16), cache.to(device, torch.bfloat16)
    lengths = range(64, 64 + _DIFFERENT)
    growing = iter([cache[:, :, :n].unbind() for n in lengths])
    same, few = (cache[:, :, :n].unbind() for n in (2000, 64))
    used = torch.tensor([100], device=device, dtype=torch.int32)
    rng = random.Random(0)

    def packed() -> tuple[Tensor, Tensor, int]:
        sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
        ends = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32).to(device)
        return cache[0, 0, : sum(sizes)], ends, max(sizes)

    batches = [packed() for _ in range(_DIFFERENT)]
    different = iter(batches)

    def with_number(slope: float) -> object:
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + slope * (kv_idx - q_idx)

        return fa4.flash_attn_func(q, *few, score_mod=score_mod)

    def varlen(x: Tensor, ends: Tensor, longest: int) -> object:
        return fa4.flash_attn_varlen_func(
            x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )

    numbers = itertools.count()
    return {
        "decode, k and v as before": lambda: fa4.flash_attn_func(q, *same, causal=True),
        "decode, k and v with one more row": lambda: fa4.flash_attn_func(q, *next(growing), causal=True),
        "decode from a cache": lambda: fa4.flash_attn_with_kvcache(q, *cache, cache_seqlens=used, causal=True),
        "packed, the same batch": lambda: varlen(*batches[0]),
        "packed, another batch": lambda: varlen(*next(different)),
        "function, the same number": lambda: with_number(0.5),
        "function, another number": lambda: with_number(next(numbers) / 8),
    }


def _first_call(cache: str) -> tuple[float, float]:
    """Seconds of `import fa4` and of the first call after it, in a fresh process."""
    environment = {**os.environ, "FA4_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_CALL], capture_output=True, text=True, check=True, env=environment
    )
    imported, called = done.stdout.split()
    return float(imported), float(called)


@click.command(help=__doc__)
@click.option("--out", default=None, type=click.Path(dir_okay=False), help="File that rows are added to, JSON lines.")
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(3), help="Of 200 calls of each row.")
@click.option("--first-call/--no-first-call", default=True, show_default=True, help="Also of fresh processes.")
def main(out: str | None, rounds: int, first_call: bool) -> None:
    has_gpu = torch.cuda.is_available()
    with contextlib.nullcontext() if has_gpu else loaded_only():
        times = _all_rows("cuda" if has_gpu else "cpu", rounds)
    device = torch.cuda.get_device_name() if has_gpu else "no GPU: kernels for sm_90 are not launched"
    table = Table("call", "median us", "quartiles us", title=f"host time, {device}, torch {torch.__version__}")
    facts = dict(device=device, torch=torch.__version__, cpu=machine.cpu_name(), commit=machine.commit())
    for name, t in times.items():
        if out:
            with Path(out).open("a") as file:
                row = dict(call=name, **asdict(t)) | facts | dict(date=f"{datetime.date.today()}")
                file.write(json.dumps(row) + "\n")
        table.add_row(name, f"{1000 * t.median_ms:.1f}", f"{1000 * t.q25_ms:.1f} to {1000 * t.q75_ms:.1f}")
    console = Console(width=100)
    console.print(table)
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty cache", "filled cache") if first_call and has_gpu else ():
            imported, called = _first_call(cache)
            console.print(f"first call of a process, {name}: import fa4 {imported:.2f} s, call {called:.2f} s")


def _all_rows(device: str, rounds: int) -> dict[str, Timing]:
    """Return the times of all rows; on a CPU, of fa4's."""
    q, k, v = (torch.randn(1, 1, 1, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    flat = [x.transpose(1, 2) for x in (q, k, v)]
    inputs = AttentionInputs(q, k, v, max_seqlen_q=1, max_seqlen_k=1)
    spec = AttentionSpec.of(inputs, Flags(0.125, window_right=0))
    plan = dispatch.plan(spec, inputs.extent, chip_of(q.device))
    forward = run.ForwardExecutor(inputs, spec, plan)
    packed, ends = [x[0] for x in (q, k, v)], torch.tensor([0, 1], device=device, dtype=torch.int32)

    def varlen() -> None:
        fa4.flash_attn_varlen_func(
            *packed, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=1, max_seqlen_k=1, causal=True
        )

    def torch_flash() -> None:
        F.scaled_dot_product_attention(*flat)

    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        rows = {
            "fa4.flash_attn_func": lambda: fa4.flash_attn_func(q, k, v, causal=True),
            "run.Forward": lambda: forward(inputs),
            "plan.forward": _launch_alone(inputs, plan),
            "fa4.flash_attn_varlen_func": varlen,
            "scaled_dot_product_attention (flash)": torch_flash,
        }
        rows |= changing_calls(device)
        back = _forward_and_backward(q, k, v)
        rows |= back
        within: dict[str, _Context] = dict.fromkeys(back, torch.enable_grad)
        if device == "cpu":  # where torch's kernels compute
            rows = {name: row for name, row in rows.items() if not name.startswith("scaled_dot")}
        elif hasattr(torch.nn.attention, "register_flash_attention_impl"):
            fa4.register_sdpa()
            rows["scaled_dot_product_attention (fa4)"] = torch_flash
            rows["scaled_dot_product_attention (fa4), forward and backward"] = [*back.values()][-1]
            within["scaled_dot_product_attention (fa4)"] = _fa4_beneath_torch
            within["scaled_dot_product_attention (fa4), forward and backward"] = _fa4_trained_beneath_torch
        return host_times(rows, rounds=rounds, within=within)


if __name__ == "__main__":
    main()
