"""Rows of a suite as the emulator's clock predicts them, in the form of measured ones: `bench.compare` reads both."""

from __future__ import annotations

import dataclasses

from fa4.emulator.lab.predict import predict_forward
from fa4.emulator.timing.chips import chip_table

from .suites import BenchCase


def facts(chip: str) -> dict:
    """Stands where a measured row says which machine it was taken on."""
    table = chip_table(chip)
    return {"device": f"{table.gpu}, predicted", "chip": chip, "clock_ghz": table.clock.value}


def predicted_row(case: BenchCase, chip: str) -> dict:
    """One row of fa4, marked "predicted"; "skipped" says why a case has no prediction."""
    row: dict = {"provider": "fa4", "label": case.label, **dataclasses.asdict(case), "predicted": True}
    reason = _beyond(case)
    if reason:
        return {**row, "skipped": reason}
    try:
        found = predict_forward(
            chip, batch=case.batch, seqlen=case.seqlen_q, heads=case.heads_q, head_dim=case.head_dim, causal=case.causal
        )
    except ValueError as error:
        return {**row, "skipped": str(error)}
    except RuntimeError as error:
        return {**row, "error": str(error).splitlines()[0][:300]}
    return {
        **row,
        "median_ms": found.milliseconds,
        "tflops": case.flops / found.milliseconds / 1e9,
        "gbps": case.nbytes / found.milliseconds / 1e6,
        "cycles": found.cycles,
        "bound": found.bound,
    }


def _beyond(case: BenchCase) -> str:
    if case.direction != "fwd":
        return "the backward is not predicted for whole grids"
    if case.heads_q != case.heads_kv or case.seqlen_q != case.seqlen_k or case.head_dim != case.head_dim_v:
        return "only self-attention with as many key/value heads and one head dim is predicted"
    if case.page_size is not None or case.dtype != "bfloat16":
        return "only bfloat16 without pages is predicted"
    return ""
