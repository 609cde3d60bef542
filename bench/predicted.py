"""Rows of a suite as the emulator's clock predicts them, in the form of measured ones: `bench.compare` reads both."""

from __future__ import annotations

import dataclasses

from fa4.emulator.lab.attention import Problem
from fa4.emulator.lab.predict import predict
from fa4.emulator.timing.chips import chip_table

from .suites import BenchCase


def facts(chip: str) -> dict:
    """Stands where a measured row says which machine it was taken on."""
    table = chip_table(chip)
    return {"device": f"{table.gpu}, predicted", "chip": chip, "clock_ghz": table.clock.value}


PREDICTED = {  # provider: package of `fa4.emulator.lab.attention`, and whether its backward is deterministic
    "fa4": ("fa4", False),
    "fa4-deterministic": ("fa4", True),
    "flash-attn-4": ("flash-attn-4", False),
}


def predicted_row(case: BenchCase, chip: str, provider: str = "fa4") -> dict:
    """One row of a provider in `PREDICTED`, marked "predicted"; "skipped" says why a case has no prediction."""
    row: dict = {"provider": provider, "label": case.label, **dataclasses.asdict(case), "predicted": True}
    package, deterministic = PREDICTED[provider]
    reason = _beyond(case) or ("a forward is always deterministic" if deterministic and case.direction == "fwd" else "")
    if reason:
        return {**row, "skipped": reason}
    sizes = case.batch, case.seqlen_q, case.heads_q, case.head_dim, case.head_dim_v
    problem = Problem(case.direction, *sizes, case.causal, deterministic)
    try:
        found = predict(problem, chip, package)
    except (ValueError, ImportError) as error:
        return {**row, "skipped": str(error)}
    except RuntimeError as error:
        return {**row, "error": str(error).splitlines()[0][:300]}
    return {
        **row,
        "median_ms": found.milliseconds,
        "tflops": case.flops / found.milliseconds / 1e9,
        **({"gbps": case.nbytes / found.milliseconds / 1e6} if case.direction == "fwd" else {}),
        "cycles": found.cycles,
        "bound": found.bound,
        "issue_model": found.times[0].source,
    }


def _beyond(case: BenchCase) -> str:
    if case.heads_q != case.heads_kv or case.seqlen_q != case.seqlen_k:
        return "only self-attention with as many key/value heads is predicted"
    if case.page_size is not None or case.dtype != "bfloat16":
        return "only bfloat16 without pages is predicted"
    return ""
