"""Hand-written PTX on the engine: `launch(body, arrays)` makes the body an entry with one pointer per array."""

import struct

import numpy as np
from warpcheck.machine import Allocation, EmulationOptions, Machine, load_core

HEADER = ".version 8.8\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
# Copies 512 bytes in and out of shared memory, in bulk; each thread adds one to its word.
ROUND_TRIP = """
    setp.ne.u32 %p0, %r0, 0;
    add.u32 %r4, %r2, 128;
    @!%p0 mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @%p0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {expected};
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%a0], 512, [%r2];
WAIT:
    {wait}
    shl.b32 %r5, %r0, 2; add.u32 %r6, %r4, %r5;
    ld.shared.b32 %r7, [%r6];
    add.u32 %r7, %r7, 1;
    st.shared.b32 [%r6], %r7;
    {fence}
    bar.sync 0;
    @%p0 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%a1], [%r4], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
"""
WAIT = "LOOP: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra LOOP;"


BOUNDED = ".minnctapersm 1"  # without a bound of registers, ptxas ignores setmaxnreg


def entry(body: str, pointers: int, target: str = "sm_100a") -> str:
    """Registers: %p, %r (b32), %d (b64), %f. %a0, %a1, ... are the pointers; %r0 thread, %r1 CTA, %r2 shared memory."""
    params = ", ".join(f".param .u64 q{i}" for i in range(pointers))
    loads = "\n".join(f"ld.param.u64 %a{i}, [q{i}];" for i in range(pointers))
    registers = ".reg .pred %p<16>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .f32 %f<16>; "
    registers += f".reg .b64 %a<{max(pointers, 1)}>;"
    start = "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.b32 %r2, smem;"
    text = f".visible .entry test({params}) {BOUNDED} {{\n{registers}\n{loads}\n{start}\n{body}\nret;\n}}\n"
    return HEADER.format(target=target) + text


def pointers(arrays) -> dict[str, list]:
    """Arguments of `Machine.launch`: one pointer parameter for each array, and the arrays as global memory."""
    return {
        "params": [struct.pack("<Q", a.ctypes.data) for a in arrays],
        "allocations": [Allocation(a.ctypes.data, a.nbytes, f"array {i}") for i, a in enumerate(arrays)],
    }


def launch(
    body: str, arrays=(), *, grid=1, block=32, cluster=1, smem=4096, target="sm_100a", cooperative=False, **options
):
    """Run the body on NumPy arrays in place; the report. options: fields of `EmulationOptions`."""
    arrays = [np.ascontiguousarray(a) if not a.flags.c_contiguous else a for a in arrays]
    return Machine(target, EmulationOptions(**options)).launch(
        entry(body, len(arrays), target), "test", grid=(grid, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1),
        smem_bytes=smem, cooperative=cooperative, **pointers(arrays),
    )  # fmt: skip


def data_and_map() -> list[np.ndarray]:
    """512 bytes of data, and a tensor map of the first 128."""
    data = np.zeros(160, np.uint32)
    data = data[-data.ctypes.data % 64 // 4 :][:128]
    map_ = np.zeros(64, np.uint32)
    map_ = map_[-map_.ctypes.data % 64 // 4 :][:32]
    packed = load_core().encode_tensormap({
        "base": data.ctypes.data, "type": 2, "tf32": False, "swizzle": 0, "atomicity": 0, "interleave": 0,
        "nan_fill": False, "extent": [32], "stride": [0], "box": [32], "element_stride": [1],
    })  # fmt: skip
    map_.view(np.uint8)[:] = np.frombuffer(packed, np.uint8)
    return [data, map_]
