"""A report that a stranger can act on: where, in what, and by which command again."""

import numpy as np
from warpcheck_cases.handwritten import entry

from warpcheck import Emulated

# A store in a function that another one calls, twice, of which the kernel calls one at line 40 and one at line 50.
INLINED = """.loc 1 40 1
    .loc 2 7 3, function_name $L__info_string0, inlined_at 1 40 1
    .loc 3 9 5, function_name $L__info_string0, inlined_at 2 7 3
    st.shared.b32 [%r2], %r0;
    .loc 1 50 1
    .loc 2 7 3, function_name $L__info_string0, inlined_at 1 50 1
    .loc 3 9 5, function_name $L__info_string0, inlined_at 2 7 3
    st.shared.b32 [%r2+64], %r0;
    .loc 1 60 1
    ld.shared.b32 %r3, [%r2];"""
FILES = '.file 1 "kernel.cu"\n.file 2 "outer.cuh"\n.file 3 "inner.cuh"\n'


def test_inlined_calls_are_a_stack() -> None:
    gpu = Emulated("sm_100a", on_finding="collect")
    gpu.launch(entry(INLINED, 0) + FILES, grid=1, block=64, smem_bytes=256)
    stores = [finding for finding in gpu.findings if finding.location.line == 9]
    assert {finding.location.calls for finding in stores} == {
        (("outer.cuh", 7), ("kernel.cu", 40)), (("outer.cuh", 7), ("kernel.cu", 50)),
    }, "findings of the two calls are two"  # fmt: skip
    stores.sort(key=lambda finding: finding.location.calls)
    text = str(stores[0])
    assert "inner.cuh:9, inlined at outer.cuh:7, inlined at kernel.cu:40" in text
    others = [finding.others[0][1] for finding in gpu.findings] + [finding.location for finding in gpu.findings]
    assert all(place.calls == () for place in others if place.line == 60)
    assert stores[0].as_dict()["place"]["calls"] == [("outer.cuh", 7), ("kernel.cu", 40)]


def test_nvrtc_names_inlined_calls(nvrtc) -> None:
    source = """__device__ __forceinline__ void put(int* p, int v) {
        *p = v;
    }
    extern "C" __global__ void k(int* x) {
        __shared__ int s[64];
        put(s + threadIdx.x, 1);
        x[threadIdx.x] = s[threadIdx.x ^ 32];
    }"""
    gpu = Emulated("sm_90a", on_finding="collect")
    gpu.launch(nvrtc.compile_cuda(source, "sm_90a"), grid=1, block=64, args=[np.zeros(64, np.int32)])
    (race,) = (finding for finding in gpu.findings if finding.kind == "race")
    (store,) = (place for place in (race.location, race.others[0][1]) if "st.shared" in place.ptx_text)
    assert store.line == 2 and [line for _, line in store.calls] == [6]
