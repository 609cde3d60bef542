// Threads that exchange words through shared memory.
#include "ptx.cuh"

// PAIR block=64 | f32[64]=arange f32[64]=zeros
// Two warps reverse a row. Fault: no barrier between the store and the load.
KERNEL exchange(const float* in, float* out) {
    __shared__ float row[64];
    int t = threadIdx.x;
    row[t] = in[t];
    RIGHT(__syncthreads();)
    out[t] = row[63 - t];
}

// PAIR block=64 | f32[256]=arange f32[256]=zeros
// One row of shared memory serves four rounds. Fault: no barrier before the row is written again.
KERNEL rounds(const float* in, float* out) {
    __shared__ float row[64];
    int t = threadIdx.x;
    for (int i = 0; i < 4; ++i) {
        row[t] = in[64 * i + t];
        __syncthreads();
        out[64 * i + t] = row[63 - t];
        RIGHT(__syncthreads();)
    }
}

// PAIR block=64 | f32[256]=arange f32[256]=zeros
// Two rows take turns, so that one barrier a round is enough. Fault: one row, and still one barrier.
KERNEL two_rows(const float* in, float* out) {
    __shared__ float rows[2][64];
    int t = threadIdx.x;
    for (int i = 0; i < 4; ++i) {
        float* row = rows[RIGHT(i % 2) WRONG(0)];
        row[t] = in[64 * i + t];
        __syncthreads();
        out[64 * i + t] = row[63 - t];
    }
}

// PAIR block=128 | f32[128]=arange f32[1]=zeros
// A sum by halves. Fault: no barrier between the steps.
KERNEL tree_sum(const float* in, float* out) {
    __shared__ float part[128];
    int t = threadIdx.x;
    part[t] = in[t];
    __syncthreads();
    for (int half = 64; half > 0; half /= 2) {
        if (t < half) part[t] += part[t + half];
        RIGHT(__syncthreads();)
    }
    if (t == 0) *out = part[0];
}

// PAIR block=32 | f32[32]=arange f32[1]=zeros
// The last steps of a sum, in one warp, on volatile words. Fault: lanes are taken to run together.
KERNEL warp_sum(const float* in, float* out) {
    __shared__ volatile float part[64];
    int t = threadIdx.x;
    part[t] = in[t];
    part[t + 32] = 0;
    __syncwarp();
    for (int half = 16; half > 0; half /= 2) {
        float sum = part[t] + part[t + half];
        RIGHT(__syncwarp();)
        part[t] = sum;
        RIGHT(__syncwarp();)
    }
    if (t == 0) *out = part[0];
}

// PAIR block=32 | f32[32]=arange f32[32]=zeros
// Lanes read their neighbour's word. Fault: no __syncwarp.
KERNEL neighbour_lane(const float* in, float* out) {
    __shared__ float row[32];
    int t = threadIdx.x;
    row[t] = in[t];
    RIGHT(__syncwarp();)
    out[t] = row[t ^ 1];
}

// PAIR block=64 | f32[64]=arange f32[64]=zeros
// An inclusive scan in place. Fault: no barrier between the loads of a step and its stores.
KERNEL scan(const float* in, float* out) {
    __shared__ float row[64];
    int t = threadIdx.x;
    row[t] = in[t];
    __syncthreads();
    for (int d = 1; d < 64; d *= 2) {
        float add = t >= d ? row[t - d] : 0;
        RIGHT(__syncthreads();)
        row[t] += add;
        __syncthreads();
    }
    out[t] = row[t];
}

// PAIR block=128 | u32[128]=arange u32[8]=zeros
// A histogram. Fault: increments that are no atomics.
KERNEL histogram(const u32* in, u32* out) {
    __shared__ u32 bins[8];
    int t = threadIdx.x;
    if (t < 8) bins[t] = 0;
    __syncthreads();
    RIGHT(atomicAdd(&bins[in[t] % 8], 1);)
    WRONG(bins[in[t] % 8] += 1;)
    __syncthreads();
    if (t < 8) out[t] = bins[t];
}

// PAIR grid=4 block=64 | u32[1]=zeros u32[64]=zeros
// CTAs take tiles from a counter. Fault: the next tile is stored while others still read the last one.
KERNEL tile_counter(u32* counter, u32* out) {
    __shared__ u32 tile;
    for (;;) {
        if (threadIdx.x == 0) tile = atomicAdd(counter, 1);
        __syncthreads();
        u32 mine = tile;
        RIGHT(__syncthreads();)
        if (mine >= 8) break;
        if (threadIdx.x < 8) out[8 * mine + threadIdx.x] = mine;
    }
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// Each thread has one byte of a word that it shares. Fault: two threads have the same byte.
KERNEL own_bytes(const u32* in, u32* out) {
    __shared__ unsigned char bytes[64];
    int t = threadIdx.x;
    bytes[RIGHT(t) WRONG(t % 63)] = in[t];
    WRONG(if (t == 63) bytes[t] = 63;)
    __syncthreads();
    out[t] = bytes[63 - t];
}

// PAIR block=64 | u32[32]=arange u32[32]=zeros
// One warp hands a row to another by a volatile flag. Fault: no fence between the row and the flag.
KERNEL shared_flag(const u32* in, u32* out) {
    __shared__ u32 row[32];
    __shared__ volatile u32 flag;
    int t = threadIdx.x;
    if (t == 0) flag = 0;
    __syncthreads();
    if (t < 32) {
        row[t] = in[t];
        __syncwarp();
        if (t == 0) {
            RIGHT(__threadfence_block();)
            flag = 1;
        }
    } else {
        UNTIL(flag);
        RIGHT(__threadfence_block();)
        out[t - 32] = row[63 - t];
    }
}

// PAIR block=64 | f32[64]=arange f32[64]=zeros
// Bytes serve as keys, then as sums. Fault: no barrier between the two uses.
KERNEL two_uses(const float* in, float* out) {
    __shared__ union { u32 keys[64]; float sums[64]; } both;
    int t = threadIdx.x;
    both.keys[t] = 63 - t;
    __syncthreads();
    u32 key = both.keys[t ^ 32];
    RIGHT(__syncthreads();)
    both.sums[t] = in[key];
    __syncthreads();
    out[t] = both.sums[63 - t];
}

// PAIR block=64 | u32[64]=arange u32[1]=zeros
// Warps sum by shuffles and leave one word each. Fault: the first warp adds them before all are there.
KERNEL block_sum(const u32* in, u32* out) {
    __shared__ u32 sums[2];
    int t = threadIdx.x;
    u32 sum = __reduce_add_sync(0xffffffff, in[t]);
    if (t % 32 == 0) sums[t / 32] = sum;
    RIGHT(__syncthreads();)
    if (t == 0) *out = sums[0] + sums[1];
}
