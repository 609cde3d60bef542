"""Hand-overs of a place in shared memory by one lane for its warp, each right or with one omission.

    # what that tool says of each, on a GPU
    PYTHONPATH=warpcheck/tests compute-sanitizer --tool racecheck python -m warpcheck_cases.hand_overs

A warp fills a place, with a bulk copy or with stores; another warp reads it, and says by an mbarrier that it is free:
every lane for itself, or one lane after a barrier of the warp. Where the warp is known to be `converged`, ptxas leaves
no instruction for that barrier, as in Hopper's backward, whose products all lanes have to reach together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDS = 8
_COPIED = 128  # floats of a round; the first 32 are read

_PTX = """.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 room[];
.visible .entry NAME(.param .u64 out, .param .u64 in)
{
.reg .pred p, e, w; .reg .b32 tid, lane, warp, buf, full, free, mine, i, parity, x; .reg .b64 o, s; .reg .f32 a, sum;
ld.param.u64 o, [out]; ld.param.u64 s, [in];
mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;
mov.u32 buf, room; add.u32 full, buf, 2048; add.u32 free, buf, 2056; mov.f32 sum, 0f00000000;
setp.ne.u32 p, tid, 0; @p bra ready;
mbarrier.init.shared::cta.b64 [full], FILLS; mbarrier.init.shared::cta.b64 [free], FREES;
fence.mbarrier_init.release.cluster;
ready: bar.sync 0; mov.u32 i, 0;
setp.ne.u32 w, warp, 0; @w bra consumer;
producer: and.b32 parity, i, 1; xor.b32 parity, parity, 1;
await_free: mbarrier.try_wait.parity.shared::cta.b64 p, [free], parity; @!p bra await_free;
FILL
add.u64 s, s, 512; add.u32 i, i, 1; setp.lt.u32 p, i, ROUNDS; @p bra producer;
ret;
consumer: and.b32 parity, i, 1;
await_full: mbarrier.try_wait.parity.shared::cta.b64 p, [full], parity; @!p bra await_full;
CONVERGE
shl.b32 mine, lane, 2; xor.b32 mine, mine, 124; add.u32 mine, mine, buf;
ld.shared.f32 a, [mine]; add.f32 sum, sum, a;
HAND_OVER
add.u32 i, i, 1; setp.lt.u32 p, i, ROUNDS; @p bra consumer;
shl.b32 x, lane, 2; cvt.u64.u32 s, x; add.u64 o, o, s; st.global.f32 [o], sum;
ret;
}
"""
_BULK = """elect.sync _|e, 0xffffffff;
@e mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 512;
@e cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [buf], [s], 512, [full];"""
_STORES = """shl.b32 mine, lane, 2; cvt.u64.u32 o, mine; add.u64 o, o, s; ld.global.f32 a, [o]; add.u32 mine, mine, buf;
st.shared.f32 [mine], a;
mbarrier.arrive.shared::cta.b64 _, [full];"""
_ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [free];"
_ELECTED = f"elect.sync _|e, 0xffffffff;\n@e {_ARRIVE}"
_FIRST_LANE = f"setp.eq.u32 e, lane, 0;\n@e {_ARRIVE}"
_BARRIER = "bar.warp.sync 0xffffffff;\n"
_FENCE = "fence.proxy.async.shared::cta;\n"

# Two warps reach a named barrier, each at an instruction of its own.
_TWO_PLACES = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry NAME(.param .u64 out, .param .u64 in)
{
.reg .pred p; .reg .b32 tid, x; .reg .b64 o, s; .reg .f32 a;
ld.param.u64 o, [out]; ld.param.u64 s, [in];
mov.u32 tid, %tid.x; setp.ge.u32 p, tid, 32;
@p bra second;
bar.sync 1, 64; ret;
second: bar.sync 1, 64; ret;
}
"""


@dataclass(frozen=True)
class HandOver:
    """A kernel of two warps. frees: arrivals that free the place. right: whether nothing is left out."""

    name: str
    fill: str = _BULK
    hand_over: str = _ELECTED
    frees: int = 1
    right: bool = True
    template: str = _PTX

    @property
    def ptx(self) -> str:
        fills, converge = "1" if self.fill is _BULK else "32", _BARRIER if self.name.startswith("converged") else ""
        words = {"NAME": self.name, "FILLS": fills, "FREES": str(self.frees), "FILL": self.fill, "CONVERGE": converge}
        text = self.template
        for word, meaning in (words | {"HAND_OVER": self.hand_over, "ROUNDS": str(ROUNDS)}).items():
            text = text.replace(word, meaning)
        return text

    @property
    def expected(self) -> np.ndarray:
        if self.template is not _PTX:
            return np.zeros(32, np.float32)
        return rows()[:, :32].sum(0)[np.arange(32) ^ 31]


KERNELS = (
    HandOver("bulk_each_lane", hand_over=_ARRIVE, frees=32),
    HandOver("bulk_barrier_elected", hand_over=_BARRIER + _ELECTED),
    HandOver("bulk_barrier_first_lane", hand_over=_BARRIER + _FIRST_LANE),
    HandOver("bulk_fence_barrier_elected", hand_over=_FENCE + _BARRIER + _ELECTED),
    HandOver("bulk_named_barrier_elected", hand_over="bar.sync 1, 32;\n" + _ELECTED),
    HandOver("bulk_elected", right=False),
    HandOver("converged_bulk_each_lane", hand_over=_ARRIVE, frees=32),
    HandOver("converged_bulk_barrier_elected", hand_over=_BARRIER + _ELECTED),
    HandOver("converged_bulk_fence_barrier_elected", hand_over=_FENCE + _BARRIER + _ELECTED),
    HandOver("converged_bulk_elected", right=False),
    HandOver("stores_each_lane", _STORES, _ARRIVE, 32),
    HandOver("stores_barrier_elected", _STORES, _BARRIER + _ELECTED),
    HandOver("converged_stores_barrier_elected", _STORES, _BARRIER + _ELECTED),
    HandOver("stores_elected", _STORES, right=False),
    HandOver("named_barrier_at_two_places", template=_TWO_PLACES),
)


def rows() -> np.ndarray:
    """What the rounds hand over."""
    return np.arange(ROUNDS * _COPIED, dtype=np.float32).reshape(ROUNDS, _COPIED)


def shape() -> dict:
    """Of every launch."""
    return dict(grid=(1, 1, 1), block=(64, 1, 1), cluster=(1, 1, 1), smem_bytes=4096)


def main() -> None:
    from warpcheck.tools.libcuda import Device

    device = Device()
    for kernel in KERNELS:
        out = np.zeros(32, np.float32)
        addresses = [device.allocate(x.tobytes()) for x in (out, rows())]
        print(f"{kernel.name}, {'right' if kernel.right else 'with an omission'}:", flush=True)
        device.launch(kernel.ptx, kernel.name, **shape(), params=[np.uint64(x).tobytes() for x in addresses])
        left = np.frombuffer(device.read(addresses[0], out.nbytes), np.float32)
        print("    the sums are right" if (left == kernel.expected).all() else "    the sums are wrong", flush=True)


if __name__ == "__main__":
    main()
