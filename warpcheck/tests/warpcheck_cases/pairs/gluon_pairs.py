"""Pairs in Gluon, which Triton's ConSan can check on a GPU, and warpcheck anywhere:

TRITON_INSTRUMENTATION_MODE=consan python gluon_pairs.py copy_unwaited wrong
warpcheck run --chip sm_90a -- gluon_pairs.py copy_unwaited wrong
"""

import sys

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS, COLUMNS = 64, 32
copy_in, load_tile, store_tile = (
    getattr(module, new, None) or getattr(module, old)  # Triton 3.9 renamed them; an old name raises when it is called
    for module, new, old in (
        (async_copy, "async_load", "async_copy_global_to_shared"),
        (tma, "async_load", "async_copy_global_to_shared"),
        (tma, "async_store", "async_copy_shared_to_global"),
    )
)


@gluon.jit
def places(layout: gl.constexpr):
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, 32, gl.SliceLayout(0, layout))
    return rows[:, None] * 32 + columns[None, :]


@gluon.jit
def copy_pair(x, out, WAITS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    i = places(layout)
    tile = gl.allocate_shared_memory(gl.float32, [64, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    copy_in(tile, x + i)
    async_copy.commit_group()
    if WAITS:
        async_copy.wait_group(0)
    gl.store(out + i, tile.load(layout))
    async_copy.wait_group(0)


@gluon.jit
def load_pair(x, out, WAITS: gl.constexpr, PHASE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [64, 32], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, 64 * 32 * 4)
    load_tile(x, [0, 0], full, tile)
    if WAITS:
        mbarrier.wait(full, PHASE)
    gl.store(out + places(layout), tile.load(layout))
    mbarrier.wait(full, 0)
    mbarrier.invalidate(full)


@gluon.jit
def store_pair(y, x, WAITS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [64, 32], y.layout)
    for k in range(2):
        tile.store(gl.load(x + places(layout)) + k)
        fence_async_shared()
        store_tile(y, [64 * k, 0], tile)
        if WAITS:
            tma.store_wait(0)
    tma.store_wait(0)


NAMES = ("copy_unwaited", "load_unwaited", "load_phase", "store_source_in_use")


def main() -> None:
    name, side = sys.argv[1:]
    right = {"right": True, "wrong": False}[side]
    if hasattr(triton, "set_allocator"):  # ConSan keeps its state in memory of the caller
        triton.set_allocator(lambda size, _alignment, _stream: torch.zeros(size, dtype=torch.int8, device="cuda"))
    x, y, out = (torch.zeros(2 * ROWS, COLUMNS, device="cuda") for _ in range(3))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    tiles_x, tiles_y = (TensorDescriptor.from_tensor(t, [ROWS, COLUMNS], layout) for t in (x, y))
    if name == "copy_unwaited":
        copy_pair[(1,)](x, out, right)
    elif name == "load_unwaited":
        load_pair[(1,)](tiles_x, out, right, 0)
    elif name == "load_phase":
        load_pair[(1,)](tiles_x, out, True, int(not right))
    elif name == "store_source_in_use":
        store_pair[(1,)](tiles_y, x, right)
    else:
        raise SystemExit(f"there is no pair {name!r}, expected one of {', '.join(NAMES)}")
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
