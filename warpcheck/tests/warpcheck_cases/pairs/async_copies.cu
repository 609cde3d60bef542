// cp.async, and matrices of warps in shared memory.
#include "ptx.cuh"

// PAIR block=32 | f32[128]=arange f32[128]=zeros
// A thread reads what it copied. Fault: it does not wait for the copy.
KERNEL own_copy(const float4* in, float4* out) {
    __shared__ float4 row[32];
    int t = threadIdx.x;
    copy16(&row[t], &in[t]);
    commit_copies();
    RIGHT(WAIT_COPIES(0);)
    out[t] = row[t];
}

// PAIR block=64 | f32[256]=arange f32[256]=zeros
// Threads read what others copied. Fault: each waits for its own copies alone.
KERNEL others_copy(const float4* in, float4* out) {
    __shared__ float4 row[64];
    int t = threadIdx.x;
    copy16(&row[t], &in[t]);
    commit_copies();
    WAIT_COPIES(0);
    RIGHT(__syncthreads();)
    out[t] = row[63 - t];
}

// PAIR block=32 | f32[512]=arange f32[512]=zeros
// Two copies are in flight, the older one is waited for. Fault: the wait lets both stay in flight.
KERNEL copies_in_flight(const float4* in, float4* out) {
    __shared__ float4 rows[2][32];
    int t = threadIdx.x;
    copy16(&rows[0][t], &in[t]);
    commit_copies();
    for (int i = 0; i < 4; ++i) {
        if (i < 3) copy16(&rows[(i + 1) % 2][t], &in[32 * (i + 1) + t]);
        commit_copies();
        RIGHT(WAIT_COPIES(1);) WRONG(WAIT_COPIES(2);)
        out[32 * i + t] = rows[i % 2][t];
    }
}

// PAIR block=32 | f32[128]=arange f32[128]=zeros
// A copy belongs to a group. Fault: no group is committed before the wait.
KERNEL uncommitted_copy(const float4* in, float4* out) {
    __shared__ float4 row[32];
    int t = threadIdx.x;
    copy16(&row[t], &in[t]);
    RIGHT(commit_copies();)
    WAIT_COPIES(0);
    out[t] = row[t];
}

// PAIR block=64 | f32[1024]=arange f32[1024]=zeros
// A ring of two slots that warps read crosswise. Fault: a slot is copied to while the other warp still reads it.
KERNEL copy_ring(const float4* in, float4* out) {
    __shared__ float4 rows[2][64];
    int t = threadIdx.x;
    copy16(&rows[0][t], &in[t]);
    commit_copies();
    for (int i = 0; i < 4; ++i) {
        if (i < 3) copy16(&rows[(i + 1) % 2][t], &in[64 * (i + 1) + t]);
        commit_copies();
        WAIT_COPIES(1);
        __syncthreads();
        out[64 * i + t] = rows[i % 2][63 - t];
        RIGHT(__syncthreads();)
    }
}

// PAIR block=64 | f32[128]=arange f32[128]=zeros
// Copies of one warp arrive at an mbarrier for it. Fault: they raise the pending count by themselves, without .noinc.
KERNEL copies_arrive(const float4* in, float4* out) {
    __shared__ float4 row[32];
    __shared__ u64 full;
    int t = threadIdx.x;
    if (t == 0) init(&full, 32);
    __syncthreads();
    if (t < 32) {
        copy16(&row[t], &in[t]);
        RIGHT(asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared(&full)) : "memory");)
        WRONG(asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared(&full)) : "memory");)
    } else {
        wait(&full, 0);
        out[t - 32] = row[63 - t];
    }
}

// PAIR block=64 | f32[128]=arange f32[128]=zeros
// A copy fills a row that was zeroed before. Fault: the zeros of another thread are not ordered before the copy.
KERNEL zeroed_copy(const float4* in, float4* out) {
    __shared__ float4 row[64];
    int t = threadIdx.x;
    row[63 - t] = float4{0, 0, 0, 0};
    RIGHT(__syncthreads();)
    if (t < 32) copy16(&row[t], &in[t]);
    commit_copies();
    WAIT_COPIES(0);
    __syncthreads();
    if (t < 32) out[t] = row[31 - t];
}

__device__ inline u32 matrix_word(const void* p) {
    u32 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(shared(p)) : "memory");
    return x;
}
__device__ inline void put_matrix(void* p, u32 x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(shared(p)), "r"(x) : "memory");
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// ldmatrix of what the other warp stored. Fault: no barrier.
KERNEL matrix_of_others(const u32* in, u32* out) {
    __shared__ alignas(16) u32 tile[64];
    int t = threadIdx.x;
    tile[t] = in[t];
    RIGHT(__syncthreads();)
    out[t] = matrix_word(&tile[4 * (t % 8) + 32 * (1 - t / 32)]);
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// ldmatrix of what the lanes of the warp stored. Fault: no __syncwarp.
KERNEL matrix_of_lanes(const u32* in, u32* out) {
    __shared__ alignas(16) u32 tile[32];
    int t = threadIdx.x;
    tile[t] = in[t];
    RIGHT(__syncwarp();)
    out[t] = matrix_word(&tile[4 * (t % 8)]);
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// A matrix that the other warp reads by words. Fault: no barrier after stmatrix.
KERNEL matrix_to_others(const u32* in, u32* out) {
    __shared__ alignas(16) u32 tile[64];
    int t = threadIdx.x;
    put_matrix(&tile[4 * (t % 8) + 32 * (t / 32)], in[t]);
    RIGHT(__syncthreads();)
    out[t] = tile[t ^ 32];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// Two warps store their matrices side by side. Fault: the second matrix begins inside the first.
KERNEL matrices_beside(const u32* in, u32* out) {
    __shared__ alignas(16) u32 tile[64];
    int t = threadIdx.x;
    put_matrix(&tile[4 * (t % 8) + RIGHT(32) WRONG(28) * (t / 32)], in[t]);
    __syncthreads();
    WRONG(if (t < 60)) out[t] = tile[t];
}
