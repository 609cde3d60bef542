// Barriers of a CTA and of a warp.
#include "ptx.cuh"

// PAIR block=64 | f32[64]=arange f32[64]=zeros
// Threads past the end return before the barrier, which waits for those that are left. Fault: they go on, without it.
KERNEL early_return(const float* in, float* out) {
    __shared__ float row[64];
    int t = threadIdx.x;
    row[t] = in[t];
    if (t >= 40) {
        RIGHT(return;)
        WRONG(out[t] = row[t - 8];)
    } else {
        __syncthreads();
        out[t] = row[39 - t];
    }
    WRONG(__syncthreads();)
}

// PAIR block=64 | f32[64]=arange f32[64]=zeros
// A barrier in a branch that all threads take. Fault: odd threads do not take it.
KERNEL branch(const float* in, float* out) {
    __shared__ float row[64];
    int t = threadIdx.x;
    row[t] = in[t];
    if (RIGHT(in[0] == 0) WRONG(t % 2 == 0)) __syncthreads();
    out[t] = row[63 - t];
}

// PAIR block=96 hangs | u32[96]=arange u32[96]=zeros
// A named barrier of three warps. Fault: it counts two.
KERNEL narrow_count(const u32* in, u32* out) {
    __shared__ u32 row[96];
    int t = threadIdx.x;
    row[t] = in[t];
    RIGHT(IN("barrier.sync 1, 96;");) WRONG(IN("barrier.sync 1, 64;");)
    out[t] = row[95 - t];
}

// PAIR block=64 hangs | u32[32]=arange u32[32]=zeros
// One warp arrives, the other waits. Fault: they name different barriers.
KERNEL other_barrier(const u32* in, u32* out) {
    __shared__ u32 row[32];
    int t = threadIdx.x;
    if (t < 32) {
        row[t] = in[t];
        RIGHT(IN("barrier.arrive 1, 64;");) WRONG(IN("barrier.arrive 2, 64;");)
    } else {
        IN("barrier.sync 1, 64;");
        out[t - 32] = row[63 - t];
    }
}

// PAIR block=128 | u32[128]=arange u32[128]=zeros
// Two pairs of warps, each with its barrier. Fault: both pairs use one.
KERNEL shared_barrier(const u32* in, u32* out) {
    __shared__ u32 row[128];
    int t = threadIdx.x;
    row[t] = in[t];
    u32 id = 1 + RIGHT(t / 64) WRONG(0);
    asm volatile("barrier.sync %0, 64;" ::"r"(id) : "memory");
    out[t] = row[t ^ 63];
}

// PAIR block=64 | f32[64]=arange f32[64]=zeros
// Warps exchange words. Fault: the barrier is one of the warp.
KERNEL warp_barrier(const float* in, float* out) {
    __shared__ float row[64];
    int t = threadIdx.x;
    row[t] = in[t];
    RIGHT(__syncthreads();) WRONG(__syncwarp();)
    out[t] = row[63 - t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// A loop with barriers, of the same length in each warp. Fault: the second warp has one round less.
KERNEL trip_count(const u32* in, u32* out) {
    __shared__ u32 row[64];
    int t = threadIdx.x;
    u32 x = in[t];
    int n = RIGHT(4) WRONG(4 - t / 32);
    for (int i = 0; i < n; ++i) {
        row[t] = x;
        __syncthreads();
        x += row[63 - t];
        __syncthreads();
    }
    row[63 - t] = x;
    __syncthreads();
    out[t] = row[t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// A loop that all threads leave together. Fault: each warp decides for itself.
KERNEL leave_together(const u32* in, u32* out) {
    __shared__ u32 row[64];
    int t = threadIdx.x;
    u32 x = in[t];
    row[t] = x;
    for (;;) {
        if (!RIGHT(__syncthreads_or(x < 40)) WRONG(__any_sync(0xffffffff, x < 40))) break;
        u32 y = row[63 - t];
        __syncthreads();
        x += y + 1;
        row[t] = x;
    }
    out[t] = x;
}

// PAIR block=64 | u32[128]=arange u32[128]=zeros
// A ring of one slot by two named barriers. Fault: the producer does not wait until the slot is free.
KERNEL named_ring(const u32* in, u32* out) {
    __shared__ u32 row[32];
    int t = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        for (int i = 0; i < 4; ++i) {
            RIGHT(if (i) IN("barrier.sync 2, 64;");)
            row[t] = in[32 * i + t];
            IN("barrier.arrive 1, 64;");
        }
    } else {
        for (int i = 0; i < 4; ++i) {
            IN("barrier.sync 1, 64;");
            out[32 * i + t] = row[31 - t];
            RIGHT(if (i < 3) IN("barrier.arrive 2, 64;");)
        }
    }
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// Half a warp exchanges words. Fault: the mask of __syncwarp leaves out the upper lanes of the half.
KERNEL half_mask(const u32* in, u32* out) {
    __shared__ u32 row[16];
    int t = threadIdx.x;
    if (t < 16) {
        row[t] = in[t];
        if (RIGHT(true) WRONG(t < 8)) __syncwarp(RIGHT(0xffff) WRONG(0xff));
        out[t] = row[15 - t];
    }
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// Both halves of a warp meet at their own __syncwarp. Fault: the mask of the second names the first.
KERNEL mask_of_others(const u32* in, u32* out) {
    __shared__ u32 row[32];
    int t = threadIdx.x;
    row[t] = in[t];
    if (t < 16) {
        __syncwarp(0xffff);
        out[t] = row[15 - t];
    } else {
        RIGHT(__syncwarp(0xffff0000);) WRONG(__syncwarp(0x0000ffff);)
        out[t] = row[47 - t];
    }
}
