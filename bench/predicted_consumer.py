"""Consumer Blackwell: predictions beside published results.

python -m bench.predicted_consumer --gpu GB10 --out FILE appends the rows of a GPU (flash-attn-4 caches the chip of a
process). python -m bench.predicted_consumer FILE prints the tables of docs/results/predicted-consumer.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from warpcheck.timing.chips import GPUS

from fa4.emulator.attention import Problem
from fa4.emulator.predict import predict

from .predicted_pages import page_command
from .suites import BenchCase

KERNELS = {"flash-attn-4": ("flash-attn-4", "auto"), "fa4 sm80": ("fa4", "sm80")}  # name -> package and backend
_FA4_PULL = "flash-attention, pull request {}"
_FLASHINFER = "flashinfer, pull request 3897"


@dataclasses.dataclass(frozen=True)
class Published:
    """A published result. kernel: what was timed. figure: TFLOP/s over the visible pairs. by: the source."""

    gpu: str
    kernel: str
    case: BenchCase
    figure: float
    by: str


def _forward(
    batch: int, queries: int, heads: int, head_dim: int, causal: bool = False, keys: int | None = None
) -> BenchCase:
    return BenchCase("fwd", batch, queries, keys or queries, heads, heads, head_dim, head_dim, causal)


def published() -> Iterator[Published]:
    """Return the published results: bfloat16, and kernels with mma.sync and cp.async."""
    by = "gau-nernst's blog, at 400 W"
    # The page says batch 1; the benchmark at the commit that it names has 4. With 1, no clock explains the result.
    yield Published("RTX 5090", "flash-attn 2", _forward(4, 4096, 8, 128, keys=8192), 190.58, by)
    yield Published("GB10", "flash-attn-4", _forward(8, 8192, 32, 64), 94.5, _FA4_PULL.format(2474))
    of_flashinfer = (4, 4096, 128, 93), (2, 8192, 128, 95), (1, 32768, 128, 95), (1, 16384, 64, 93)
    for batch, queries, head_dim, figure in of_flashinfer:
        yield Published("GB10", "FlashInfer's FA2", _forward(batch, queries, 8, head_dim), figure, _FLASHINFER)
    full, causal = {2048: 0.609, 8192: 8.740, 16384: 34.324}, {2048: 0.368, 8192: 4.763, 16384: 18.147}
    for is_causal, by_length in ((False, full), (True, causal)):
        for queries, milliseconds in by_length.items():
            case = _forward(2, queries, 32, 128, is_causal)
            figure = case.flops / milliseconds / 1e9
            yield Published("RTX PRO 6000", "flash-attn-4", case, figure, _FA4_PULL.format(2634))


# Milliseconds of flash-attn-4, forward and backward, d128 without a mask, on an RTX 5070 Ti, by the sequence length
# (github Dao-AILab/flash-attention, issue 1981). It does not say how many heads there are.
RATIOS = {4096: (12.69, 41.86), 16384: (49.93, 165.46)}
_RATIO_GPU = "RTX 5090"  # same multiprocessor


def predicted_row(gpu: str, kernel: str, case: BenchCase) -> dict:
    """Predict one kernel of `KERNELS` on a GPU."""
    package, backend = KERNELS[kernel]
    sizes = case.batch, case.seqlen_q, case.heads_q, case.head_dim, case.head_dim_v
    keys = None if case.seqlen_k == case.seqlen_q else case.seqlen_k
    problem = Problem(case.direction, *sizes, case.causal, keys=keys)
    found = predict(problem, GPUS[gpu].chip, package, table=GPUS[gpu], backend=backend)
    machine = {"device": f"{gpu}, predicted", "chip": GPUS[gpu].chip, "clock_ghz": found.clock}
    return {
        "machine": machine, "gpu": gpu, "provider": kernel, "label": case.label, **dataclasses.asdict(case),
        "predicted": True, "median_ms": found.milliseconds, "tflops": found.tflops, "cycles": found.cycles,
        "clock_ghz": found.clock, "bound": found.bound, "ctas_per_sm": found.resident,
        "issue_model": found.times[0].source,
    }  # fmt: skip


def rows_of(gpu: str) -> Iterator[dict]:
    """Predict everything that is published on a GPU, and the ratios."""
    for result in published():
        if result.gpu == gpu:
            for kernel in KERNELS:
                yield predicted_row(gpu, kernel, result.case)
    if gpu == _RATIO_GPU:
        for seqlen in RATIOS:
            for direction in ("fwd", "bwd"):
                batch = 32768 // seqlen
                case = BenchCase(direction, batch, seqlen, seqlen, 16, 16, 128, 128, False)
                yield predicted_row(gpu, "flash-attn-4", case)


def tables(rows: list[dict]) -> str:
    """Return the tables of docs/results/predicted-consumer.md."""
    found = {(row["gpu"], row["provider"], row["label"]): row for row in rows}
    lines = ["| GPU | case | published | by | flash-attn-4 | error | fa4 sm80 | clock | CTAs per SM |"]
    lines.append("|---|---|--:|---|--:|--:|--:|--:|--:|")
    errors: dict[str, list[float]] = {}
    for result in published():
        peer, ours = (found[result.gpu, kernel, result.case.label] for kernel in KERNELS)
        error = peer["tflops"] / result.figure - 1
        errors.setdefault(result.gpu, []).append(error)
        cells = (
            result.gpu, result.case.label.replace(" bfloat16", ""), f"{result.figure:.1f}",
            f"{result.kernel}, {result.by}", f"{peer['tflops']:.1f}", f"{error:+.1%}", f"{ours['tflops']:.1f}",
            f"{peer['clock_ghz']:g}", f"{peer['ctas_per_sm']}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    means = [f"{gpu} {_mean(found):.1%} of {len(found)}" for gpu, found in errors.items()]
    every = [error for found in errors.values() for error in found]
    largest = max(every, key=abs)
    lines += ["", f"Mean error: {_mean(every):.1%} of {len(every)}, the largest {largest:+.1%} ({', '.join(means)})."]
    lines += ["", "| flash-attn-4, d128 full | published, RTX 5070 Ti | predicted | error |", "|---|--:|--:|--:|"]
    for seqlen, (forward, backward) in RATIOS.items():
        labels = (BenchCase(d, 32768 // seqlen, seqlen, seqlen, 16, 16, 128, 128, False).label for d in ("fwd", "bwd"))
        ahead, back = (found[_RATIO_GPU, "flash-attn-4", label]["median_ms"] for label in labels)
        expected, ratio = backward / forward, back / ahead
        numbers = f"{expected:.2f} | {ratio:.2f} | {ratio / expected - 1:+.1%}"
        lines.append(f"| backward over forward, {seqlen // 1024}k | {numbers} |")
    return "\n".join(lines) + "\n"


def _mean(errors: list[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


main = page_command({result.gpu for result in published()}, rows_of, tables)

if __name__ == "__main__":
    main(prog_name="python -m bench.predicted_consumer")
