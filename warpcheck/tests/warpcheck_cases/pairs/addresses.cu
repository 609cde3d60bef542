// Bounds, alignment, and values that nobody wrote.
#include "ptx.cuh"

// PAIR block=64 | f32[50]=arange f32[50]=zeros
// A tail of 50 words. Fault: no bound.
KERNEL no_bound(const float* in, float* out) {
    int t = threadIdx.x;
    if (RIGHT(t < 50) WRONG(true)) out[t] = 2 * in[t];
}

// PAIR block=64 | f32[64]=arange f32[64]=zeros
// Differences of neighbours. Fault: the first thread reads the word before the row.
KERNEL before_start(const float* in, float* out) {
    int t = threadIdx.x;
    out[t] = in[t] - RIGHT((t ? in[t - 1] : 0)) WRONG(in[t - 1]);
}

// PAIR block=64 smem=256 | u32[64]=arange u32[64]=zeros
// A row in dynamic shared memory. Fault: it begins four words further, and ends past what the launch has.
KERNEL shared_past_end(const u32* in, u32* out) {
    extern __shared__ u32 row[];
    int t = threadIdx.x, first = RIGHT(0) WRONG(4);
    row[first + t] = in[t];
    __syncthreads();
    out[t] = row[first + 63 - t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// Two arrays in shared memory. Fault: the first is written past its end, into the second.
KERNEL into_the_next(const u32* in, u32* out) {
    __shared__ struct { u32 first[64], second[64]; } both;
    int t = threadIdx.x;
    both.second[t] = in[t];
    __syncthreads();
    both.first[t WRONG(+ 1)] = 7;
    __syncthreads();
    out[t] = both.second[63 - t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// A row of 64, of which 50 have data. Fault: the rest is not cleared.
KERNEL shared_unset(const u32* in, u32* out) {
    __shared__ u32 row[64];
    int t = threadIdx.x;
    if (t < 50) row[t] = in[t];
    RIGHT(else row[t] = 0;)
    __syncthreads();
    out[t] = row[63 - t];
}

// PAIR block=64 | u32[64]=arange u32[64]=fresh u32[64]=zeros
// Sums in fresh memory. Fault: it is added to before anybody has written it.
KERNEL global_unset(const u32* in, u32* sums, u32* out) {
    int t = threadIdx.x;
    RIGHT(sums[t] = in[t];) WRONG(sums[t] += in[t];)
    out[t] = sums[t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// A local array, of which each thread sets a part. Fault: it reads the rest.
KERNEL local_unset(const u32* in, u32* out) {
    u32 words[8];
    int t = threadIdx.x, n = in[t] % 4 + 1;
    for (int i = 0; i < RIGHT(8) WRONG(n); ++i) words[i] = t;
    out[t] = words[(in[t] + 5) % 8];
}

// PAIR block=64 outputs=1 | u32[100]=arange u32[100]=fresh
// A loop over 100 words by 64 threads. Fault: one round, so that the last words are never written.
KERNEL output_unset(const u32* in, u32* out) {
    for (int i = threadIdx.x; i < RIGHT(100) WRONG(64); i += 64) out[i] = in[i];
}

// PAIR block=16 | f32[80]=arange f32[64]=zeros
// Vectors of four floats. Fault: they begin at the second float.
KERNEL misaligned(const float* in, float4* out) {
    int t = threadIdx.x;
    out[t] = *(const float4*)(in + RIGHT(4) WRONG(1) + 4 * t);
}

// PAIR block=32 | u32[40]=arange u32[32]=zeros
// Words of shared memory by pairs. Fault: the pairs begin at odd words.
KERNEL shared_misaligned(const u32* in, u32* out) {
    __shared__ alignas(16) u32 row[68];
    int t = threadIdx.x;
    row[2 * t] = row[2 * t + 1] = in[t];
    if (t == 0) row[64] = 0;
    __syncthreads();
    u32 first = RIGHT(0) WRONG(1);
    uint2 two = *(uint2*)(row + first + 2 * t);
    out[t] = two.x + two.y;
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// A gather by an index from memory. Fault: the index is not clamped.
KERNEL gather(const u32* in, u32* out) {
    int t = threadIdx.x;
    u32 i = in[t] * 3;
    out[t] = in[RIGHT(min(i, 63u)) WRONG(i)];
}
