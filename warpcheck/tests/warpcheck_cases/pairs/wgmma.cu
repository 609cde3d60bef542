// Products of warpgroups: registers and operands that are in use.
//
// TILE: A (64 x 16) and B (16 x 8) of f16 in shared memory, without swizzle, all of one value.
#include "ptx.cuh"

#define TILE                                                        \
    __shared__ alignas(128) unsigned short a[64 * 16], b[16 * 8];   \
    int t = threadIdx.x;                                            \
    float d[4] = {0, 0, 0, 0};                                      \
    u64 da = describe(a), db = describe(b);

__device__ inline u64 describe(const void* p) {  // cores of 8 x 8 lie 128 bytes apart
    return (u64)((shared(p) & 0x3ffff) >> 4) | 8ull << 16 | 16ull << 32;
}
__device__ inline void fill(unsigned short* a, unsigned short* b, unsigned short x) {
    for (int i = threadIdx.x; i < 64 * 16; i += blockDim.x) a[i] = x;
    if (threadIdx.x < 128) b[threadIdx.x] = x;
}
__device__ inline void wgmma_fence(float (&d)[4]) {
    asm volatile("wgmma.fence.sync.aligned;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}
__device__ inline void wgmma_commit() { IN("wgmma.commit_group.sync.aligned;"); }
__device__ inline void multiply(float (&d)[4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b) : "memory");
}
__device__ inline void wgmma_wait(float (&d)[4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}
__device__ inline void put_sums(float* out, const float (&d)[4]) {
    for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = d[i];
}

// PAIR block=128 | f32[512]=zeros
// A product and its fence. Fault: no wgmma.fence after the accumulator is written.
KERNEL no_fence(float* out) {
    TILE
    fill(a, b, 0x3c00);
    fence_async();
    __syncthreads();
    for (int i = 0; i < 4; ++i) d[i] = t;
    RIGHT(wgmma_fence(d);)
    multiply(d, da, db);
    wgmma_commit();
    wgmma_wait(d);
    put_sums(out, d);
}

// PAIR block=128 | f32[512]=zeros
// A product is waited for. Fault: its sums are read before the wait.
KERNEL no_wait(float* out) {
    TILE
    fill(a, b, 0x3c00);
    fence_async();
    __syncthreads();
    wgmma_fence(d);
    multiply(d, da, db);
    wgmma_commit();
    RIGHT(wgmma_wait(d);)
    put_sums(out, d);
    WRONG(wgmma_wait(d);)
}

// PAIR block=128 | f32[512]=zeros
// Threads write the operands. Fault: no fence.proxy.async.
KERNEL operands_unfenced(float* out) {
    TILE
    fill(a, b, 0x3c00);
    RIGHT(fence_async();)
    __syncthreads();
    wgmma_fence(d);
    multiply(d, da, db);
    wgmma_commit();
    wgmma_wait(d);
    put_sums(out, d);
}

// PAIR block=128 | f32[512]=zeros
// The four warps write the operands together. Fault: no barrier between them and the product.
KERNEL operands_unready(float* out) {
    TILE
    fill(a, b, 0x3c00);
    fence_async();
    RIGHT(__syncthreads();)
    wgmma_fence(d);
    multiply(d, da, db);
    wgmma_commit();
    wgmma_wait(d);
    put_sums(out, d);
}

// PAIR block=128 | f32[512]=zeros
// Operands are written for a second product. Fault: the first may still read them.
KERNEL operands_in_use(float* out) {
    TILE
    for (int i = 0; i < 2; ++i) {
        fill(a, b, i ? 0x4000 : 0x3c00);
        fence_async();
        __syncthreads();
        wgmma_fence(d);
        multiply(d, da, db);
        wgmma_commit();
        RIGHT(wgmma_wait(d);)
        __syncthreads();
    }
    wgmma_wait(d);
    put_sums(out, d);
}

// PAIR block=256 | f32[512]=zeros
// Another warpgroup writes operands again after the product. Fault: it does not wait for it.
KERNEL operands_of_others(float* out) {
    TILE
    fill(a, b, 0x3c00);
    fence_async();
    __syncthreads();
    if (t < 128) {
        wgmma_fence(d);
        multiply(d, da, db);
        wgmma_commit();
        wgmma_wait(d);
        put_sums(out, d);
    }
    RIGHT(__syncthreads();)
    if (t >= 128) a[t] = 0;
}
