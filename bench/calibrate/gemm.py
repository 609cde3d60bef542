"""CUTLASS' GEMM of Hopper, unmodified: what a clock says of it beside what an H100 counted.

    python -m bench.calibrate.gemm --cutlass CHECKOUT       # emulates one tile at two depths for each shape

Its tiles go to CTAs in groups of eight rows of tiles, and a multiprocessor holds one CTA.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from warpcheck.machine import Checks
from warpcheck.machine.record import KINDS, Record
from warpcheck.timing.chips import ChipTable, chip_table
from warpcheck.timing.grid import CtaCost, Sample, TileScheduler, makespan
from warpcheck.timing.replay import replay
from warpcheck.tools.examples import Example

from fa4.emulator import emulate
from fa4.runtime.device import chip_by_number

CHIP = "sm_90a"
_SCRIPT = "cute/hopper/kernel/dense_gemm/dense_gemm.py"
_FLOAT16 = "--a_dtype Float16 --b_dtype Float16 --c_dtype Float16 --acc_dtype Float32"
_GROUP = 8  # rows of tiles that consecutive CTAs go through together
_DEPTHS = (1024, 2048)


@dataclass(frozen=True)
class Shape:
    """m x n x k in tiles of tile[0] x tile[1]; cycles: of the SM that counted most, with the launch, on an H100."""

    m: int
    n: int
    k: int
    tile: tuple[int, int]
    cycles: int

    @property
    def tiles(self) -> tuple[int, int]:
        return self.m // self.tile[0], self.n // self.tile[1]


SHAPES = (Shape(4096, 4096, 4096, (128, 256), 308_918), Shape(8192, 4096, 2048, (128, 128), 429_960))


def sharers(read: Sequence[int], gpcs: int) -> float:
    """Multiprocessors that read the same, as `replay` counts them. read: what each reads, in the order of the CTAs,
    which go to one GPC after the other."""
    return gpcs * len(read) / sum(len(set(read[gpc::gpcs])) for gpc in range(gpcs))


def operands(shape: Shape, sms: int, gpcs: int) -> tuple[float, float]:
    """How many multiprocessors read the same of A and of B at a time."""
    ctas = range(min(sms, shape.tiles[0] * shape.tiles[1]))
    a_group = _GROUP * shape.tiles[1]
    rows = [cta // a_group * _GROUP + cta % _GROUP for cta in ctas]
    return sharers(rows, gpcs), sharers([cta % a_group // _GROUP for cta in ctas], gpcs)


def recorded(cutlass: Path, shape: Shape, depth: int) -> Record:
    """One tile of this depth on one emulated SM."""
    tile = ",".join(map(str, shape.tile))
    arguments = f"{_FLOAT16} --mnkl {tile},{depth},1 --tile_shape_mn {tile} --cluster_shape_mn 1,1"
    arguments += " --warmup_iterations 0 --iterations 1 --skip_ref_check"
    example = Example("dense_gemm", CHIP, _SCRIPT, tuple(arguments.split()))
    checks = Checks(races=False, poison=False)
    with emulate(CHIP, sms=1, timing=True, checks=checks) as gpu, contextlib.redirect_stdout(io.StringIO()):
        example.run(cutlass)
    record = gpu.launches[-1].record
    assert record is not None
    return record


def _ranges(record: Record, shape: Shape, counts: tuple[float, float]) -> list[tuple[int, int, float, bool]]:
    """Where A and B lie: the two groups of addresses that are loaded from, A's first where it was made first."""
    events = np.concatenate([warp.events for warp in record.warps])
    addresses = np.unique(events[events[:, 1] == KINDS["load"], 6])
    second = int(np.argmax(np.diff(addresses))) + 1
    groups = addresses[:second], addresses[second:]
    return [(int(group[0]), int(group[-1]) + 1, count, False) for group, count in zip(groups, counts)]


def predict(cutlass: Path, shape: Shape, table: ChipTable) -> float:
    """Cycles on a whole chip, with the launch."""
    sms, gpcs = chip_by_number(90).sms, round(table.numbers["gpcs"].value)
    samples = []
    for depth in _DEPTHS:
        record = recorded(cutlass, shape, depth)
        times = replay(record, chip=table, ranges=_ranges(record, shape, operands(shape, sms, gpcs)))
        samples.append(Sample(1, times.flops, times.cycles))
    tiles = [2.0 * shape.tile[0] * shape.tile[1] * shape.k] * (shape.tiles[0] * shape.tiles[1])
    cost, replace = CtaCost.fitted(samples), table.numbers["replace"].value
    return makespan(tiles, sms, cost, TileScheduler.PER_CTA, replace) + table.numbers["launch"].value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cutlass", type=Path, required=True, help="checkout of NVIDIA/cutlass")
    args = parser.parse_args()
    for shape in SHAPES:
        cycles = predict(args.cutlass, shape, chip_table(CHIP))
        error = 100 * (cycles / shape.cycles - 1)
        where = f"{shape.m} x {shape.n} x {shape.k} in tiles of {shape.tile[0]} x {shape.tile[1]}"
        print(f"{where}: {cycles:,.0f} cycles, measured {shape.cycles:,}, {error:+.1f} %", flush=True)


if __name__ == "__main__":
    main()
