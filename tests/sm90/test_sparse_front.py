"""The block that a CTA of the sparse backward starts with, and the front that it leaves, on the emulated chip."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.bwd.device.list_work import SparseWork
from fa4.emulator import emulate
from fa4.runtime import jit
from fa4.runtime.device import chip_of
from fa4.sm90.sparse.config import TILE_N
from fa4.sm90.sparse.front import advance, first_block, load_front


@cute.kernel
def find(rows: cute.Tensor, count: Int32, k: cute.Tensor, front: cute.Tensor, found: cute.Tensor, row: Int32):
    """One warp: find the block, then come to a row."""
    tensors = SimpleNamespace(rows=rows, k=k, front=front)
    context = SimpleNamespace(args=SimpleNamespace(tensors=tensors), cfg=SimpleNamespace(tile_n=TILE_N))
    none = Int32(0)
    before = load_front(context)
    found[cute.arch.lane_idx()] = first_block(context, SparseWork(none, none, none, none, none, count), before)
    advance(context, before, row)


@cute.jit
def launch(rows, count: Int32, k, front, found, row: Int32, stream):
    find(rows, count, k, front, found, row).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def test_a_cta_starts_at_the_front_and_moves_it(seed):
    keys = 5000
    generator = torch.Generator().manual_seed(seed)
    k, found = torch.zeros(keys, 1, 1), torch.empty(32, dtype=torch.int32)
    with emulate("sm_90a", seed=seed):
        fakes = jit.fake_tensor(Int32, 3, align=4), Int32(0), jit.fake_tensor(cutlass.Float32, 3, align=4)
        vectors = (jit.fake_tensor(Int32, 1, align=4) for _ in range(2))
        compiled = jit.compile_kernel(launch, *fakes, *vectors, Int32(0), jit.current_stream(), chip=chip_of(k.device))
        for count in (1, 64, 65, 700, 32 * TILE_N, 32 * TILE_N + 1, 4999):  # the last two have a step of two and three
            rows = torch.randperm(keys, generator=generator)[:count].sort().values.int()
            blocks = -(-count // TILE_N)
            step = -(-blocks // 32)
            firsts = rows[:: step * TILE_N].tolist()
            drawn = torch.randint(0, keys, (3,), generator=generator).tolist()
            for position in (0, int(rows[-1]), keys - 1, *drawn):
                lap = int(torch.randint(0, 9, (), generator=generator))
                front = torch.tensor([lap * keys + position], dtype=torch.int32)
                come_to = int(rows[int(torch.randint(0, count, (), generator=generator))])
                compiled(rows.view(1, 1, -1), count, k, front, found, come_to)
                at_front = [i * step for i, row in enumerate(firsts) if row >= position]
                expected = at_front[0] if at_front else 0
                about = f"seed {seed}: {count} keys, front at {position}, row {come_to}"
                assert found.tolist() == [expected] * 32, about
                laps = lap + (come_to < position)
                assert int(front) == laps * keys + come_to, about
