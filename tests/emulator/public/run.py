"""Run the rows of the packages that are installed, each package and chip in a process of its own.

A process writes one line of JSON per row; one that dies, or takes too long, is started again at the row after.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from warpcheck.machine import Order, interleavings

from tests.emulator.public.rows import Outcome, Row, run_row, version_of

_ROOT = Path(__file__).parents[3]
# Scripts of examples/emulator that show the same as what is found, by its kind and file; every error has one.
EXAMPLES = {
    f"{kind} {file}": script
    for script, kind, files in (
        ("two_register_counts.py", "setmaxnreg-count", (
            "flash_attn/cute/flash_bwd_sm100.py", "flash_attn/cute/flash_fwd_mla_sm100.py",
            "flash_attn/cute/sm100_hd256_2cta_fmha_backward_dkdvkernel.py",
            "cudnn/flex_attention/kernels/sm100/bwd/backward.py", "flashinfer/cute_dsl/attention/prefill.py",
        )),
        ("unpublished_barrier.py", "barrier-init-fence", ("flashinfer/cute_dsl/attention/gqa_decode.py",)),
        ("exchange_in_a_loop.py", "race", ("flashinfer/cute_dsl/attention/roles/mla_compute.py",)),
        ("relaxed_hand_back.py", "relaxed-arrival", ("cudnn/frost/tile_dsl/tma.py",)),
        ("cluster_arrive_twice.py", "barrier-misuse", ("flash_attn/cute/flash_fwd_mla_sm100.py",)),
        ("cluster_arrive_twice.py", "race", ("flash_attn/cute/tile_scheduler.py",)),
        ("cluster_arrive_twice.py", "barrier-init-fence", ("flash_attn/cute/tile_scheduler.py",)),
        ("unset_rows.py", "uninitialized", ("flash_attn/cute/flash_fwd_combine.py",)),
        ("unpublished_barrier.py", "barrier-init-fence", (
            "tests/emulator/public/triton_compiler.py", "cudnn/deepseek_sparse_attention/utils/copy.py",
            "cudnn/deepseek_sparse_attention/indexer_backward/indexer_backward_sm100.py",
            "cudnn/block_sparse_attention/csrc/fwd/sm90_blk64/bsa_fwd_sm90.py",
        )),
    )
    for file in files
}  # fmt: skip
# Errors without a script: by kind and file, the section of a page of docs/results that says what the kernel does.
EXPLAINED = {
    f"{kind} {file}": page
    for page, kinds, files in (
        ("recall.md#what-the-errors-of-the-packages-as-they-are-mean",
         ("cta-end", "race", "lane-race", "out-of-bounds"), (
            "flash_attn/cute/flash_bwd_sm100.py", "cudnn/flex_attention/kernels/sm100/bwd/backward.py",
            "cudnn/sdpa/fwd/kernels/sm100/prefill_d192_d128_f16.py",
            "cudnn/sdpa/fwd/kernels/sm100/prefill_d256_fp8.py", "cudnn/sdpa/bwd/kernels/bprop_matmul_blackwell.py",
            "cudnn/sdpa/bwd/kernels/sm100/bprop_d512_f16.py",
            "cudnn/deepseek_sparse_attention/indexer_backward/indexer_backward_sm90.py",
        )),
        ("#what-the-errors-mean", ("race",), (
            "flashinfer/attention/prims_ts/kernels/fmha_context/fmha_resources.py", "cudnn/frost/tile_dsl/mma.py",
            "quack/tile_scheduler.py",
        )),
    )
    for kind in kinds
    for file in files
}  # fmt: skip
SHOWN = EXAMPLES | EXPLAINED


def all_rows() -> list[Row]:
    """The rows of every package, installed or not."""
    from tests.emulator.public import cudnn_frontend, fla_core, flash_attn_4, flashinfer_python, quack_kernels

    rows = [*flash_attn_4.ROWS, *quack_kernels.ROWS, *cudnn_frontend.ROWS, *flashinfer_python.ROWS, *fla_core.ROWS]
    if find_spec("triton"):
        from tests.emulator.public import triton_compiler

        rows += triton_compiler.ROWS
    return rows


def installed(rows: Iterable[Row]) -> tuple[list[Row], list[str]]:
    """The rows that can run here, and the packages of the others."""
    rows = list(rows)
    absent = sorted({row.package for row in rows if version_of(row.package) is None})
    return [row for row in rows if row.package not in absent], absent


def run_rows(rows: Sequence[Row], seeds: int, timeout: float, tell: Callable[[Outcome], None]) -> None:
    """Run `rows`; every outcome goes to `tell`. timeout: seconds for one row."""
    for _, of_one in groupby(
        sorted(rows, key=lambda row: (row.package, row.chip)), lambda row: (row.package, row.chip)
    ):
        left = list(of_one)
        while left:
            for outcome in _worker(left, seeds, timeout):
                tell(outcome)
                left.pop(0)


def _worker(rows: Sequence[Row], seeds: int, timeout: float) -> Iterable[Outcome]:
    """Outcomes of the first rows, up to one that ended its process."""
    command = [sys.executable, "-m", "tests.emulator.public.run", str(seeds), *(row.key for row in rows)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_ROOT)
    assert process.stdout and process.stderr
    lines: queue.Queue[str | None] = queue.Queue()
    complaints: list[str] = []
    threading.Thread(target=_pump, args=(process.stdout, lines.put), daemon=True).start()
    listener = threading.Thread(target=_pump, args=(process.stderr, complaints.append), daemon=True)
    listener.start()
    try:
        for row in rows:
            start = time.perf_counter()
            failed = Outcome(row.package, row.name, row.chip, version_of(row.package) or "")
            while True:
                try:
                    line = lines.get(timeout=max(0.0, start + timeout - time.perf_counter()))
                except queue.Empty:
                    failed.failure = f"not done after {timeout:.0f} s"
                    yield failed
                    return
                if line is None:
                    listener.join(timeout=5)
                    tail = [text.strip() for text in complaints if text and text.strip()][-1:]
                    failed.failure = f"the process ended with {process.wait()}: {''.join(tail)[:200]}"
                    yield failed
                    return
                if line.startswith(_MARK):
                    yield Outcome(**json.loads(line.removeprefix(_MARK)))
                    break
    finally:
        process.kill()
        process.wait()


_MARK = "outcome of a row: "


def _pump(stream: Iterable[str], take: Callable[[str | None], object]) -> None:
    for line in stream:
        take(line)
    take(None)


def _main(seeds: int, keys: Sequence[str]) -> None:
    by_key = {row.key: row for row in all_rows()}
    orders: list[Order] = interleavings(0, seeds)
    for key in keys:
        outcome = run_row(by_key[key], orders)
        print(f"\n{_MARK}{json.dumps(outcome.as_dict())}", flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
