"""python -m bench.fp8: forwards on e4m3 tensors beside those on bfloat16 tensors with the same numbers, and beside
cuDNN's on e4m3 tensors, if nvidia-cudnn-frontend is installed.

All take turns, as CUDA graphs, with a cold L2. Errors are relative, of 256 queries of a head against float64. cuDNN
returns e4m3 numbers, so its error has their rounding, too.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

import fa4

from . import machine
from .check import what_failed
from .suites import BenchCase, made_tensors, square
from .timing import captured, measure_in_turns

E4M3 = torch.float8_e4m3fn
QUERIES = 256  # of which the error is told
LARGEST_P = 256.0  # factor on P in cuDNN's product

CASES = (
    *(square("fwd", seqlen, 128, causal) for causal in (False, True) for seqlen in (1024, 4096, 16384)),
    square("fwd", 16384, 128, False, heads=32, heads_kv=8),
    square("fwd", 65536, 128, False, heads=4),
    *(square("fwd", 4096, 64, causal) for causal in (False, True)),
    square("fwd", 16384, 64, False),
    *(square("fwd", seqlen, 256, causal) for causal in (False, True) for seqlen in (4096, 16384)),
)


class Call(NamedTuple):
    """A provider's call, its result, and the function that holds its tensors."""

    run: Callable[[], object]
    out: Callable[[], Tensor]
    function: Callable[[], object]


def _graphed(function: Callable[[], Any]) -> Call:
    """The call as a graph."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    replay, result = captured(function)
    return Call(replay, lambda: result, function)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    import cudnn

    float32, e4m3 = cudnn.data_type.FLOAT, cudnn.data_type.FP8_E4M3
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(handle=handle, io_data_type=e4m3, intermediate_data_type=float32, compute_data_type=float32)

    def heads_first(x: Tensor) -> dict[str, Any]:
        return {"dim": [x.shape[i] for i in (0, 2, 1, 3)], "stride": [x.stride(i) for i in (0, 2, 1, 3)]}

    operands = [graph.tensor(**heads_first(x), data_type=e4m3) for x in (q, k, v)]
    names = "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"
    factors = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=float32) for name in names}
    out, stats, *largest = graph.sdpa_fp8(
        **dict(zip("qkv", operands)), **factors, is_inference=False, attn_scale=q.shape[-1] ** -0.5,
        use_causal_mask=causal,
    )  # fmt: skip
    batch, rows, heads, _ = q.shape
    memory = torch.empty(batch, rows, heads, v.shape[-1], device=q.device, dtype=E4M3)
    lse = torch.empty(batch, heads, rows, 1, device=q.device)
    scalars = [torch.zeros(1, 1, 1, 1, device=q.device) for _ in largest]
    layout = heads_first(memory)
    out.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"]).set_data_type(e4m3)
    for x, y in zip((stats, *largest), (lse, *scalars)):
        x.set_output(True).set_dim(list(y.shape)).set_stride(list(y.stride())).set_data_type(float32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    ones = dict.fromkeys(names, 1.0) | {"scale_s": LARGEST_P, "descale_s": 1 / LARGEST_P}
    given = {factors[name]: torch.full((1, 1, 1, 1), x, device=q.device) for name, x in ones.items()}
    given |= dict(zip((*operands, out, stats, *largest), (q, k, v, memory, lse, *scalars)))
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device=q.device, dtype=torch.uint8)

    def run() -> Tensor:  # holds the graph, the factors and the workspace
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(given, workspace)
        return memory

    return _graphed(run)


def _calls(case: BenchCase, seed: int) -> tuple[dict[str, Call], tuple[Tensor, ...]]:
    q, k, v, _ = made_tensors(case, torch.device("cuda"), seed)
    eight = [x.to(E4M3) for x in (q, k, v)]
    same = [x.bfloat16() for x in eight]
    attend = functools.partial(fa4.flash_attn_func, causal=case.causal)
    calls = {
        "fa4, bfloat16": _graphed(functools.partial(attend, *same)),
        "fa4, e4m3": _graphed(functools.partial(attend, *eight)),
    }
    if importlib.util.find_spec("cudnn") is not None:
        q8, k8, v8 = eight
        try:
            calls["cudnn, e4m3"] = _cudnn(q8, k8, v8, case.causal)
        except Exception as error:  # it refuses chips and shapes by errors of several types
            click.echo(f"{case.label:44s} cudnn, e4m3 is skipped: {what_failed(error)}")
    return calls, (same[0], same[1], same[2])


def _exact(case: BenchCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last queries of the first head, in float64."""
    q, k, v = (x[:1, :, :1].double() for x in (q[:, -QUERIES:], k, v))
    return fa4.flash_attn_func(q, k, v, causal=case.causal, backend="torch")


def rows(seconds: float, pattern: str, seed: int) -> list[dict[str, Any]]:
    """Measure every case."""
    facts = machine.facts(torch.device("cuda"))
    if importlib.util.find_spec("cudnn") is not None:
        facts["versions"]["nvidia-cudnn-frontend"] = importlib.metadata.version("nvidia-cudnn-frontend")
    made = []
    for case in CASES:
        if pattern not in case.label:
            continue
        calls, tensors = _calls(case, seed)
        exact = _exact(case, *tensors)
        times = measure_in_turns(
            {name: call.run for name, call in calls.items()}, torch.device("cuda"), seconds=seconds
        )
        for name, time in times.items():
            got = calls[name].out()[:1, -QUERIES:, :1].double()
            error = float((got - exact).norm() / exact.norm())
            tflops = case.flops / time.median_ms / 1e9
            made.append(
                {"suite": "fp8", "machine": facts, "provider": name, "label": case.label, "tflops": tflops,
                 "error": error, "median_ms": time.median_ms, "q25_ms": time.q25_ms, "q75_ms": time.q75_ms,
                 "repeats": time.repeats, "seed": seed}
            )  # fmt: skip
            click.echo(f"{case.label:44s} {name:14s} {time.median_ms:7.3f} ms {tflops:5.0f} TFLOP/s error {error:.1e}")
    return made


@click.command(help=__doc__)
@click.option("--seconds", default=0.3, show_default=True, help="For each time.")
@click.option("--only", "pattern", default="", help="Cases whose label has this text.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Add rows to a file, lines of JSON.")
def main(seconds: float, pattern: str, seed: int, output: Path | None) -> None:
    if not torch.cuda.is_available():
        raise click.UsageError("needs a CUDA device")
    found = rows(seconds, pattern, seed)
    if output is not None:
        with output.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()
