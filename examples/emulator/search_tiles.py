"""Search for a faster row of tiles of fa4's Hopper forward, and keep only rows that `warpcheck verify` calls clean.

    python examples/emulator/search_tiles.py            # no GPU needed; about 8 seconds a candidate

Each round changes one column of the best row so far, writes a candidate script for every value, and reads the verdicts
from the JSON of `warpcheck verify`: values against fa4's float64 oracle, findings in three orders, predicted time. Rows
that the assembler refuses, that are wrong or that have a finding are left out, however fast they are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

COLUMNS = {
    "tile_n": (64, 80, 96, 112, 128, 144, 160, 176, 192),
    "ping_pong": (False, True),
    "consumers": (1, 2, 3),
    "ctas": (1, 2),
    "rescale_threshold": (0.0, 8.0),
}
CANDIDATE = """
import dataclasses
from fa4.oracle.cases import Case, assert_right, judge_forward, make
from fa4.runtime.device import chip_of
from fa4.sm90.fwd.tiles import tiles_for
from fa4.sm90.plan import Plan
from fa4.torch_ops import run

case = Case("candidate", seqlen_q=256, seqlen_k={keys}, heads_q=4, heads_kv=4, head_dim={head_dim}, causal={causal})
problem = make(case, seed=0, device="cuda")
inputs, spec, chip = problem.inputs, problem.spec, chip_of(problem.inputs.q.device)
row = dataclasses.replace(tiles_for(spec, chip, inputs.extent).row, **{changes})
out, lse = run.forward(inputs, spec, Plan(spec, inputs.extent, chip, forward_tiles=row))
assert_right(judge_forward(problem, out, lse), "{changes}")
"""


def verified(rows: list[dict], problem: dict) -> list[dict]:
    """The verdicts on changes of the table's row, in their order."""
    with tempfile.TemporaryDirectory(prefix="fa4-search-") as name:
        folder = Path(name)
        for index, changes in enumerate(rows):
            (folder / f"row{index:02}.py").write_text(CANDIDATE.format(changes=changes, **problem))
        out = folder / "verdicts.json"
        words = ["verify", name, "--chip", "sm_90a", "--seeds", "3", "--json", str(out)]
        subprocess.run([sys.executable, "-m", "warpcheck", *words], stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())["candidates"]


def microseconds(verdict: dict) -> float:
    clean = verdict["verdict"] == "clean"
    return verdict.get("predicted", {}).get("microseconds", float("inf")) if clean else float("inf")


def described(verdict: dict) -> str:
    if "reason" in verdict.get("predicted", {}):
        return f"no predicted time: {verdict['predicted']['reason'].strip().splitlines()[-1].strip()}"
    time = microseconds(verdict)
    return f"clean, predicted {time:.2f} us" if time < float("inf") else verdict["verdict"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1024)
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    args = parser.parse_args()
    problem = {"keys": args.keys, "head_dim": args.head_dim, "causal": args.causal}
    best: dict = {}
    (verdict,) = verified([best], problem)
    time = microseconds(verdict)
    print(f"the table's row: {described(verdict)}", flush=True)
    for column in args.columns:
        rows = [best | {column: value} for value in COLUMNS[column]]
        for row, verdict in zip(rows, verified(rows, problem)):
            print(f"{row}: {described(verdict)}", flush=True)
            if microseconds(verdict) < time:
                best, time = row, microseconds(verdict)
    print(f"best: {best or 'the row of the table'}, predicted {time:.2f} us")


if __name__ == "__main__":
    main()
