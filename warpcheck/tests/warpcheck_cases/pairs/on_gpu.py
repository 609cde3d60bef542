"""Pairs on a GPU, beneath compute-sanitizer. Needs the standard library alone. `warpcheck_cases.pairs.bundle` writes
this file, `libcuda.py`, the PTX and a manifest into a folder:

    python on_gpu.py all OUT --sanitizer PATH      # every pair beneath every tool; goes on where an earlier call ended
    python on_gpu.py launch right|wrong ID...      # pairs in this process
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COMMON = ["--print-limit", "100", "--show-backtrace", "no"]
TOOLS = {
    "racecheck": ["--racecheck-deadlock-timeout", "1000"],
    "synccheck": [],
    "memcheck": ["--report-api-errors", "no"],
    "initcheck": ["--initcheck-address-space", "all"],
    "none": [],  # the kernel alone
}
SECONDS, HANGING_SECONDS = 20, 10  # of a process; one that hangs is killed


def manifest() -> list[dict[str, Any]]:
    return json.loads((FOLDER / "manifest.json").read_text())


def launch(side: str, ids: list[str]) -> int:
    """Print a line for each pair: its id, the digest of the memory after it, or the driver's error."""
    from libcuda import CudaError, Device  # of the bundle

    device, failed = Device(), 0
    for pair in manifest():
        if pair["id"] not in ids:
            continue
        addresses: list[int] = []
        params = []
        for arg in pair["args"]:
            if "map" in arg:
                params.append(device.tensor_map(addresses[arg["map"]], *arg["shape"], arg["box"]))
                addresses.append(0)
                continue
            content = base64.b64decode(arg["content"])
            addresses.append(device.reserve(arg["nbytes"]) if arg["fresh"] else device.allocate(content))
            params.append(addresses[-1].to_bytes(8, "little"))
        try:
            device.launch(
                (FOLDER / f"{pair['area']}_{side}.ptx").read_text(), pair["name"], grid=(pair["grid"], 1, 1),
                block=(pair["block"], 1, 1), cluster=(pair["cluster"], 1, 1), smem_bytes=pair["smem"], params=params,
            )  # fmt: skip
            after = [device.read(a, arg["nbytes"]) for a, arg in zip(addresses, pair["args"]) if a]
            print(f"CASE {pair['id']} {hashlib.sha1(b''.join(after)).hexdigest()[:12]}", flush=True)
        except CudaError as error:
            print(f"CASE {pair['id']} error {error}", flush=True)
            failed = 1
    return failed


def run(sanitizer: str, tool: str, side: str, ids: list[str], folder: Path, seconds: float = SECONDS) -> dict[str, Any]:
    """The row of a process, whose output is kept beside the rows."""
    program = [sys.executable, "-S", str(FOLDER / "on_gpu.py"), "launch", side, *ids]
    command = program if tool == "none" else [sanitizer, "--tool", tool, *COMMON, *TOOLS[tool], *program]
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        timed_out = False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        timed_out = True
    row = {
        "tool": tool, "side": side, "ids": ids, "code": process.returncode, "timed_out": timed_out,
        "seconds": round(time.monotonic() - started, 2), "output": output[-6000 * max(1, min(8, len(ids))) :],
    }  # fmt: skip
    with (folder / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    return row


def jobs(pairs: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[str]]]:
    """Right kernels of an area share a process; wrong ones may end theirs. Kernels that hang come last."""
    areas: dict[str, list[str]] = {}
    for pair in pairs:
        areas.setdefault(pair["area"], []).append(pair["id"])
    for tool in TOOLS:
        for ids in areas.values():
            yield tool, "right", ids
    for tool in TOOLS:
        for pair in pairs:
            if not pair["hangs"]:
                yield tool, "wrong", [pair["id"]]


def all_of(folder: Path, sanitizers: list[str], workers: int, seconds: float) -> None:
    """Append a row for each process to `rows.jsonl` of the folder, until the seconds are over."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = next((path for path in sanitizers if _works(path, folder)), None)
    print("compute-sanitizer:", chosen, flush=True)
    if chosen is None:
        return
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    done = {(row["tool"], row["side"], id_) for row in rows for id_ in row["ids"]}

    def one(tool: str, side: str, ids: list[str], limit: float = SECONDS) -> None:
        ids = [id_ for id_ in ids if (tool, side, id_) not in done]
        if not ids or time.monotonic() > started + seconds:
            return
        row = run(chosen, tool, side, ids, folder, limit)
        if len(ids) > 1:  # those that came after one that ended the process
            for id_ in ids:
                if f"CASE {id_} " not in row["output"]:
                    run(chosen, tool, side, [id_], folder)

    pairs = manifest()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda job: one(*job), jobs(pairs)))
    with ThreadPoolExecutor(4) as pool:
        hanging = [(tool, pair["id"]) for pair in pairs if pair["hangs"] for tool in TOOLS if tool != "none"]
        list(pool.map(lambda job: one(job[0], "wrong", [job[1]], HANGING_SECONDS), hanging))
    print(f"{time.monotonic() - started:.0f} seconds", flush=True)


def _works(sanitizer: str, folder: Path) -> bool:
    """True if it finds the first race of the corpus."""
    try:
        row = run(sanitizer, "racecheck", "wrong", ["shared_memory.exchange"], folder)
    except OSError as error:
        print(sanitizer, error, flush=True)
        return False
    found = "hazard" in row["output"].lower() and "0 hazards" not in row["output"]
    print(sanitizer, "works" if found else row["output"], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("launch")
    one.add_argument("side", choices=("right", "wrong"))
    one.add_argument("ids", nargs="+")
    every = commands.add_parser("all")
    every.add_argument("out", type=Path)
    every.add_argument("--sanitizer", action="append", required=True, help="The first one that works is taken.")
    every.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    every.add_argument("--seconds", type=float, default=600)
    args = parser.parse_args()
    if args.command == "launch":
        return launch(args.side, args.ids)
    all_of(args.out, args.sanitizer, args.workers, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
