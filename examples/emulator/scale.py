"""Multiply a matrix by a number: every CTA scales one tile in shared memory and stores it by TMA.

    python examples/emulator/scale.py --rows 256                                   # on a GPU
    warpcheck run --chip sm_100a --seeds 10 -- examples/emulator/scale.py --rows 256

It prints "right" on every chip so far. docs/results/emulator-findings.md finds its mistake and repairs it.
"""

import argparse

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

TILE, THREADS = 64, 128


@cute.kernel
def scale_kernel(x: cute.Tensor, store: cute.CopyAtom, out: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    row, column, _ = cute.arch.block_idx()
    layout = cute.make_layout((TILE, TILE), stride=(TILE, 1))
    tile = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, layout, byte_alignment=128)
    source = cute.local_tile(x, (TILE, TILE), (row, column))
    for i in cutlass.range(TILE * TILE // THREADS):
        place = ((i * THREADS + thread) // TILE, (i * THREADS + thread) % TILE)
        tile[place] = source[place] * factor
    cute.arch.sync_threads()
    if thread < 32:
        target = cute.local_tile(out, (TILE, TILE), (row, column))
        shared, glob = cpasync.tma_partition(
            store, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(target, 0, 2)
        )
        with cute.arch.elect_one():
            cute.copy(store, shared, glob)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def scale(x: cute.Tensor, out: cute.Tensor, factor: cutlass.Float32):
    layout = cute.make_layout((TILE, TILE), stride=(TILE, 1))
    store, coordinates = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, layout, (TILE, TILE))
    grid = (x.shape[0] // TILE, x.shape[1] // TILE, 1)
    scale_kernel(x, store, coordinates, factor).launch(grid=grid, block=(THREADS, 1, 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    rows = parser.parse_args().rows
    x = torch.randn(rows, 128, device="cuda")
    out = torch.empty_like(x)
    scale(from_dlpack(x), from_dlpack(out), 2.0)
    torch.testing.assert_close(out, 2 * x)
    print("right")
