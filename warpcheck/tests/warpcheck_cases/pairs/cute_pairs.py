"""Pairs in CuTe DSL: a right kernel, and the same one with a mistake.

A kernel takes x and out, 256 floats each, and the name of its mistake; "" is the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from warpcheck.findings import Severity
from warpcheck.machine import interleavings

from warpcheck import emulate

WORDS, ROUNDS = 32, 4


@cute.kernel
def bulk_load(x: cute.Tensor, out: cute.Tensor, mistake: cutlass.Constexpr[str]):
    """One thread loads a row in bulk; all read it."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(Float32, cute.make_layout(256), byte_alignment=128)
    full = smem.allocate_array(Int64)
    if thread == 0:
        cute.arch.mbarrier_init(full, 1)
        if const_expr(mistake != "unpublished barrier"):
            cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread == 32:
        cute.arch.mbarrier_arrive_and_expect_tx(full, 1024)
        copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=8192)
        cute.copy(copy, x, row, mbar_ptr=full)
    if const_expr(mistake != "no wait"):
        cute.arch.mbarrier_wait(full, 1 if const_expr(mistake == "wrong phase") else 0)
    for i in cutlass.range_constexpr(4):
        out[i * 64 + thread] = row[i * 64 + thread]
    cute.arch.mbarrier_wait(full, 0)


@cute.kernel
def bulk_store(x: cute.Tensor, out: cute.Tensor, mistake: cutlass.Constexpr[str]):
    """All threads fill a row, one stores it in bulk, twice."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(Float32, cute.make_layout(64), byte_alignment=128)
    for i in cutlass.range_constexpr(2):
        row[thread] = x[i * 64 + thread]
        if const_expr(mistake != "no proxy fence"):
            cute.arch.fence_view_async_shared()
        if const_expr(mistake != "no barrier"):
            cute.arch.sync_threads()
        if thread == 0:
            copy = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Float32, num_bits_per_copy=2048)
            cute.copy(copy, row, cute.local_tile(out, (64,), (i,)))
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(mistake != "source in use"):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_threads()


@cute.kernel
def ring(x: cute.Tensor, out: cute.Tensor, mistake: cutlass.Constexpr[str]):
    """Warp 0 fills a ring of two rows, warp 1 takes them."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    rows = smem.allocate_tensor(Float32, cute.make_layout((2, WORDS), stride=(WORDS, 1)), byte_alignment=128)
    full, free = smem.allocate_array(Int64, 2), smem.allocate_array(Int64, 2)
    if thread == 0:
        for slot in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(full + slot, 33 if const_expr(mistake == "one arrival too many") else WORDS)
            cute.arch.mbarrier_init(free + slot, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread < 32:
        for i in cutlass.range_constexpr(ROUNDS):
            if const_expr(mistake != "no wait for a free slot"):
                cute.arch.mbarrier_wait(free + i % 2, (i // 2 + 1) % 2)
            rows[i % 2, thread] = x[i * WORDS + thread]
            cute.arch.mbarrier_arrive(full + i % 2)
    else:
        lane = thread - 32
        for i in cutlass.range_constexpr(ROUNDS):
            if const_expr(mistake != "no wait for a full slot"):
                cute.arch.mbarrier_wait(full + i % 2, 0 if const_expr(mistake == "phase stays") else i // 2 % 2)
            out[i * WORDS + lane] = rows[i % 2, lane] * 2.0
            if const_expr(mistake != "no warp barrier"):
                cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(free + i % 2)


@cute.kernel
def named(x: cute.Tensor, out: cute.Tensor, mistake: cutlass.Constexpr[str]):
    """Warp 0 writes a row that warps 1 and 2 read, handed over by named barriers."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(Float32, cute.make_layout(WORDS), byte_alignment=128)
    for i in cutlass.range_constexpr(2):
        if thread < 32:
            if const_expr(i > 0 and mistake != "no barrier back"):
                cute.arch.barrier(barrier_id=2, number_of_threads=96)
            row[thread] = x[i * WORDS + thread]
            cute.arch.barrier_arrive(barrier_id=1, number_of_threads=96)
        else:
            count = 64 if const_expr(mistake == "readers alone") else 96
            cute.arch.barrier(barrier_id=1, number_of_threads=count)
            out[i * 64 + thread - 32] = row[thread % 32]
            if const_expr(i == 0 and mistake != "no barrier back"):
                cute.arch.barrier_arrive(barrier_id=2, number_of_threads=96)


@cute.kernel
def pair_of_ctas(x: cute.Tensor, out: cute.Tensor, mistake: cutlass.Constexpr[str]):
    """Each of two CTAs writes the row of the other, and then reads its own."""
    thread, _, _ = cute.arch.thread_idx()
    rank = cute.arch.block_idx_in_cluster()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(Float32, cute.make_layout(WORDS), byte_alignment=128)
    row[thread] = 0.0
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    cute.arch.inline_ptx(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; st.shared::cluster.f32 [there], {$r2};}",
        read_only_args=[(row.iterator + thread).toint(), Int32(rank ^ 1), x[rank * WORDS + thread]],
    )
    if const_expr(mistake == "barrier of the CTA"):
        cute.arch.sync_threads()
    elif const_expr(mistake == "relaxed arrival"):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    out[rank * WORDS + thread] = row[thread]


@cute.kernel
def remote_arrival(x: cute.Tensor, out: cute.Tensor, mistake: cutlass.Constexpr[str]):
    """CTA 1 gives something back to CTA 0, which must still be there."""
    thread, _, _ = cute.arch.thread_idx()
    rank = cute.arch.block_idx_in_cluster()
    smem = cutlass.memory.SmemAllocator()
    free = smem.allocate_array(Int64)
    if thread == 0:
        cute.arch.mbarrier_init(free, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    out[rank * WORDS + thread] = x[rank * WORDS + thread]
    if rank == 1:
        if thread == 0:
            cute.arch.mbarrier_arrive(free, 0)
    else:
        if const_expr(mistake != "ends before the arrival"):
            cute.arch.mbarrier_wait(free, 0)


@cute.kernel
def async_copy(x: cute.Tensor, out: cute.Tensor, mistake: cutlass.Constexpr[str]):
    """Each thread copies a word to shared memory and reads that of its neighbour."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(Float32, cute.make_layout(64), byte_alignment=128)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
    cute.copy(atom, cute.local_tile(x, (1,), (thread,)), cute.local_tile(row, (1,), (thread,)))
    cute.arch.cp_async_commit_group()
    if const_expr(mistake != "no wait"):
        cute.arch.cp_async_wait_group(1 if const_expr(mistake == "waits for the group before") else 0)
    if const_expr(mistake != "no barrier"):
        cute.arch.sync_threads()
    out[thread] = row[thread ^ 32]


@cute.jit
def _launch(
    kernel: cutlass.Constexpr[Callable], x: cute.Tensor, out: cute.Tensor, mistake: cutlass.Constexpr[str],
    block: cutlass.Constexpr[int], cluster: cutlass.Constexpr[int],
):  # fmt: skip
    kernel(x, out, mistake).launch(grid=(cluster, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1))


@dataclass(frozen=True)
class CutePair:
    kernel: Any
    mistake: str
    block: int = 64
    cluster: int = 1
    chip: str = "sm_90a"

    @property
    def id(self) -> str:
        return f"{self.kernel.__name__}, {self.mistake}"


def pairs() -> list[CutePair]:
    """Chips alternate, so that both kinds of machine code are read."""
    listed = [
        (bulk_load, ("unpublished barrier", "no wait", "wrong phase"), 64, 1),
        (bulk_store, ("no proxy fence", "no barrier", "source in use"), 64, 1),
        (ring, ("one arrival too many", "no wait for a free slot", "no wait for a full slot", "phase stays",
                "no warp barrier"), 64, 1),
        (named, ("no barrier back", "readers alone"), 96, 1),
        (pair_of_ctas, ("barrier of the CTA", "relaxed arrival"), 32, 2),
        (remote_arrival, ("ends before the arrival",), 32, 2),
        (async_copy, ("no wait", "waits for the group before", "no barrier"), 64, 1),
    ]  # fmt: skip
    chips = ("sm_90a", "sm_100a")
    return [
        CutePair(kernel, mistake, block, cluster, chips[number % 2])
        for kernel, mistakes, block, cluster in listed
        for number, mistake in enumerate(mistakes)
    ]


def told(pair: CutePair, mistake: str, *, seed: int = 0, orders: int = 6) -> list[str]:
    """Kinds of the errors of the kernel with a mistake ("" for none), each once."""
    (first, schedule), *others = interleavings(seed, orders)
    with emulate(pair.chip, seed=first, schedule=schedule, on_finding="collect") as gpu:
        gpu.repeat(others)
        x, out = torch.randn(256), torch.zeros(256)
        _launch(pair.kernel, from_dlpack(x), from_dlpack(out), mistake, pair.block, pair.cluster)
    return sorted({finding.kind for finding in gpu.findings.of(Severity.ERROR)})
