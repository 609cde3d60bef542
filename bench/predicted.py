"""Rows of a suite as the emulator's clock predicts them, in the form of measured ones: `bench.compare` reads both.

python -m bench.predicted FILE prints the tables of docs/results/predicted-times.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

from warpcheck.errors import EmulationError
from warpcheck.timing.chips import GPUS, ChipTable, chip_table

from fa4.emulator.attention import Problem
from fa4.emulator.latents import Latents, predict_latents
from fa4.emulator.predict import Prediction, predict
from fa4.emulator.warp_mma import CHIPS as WARP_MMA_CHIPS
from fa4.runtime.spec import Operands

from .suites import E4M3, IN_BLOCKS, MXFP8, BenchCase


def facts(gpu: str) -> dict:
    """Stands where a measured row says which machine it was taken on."""
    table = GPUS[gpu]
    return {"device": f"{gpu}, predicted", "chip": table.chip, "clock_ghz": table.clock.value,
            "clock_ghz_backward": table.clock_of("bwd")}  # fmt: skip


PREDICTED = {  # provider: package of `fa4.emulator.attention`, and whether its backward is deterministic
    "fa4": ("fa4", False),
    "fa4-deterministic": ("fa4", True),
    "flash-attn-4": ("flash-attn-4", False),
    "cudnn-frontend": ("cudnn-frontend", False),  # its kernels in CuTe DSL; the provider "cudnn" is libcudnn
}


def predicted_row(case: BenchCase, chip: str, provider: str = "fa4", table: ChipTable | None = None) -> dict:
    """One row of a provider in `PREDICTED`, marked "predicted"; "skipped" says why a case has no prediction. table: of
    the GPU [default: the chip's]. A call whose tiles are not listed is predicted from a part of its grids."""
    row: dict = {"provider": provider, "label": case.label, **dataclasses.asdict(case), "predicted": True}
    package, deterministic = PREDICTED[provider]
    if package != "fa4" and (case.dtype in IN_BLOCKS or (case.dtype == E4M3 and case.direction == "bwd")):
        name = "backward" if case.direction == "bwd" else "forward"
        return {**row, "skipped": f"{package} has no {name} of {case.dtype}"}
    if deterministic and case.direction == "fwd":
        return {**row, "skipped": "a forward is always deterministic"}
    try:
        found = None if _beyond(case, chip) else _prediction(case, chip, package, deterministic, table)
    except ImportError as error:
        return {**row, "skipped": str(error)}
    except ValueError:
        found = None
    except RuntimeError as error:
        return {**row, "error": str(error).splitlines()[0][:300]}
    if found is None:
        return {**row, **_from_part(case, provider, table or chip_table(chip))}
    return {
        **row,
        "median_ms": found.milliseconds,
        "tflops": case.flops / found.milliseconds / 1e9,
        **({"gbps": case.nbytes / found.milliseconds / 1e6} if case.direction == "fwd" else {}),
        "cycles": found.cycles,
        "bound": found.bound,
        "kernels": [{"cycles": part.cycles, "bound": part.bound} for part in found.parts or (found,)],
        "issue_model": found.times[0].source,
    }


def _from_part(case: BenchCase, provider: str, table: ChipTable) -> dict:
    """The rest of a row, from a part of each grid of the call itself; "skipped" if that cannot be."""
    from .providers import PROVIDERS
    from .sampled import predict_sampled

    if provider not in PROVIDERS:
        return {"skipped": f"{provider} has no function that this case can call"}
    try:
        found = predict_sampled(case, provider, table)
    except (ValueError, ImportError, EmulationError) as error:
        return {"skipped": str(error).splitlines()[0][:300]}
    timing = found.timing
    milliseconds = timing.microseconds / 1000
    return {
        "median_ms": milliseconds,
        "tflops": case.flops / milliseconds / 1e9,
        **({"gbps": case.nbytes / milliseconds / 1e6} if case.direction == "fwd" else {}),
        "cycles": timing.cycles,
        "bound": found.bound,
        "kernels": [{"cycles": cycles, "bound": bound} for cycles, bound in zip(timing.each, found.bounds)],
        "issue_model": timing.launches[found.main].source,
        "from_part": True,
    }


def _prediction(case: BenchCase, chip: str, package: str, deterministic: bool, table: ChipTable | None) -> Prediction:
    if case.v_in_k:
        sizes = case.batch, case.seqlen_q, case.seqlen_k, case.causal, case.heads_q
        return predict_latents(Latents(*sizes), package, chip)
    sizes = case.batch, case.seqlen_q, case.heads_q, case.head_dim, case.head_dim_v
    operands = Operands(case.dtype) if case.dtype in IN_BLOCKS else Operands.E4M3 if case.dtype == E4M3 else None
    keys = None if case.seqlen_k == case.seqlen_q else case.seqlen_k
    problem = Problem(case.direction, *sizes, case.causal, deterministic, operands, keys)
    return predict(problem, chip, package, table=table)


def _beyond(case: BenchCase, chip: str) -> str:
    if case.v_in_k:
        is_predicted = case.page_size is None and not case.converts_kv and case.direction == "fwd"
        return "" if is_predicted else "of latents only a forward without pages is predicted"
    if case.heads_q != case.heads_kv:
        return "only attention with as many key/value heads is predicted"
    if case.seqlen_q != case.seqlen_k and chip not in WARP_MMA_CHIPS:
        return f"only self-attention is predicted on {chip}"
    if case.window is not None:
        return "windows are not predicted"
    if case.converts_kv or case.page_size is not None or case.dtype not in ("bfloat16", E4M3, *IN_BLOCKS):
        return f"only bfloat16, e4m3, {' and '.join(IN_BLOCKS)} without pages are predicted"
    return ""


# TFLOP/s of flash-attn-4 on a B200 by its paper (arXiv 2603.05451): (direction, head dim, causal) -> by length.
PUBLISHED = {
    ("fwd", 128, False): {1024: 1355, 4096: 1532, 16384: 1601, 32768: 1613},
    ("fwd", 128, True): {1024: 744, 4096: 1279, 16384: 1526, 32768: 1576},
    ("fwd", 64, False): {16384: 878},
    ("fwd", 64, True): {16384: 856},
    ("bwd", 128, False): {1024: 936, 4096: 1331, 16384: 1457, 32768: 1412},
    ("bwd", 128, True): {1024: 614, 4096: 1102, 16384: 1402, 32768: 1446},
}
FITTED = {(direction, 128, False, seqlen) for direction in ("fwd", "bwd") for seqlen in (4096, 16384)}


def tables(rows: list[dict]) -> str:
    """The tables of docs/results/predicted-times.md: flash-attn-4 beside what was published, and ours beside
    flash-attn-4. Of wide heads, for which nothing is published: all packages side by side."""
    if all(row.get("suite") == "e4m3" for row in rows):
        return f"{_beside_16_bits(rows)}\n"
    if all(row.get("suite") in ("wide", "latents") for row in rows):
        return f"{_with_bounds(rows)}\n"
    if all(row.get("suite") == "consumer" for row in rows):
        return f"{_by_device(rows)}\n"
    if any(row["machine"]["chip"] != "sm_100a" for row in rows):  # published for a B200
        return f"{_side_by_side(rows)}\n"
    return f"{_against_published(rows)}\n\n{_side_by_side(rows)}\n"


def _by_device(rows: list[dict]) -> str:
    """TFLOP/s of the cases that can be predicted, ours beside flash-attn-4, and geometric means of the ratios."""
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        if "tflops" in row:
            device = row["machine"]["device"].removesuffix(", predicted")
            found.setdefault((device, row["label"]), {})[row["provider"]] = row
    lines = ["| GPU | TFLOP/s | fa4 | bound | flash-attn-4 | ratio |", "|---|---|--:|---|--:|--:|"]
    ratios: dict[str, list[float]] = {}
    for (device, label), of in found.items():
        ours, peer = of.get("fa4"), of.get("flash-attn-4")
        if ours is None:
            continue
        cells = [device, label.replace(" bfloat16", ""), f"{ours['tflops']:.0f}", ours["bound"], "", ""]
        if peer is not None:
            ratio = ours["tflops"] / peer["tflops"]
            ratios.setdefault(f"{device} {ours['direction']}", []).append(ratio)
            cells[-2:] = f"{peer['tflops']:.0f}", f"{ratio:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    return f"{chr(10).join(lines)}\n\n{_means(ratios)}"


def _with_bounds(rows: list[dict]) -> str:
    """TFLOP/s of each package, and the busiest unit of each kernel that has products."""
    packages = [name for name in PREDICTED if any(row["provider"] == name for row in rows)]
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if "tflops" in row:
            bounds = ", ".join(kernel["bound"] for kernel in row["kernels"])
            found.setdefault(row["label"], {})[row["provider"]] = f"{row['tflops']:.0f} ({bounds})"
    lines = [f"| TFLOP/s (bound by) | {' | '.join(packages)} |", "|---" * (len(packages) + 1) + "|"]
    for label, of in found.items():
        cells = label.replace(" bfloat16", ""), *(of.get(name, "") for name in packages)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _beside_16_bits(rows: list[dict]) -> str:
    """Of products of e4m3: beside bfloat16, with scales of blocks, and a peer's products of e4m3."""
    found = {(*_key(row), row["dtype"], row["provider"]): row for row in rows if "tflops" in row}
    lines = ["| TFLOP/s | bfloat16 | e4m3 | ratio | bound | mxfp8 | deterministic | flash-attn-4 e4m3 | ratio |"]
    lines.append("|---|--:|--:|--:|---|--:|--:|--:|--:|")
    for key in dict.fromkeys(key[:4] for key in found):
        half, ours, scaled, ordered, peer = (
            found.get((*key, dtype, name))
            for dtype, name in (
                ("bfloat16", "fa4"), (E4M3, "fa4"), (MXFP8, "fa4"), (E4M3, "fa4-deterministic"), (E4M3, "flash-attn-4")
            )
        )  # fmt: skip
        assert half and ours
        of_blocks = f"{scaled['tflops']:.0f} ({scaled['tflops'] / half['tflops']:.2f})" if scaled else ""
        share = f"{ordered['tflops']:.0f} ({ordered['tflops'] / ours['tflops']:.2f})" if ordered else ""
        beside = (f"{peer['tflops']:.0f}", f"{ours['tflops'] / peer['tflops']:.2f}") if peer else ("", "")
        ratio = f"{ours['tflops'] / half['tflops']:.2f}"
        cells = f"{half['tflops']:.0f}", f"{ours['tflops']:.0f}", ratio, ours["bound"], of_blocks, share, *beside
        lines.append("| " + " | ".join((_name(*key), *cells)) + " |")
    return "\n".join(lines)


def _against_published(rows: list[dict]) -> str:
    found = {_key(row): row["tflops"] for row in rows if row["provider"] == "flash-attn-4" and "tflops" in row}
    lines = ["| flash-attn-4 | published | predicted | error |", "|---|--:|--:|--:|"]
    errors = []
    for (direction, dim, causal), by_length in PUBLISHED.items():
        for seqlen, tflops in by_length.items():
            key = direction, dim, causal, seqlen
            error = found[key] / tflops - 1
            if key not in FITTED:
                errors.append(abs(error))
            marked = " (fitted)" if key in FITTED else ""
            lines.append(f"| {_name(*key)}{marked} | {tflops} | {found[key]:.0f} | {error:+.1%} |")
    mean = sum(errors) / len(errors)
    return "\n".join(
        [
            *lines,
            "",
            f"Mean error of the {len(errors)} that were not fitted: {mean:.1%}, the largest {max(errors):.1%}.",
        ]
    )


def _side_by_side(rows: list[dict]) -> str:
    by_key: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if "tflops" in row:
            by_key.setdefault(_key(row), {})[row["provider"]] = row
    lines = ["| TFLOP/s | ours | flash-attn-4 | ratio | bound of ours | deterministic |", "|---|--:|--:|--:|---|--:|"]
    ratios: dict[str, list[float]] = {"fwd": [], "bwd": []}
    for key, of in by_key.items():
        ours, peer, ordered = (of.get(name) for name in ("fa4", "flash-attn-4", "fa4-deterministic"))
        if ours is None:
            continue
        ratio = ours["tflops"] / peer["tflops"] if peer else None
        if ratio:
            ratios[key[0]].append(ratio)
        cells = (
            _name(*key), f"{ours['tflops']:.0f}", f"{peer['tflops']:.0f}" if peer else "",
            f"{ratio:.2f}" if ratio else "", ours["bound"],
            f"{ordered['tflops']:.0f} ({ordered['tflops'] / ours['tflops']:.2f})" if ordered else "",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _means(ratios)])


def _means(ratios: dict[str, list[float]]) -> str:
    means = [
        f"{name} {math.prod(found) ** (1 / len(found)):.2f} (least {min(found):.2f})"
        for name, found in ratios.items()
        if found
    ]
    return f"Geometric means of the ratios: {', '.join(means)}."


def _key(row: dict) -> tuple[str, int, bool, int]:
    return row["direction"], row["head_dim"], row["causal"], row["seqlen_q"]


def _name(direction: str, head_dim: int, causal: bool, seqlen: int) -> str:
    dim = "(192, 128)" if head_dim == 192 else str(head_dim)
    length = f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen)
    return f"{direction} d{dim} {'causal' if causal else 'full'} {length}"


if __name__ == "__main__":
    print(tables([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]), end="")
