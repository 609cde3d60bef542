// CTAs that exchange data through global memory: fences, flags, scopes, atomics.
#include "ptx.cuh"

// PAIR grid=2 block=32 | u32[1]=zeros u32[1]=zeros u32[1]=zeros
// CTA 0 writes a word, then a volatile flag. Fault: no __threadfence between them.
KERNEL volatile_flag(u32* data, volatile u32* flag, u32* out) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        *data = 42;
        RIGHT(__threadfence();)
        *flag = 1;
    } else {
        UNTIL(*flag);
        __threadfence();
        *out = *data;
    }
}

// PAIR grid=2 block=32 | u32[1]=zeros u32[1]=zeros u32[1]=zeros
// The same hand-over. Fault: the fence is of the CTA.
KERNEL narrow_fence(u32* data, volatile u32* flag, u32* out) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        *data = 42;
        RIGHT(__threadfence();) WRONG(__threadfence_block();)
        *flag = 1;
    } else {
        UNTIL(*flag);
        __threadfence();
        *out = *data;
    }
}

#define HAND_OVER(STORE, LOAD)          \
    if (threadIdx.x) return;            \
    if (blockIdx.x == 0) {              \
        *data = 42;                     \
        STORE(flag, 1);                 \
    } else {                            \
        UNTIL(LOAD(flag));              \
        *out = *data;                   \
    }

// PAIR grid=2 block=32 | u32[1]=zeros u32[1]=zeros u32[1]=zeros
// A flag by release and acquire. Fault: the store is relaxed.
KERNEL flag_relaxed(u32* data, u32* flag, u32* out) { HAND_OVER(RIGHT(store_release) WRONG(store_relaxed), load_acquire) }

// PAIR grid=2 block=32 | u32[1]=zeros u32[1]=zeros u32[1]=zeros
// A flag by release and acquire. Fault: the load is relaxed.
KERNEL flag_unacquired(u32* data, u32* flag, u32* out) {
    HAND_OVER(store_release, RIGHT(load_acquire) WRONG(load_relaxed))
}

// PAIR grid=2 block=32 | u32[1]=zeros u32[1]=zeros u32[1]=zeros
// A flag by release and acquire. Fault: the release has the scope of the CTA.
KERNEL flag_of_cta(u32* data, u32* flag, u32* out) {
    HAND_OVER(RIGHT(store_release) WRONG(store_release_cta), load_acquire)
}

// PAIR grid=2 block=32 | u32[1]=zeros u32[1]=zeros u32[1]=zeros
// A flag by release and acquire. Fault: the acquire has the scope of the CTA.
KERNEL acquire_of_cta(u32* data, u32* flag, u32* out) {
    HAND_OVER(store_release, RIGHT(load_acquire) WRONG(load_acquire_cta))
}

// PAIR grid=2 block=32 | u32[1]=zeros u32[1]=zeros u32[1]=zeros
// A loop polls a flag. Fault: by a weak load, which need not be repeated.
KERNEL weak_poll(u32* data, u32* flag, u32* out) {
    HAND_OVER(store_release, RIGHT(load_acquire) WRONG(load_weak))
}

// PAIR grid=2 block=64 | u32[128]=zeros u32[1]=zeros u32[64]=zeros
// All threads of a CTA write, one sets the flag. Fault: no barrier before the flag.
KERNEL flag_before_others(u32* data, u32* flag, u32* out) {
    int t = threadIdx.x;
    if (blockIdx.x == 0) {
        data[t] = t;
        __threadfence();
        RIGHT(__syncthreads();)
        if (t == 0) store_release(flag, 1);
    } else {
        if (t == 0) UNTIL(load_acquire(flag));
        __syncthreads();
        out[t] = data[63 - t];
    }
}

// PAIR grid=2 block=64 | u32[128]=zeros u32[1]=zeros u32[64]=zeros
// One thread polls the flag for its CTA. Fault: no barrier after the poll.
KERNEL poll_by_one(u32* data, u32* flag, u32* out) {
    int t = threadIdx.x;
    if (blockIdx.x == 0) {
        data[t] = t;
        __syncthreads();
        if (t == 0) store_release(flag, 1);
    } else {
        if (t == 0) UNTIL(load_acquire(flag));
        RIGHT(__syncthreads();)
        out[t] = data[63 - t];
    }
}

// The sum of all CTAs by the one that comes last, as in CUDA's sample threadFenceReduction.
#define LAST_CTA(FENCE, BARRIER, LATER)                     \
    __shared__ bool last;                                   \
    int t = threadIdx.x;                                    \
    part[64 * blockIdx.x + t] = in[64 * blockIdx.x + t];    \
    FENCE;                                                  \
    BARRIER;                                                \
    if (t == 0) last = atomicAdd(count, 1) == gridDim.x - 1; \
    __syncthreads();                                        \
    if (last) {                                             \
        LATER;                                              \
        u32 sum = 0;                                        \
        for (int i = 0; i < gridDim.x; ++i) sum += part[64 * i + t]; \
        out[t] = sum;                                       \
    }

// PAIR grid=3 block=64 | u32[192]=arange u32[192]=zeros u32[1]=zeros u32[64]=zeros
// The last CTA adds what all have written. Fault: no __threadfence before the count.
KERNEL last_cta_unfenced(const u32* in, u32* part, u32* count, u32* out) {
    LAST_CTA(RIGHT(__threadfence()), __syncthreads(), __threadfence())
}

// PAIR grid=3 block=64 | u32[192]=arange u32[192]=zeros u32[1]=zeros u32[64]=zeros
// The same sum. Fault: no barrier, so that one thread counts before the others have written.
KERNEL last_cta_uncounted(const u32* in, u32* part, u32* count, u32* out) {
    LAST_CTA(__threadfence(), RIGHT(__syncthreads()), __threadfence())
}

// PAIR grid=3 block=64 | u32[192]=arange u32[192]=zeros u32[1]=zeros u32[64]=zeros
// The same sum. Fault: a fence of the CTA before the count.
KERNEL last_cta_narrow(const u32* in, u32* part, u32* count, u32* out) {
    LAST_CTA(RIGHT(__threadfence()) WRONG(__threadfence_block()), __syncthreads(), __threadfence())
}

// PAIR grid=4 block=32 | u32[128]=arange u32[32]=zeros
// CTAs add to common sums. Fault: no atomic additions.
KERNEL common_sums(const u32* in, u32* out) {
    int t = threadIdx.x;
    RIGHT(atomicAdd(&out[t], in[32 * blockIdx.x + t]);)
    WRONG(out[t] += in[32 * blockIdx.x + t];)
}

// PAIR grid=2 block=64 | u32[132]=arange u32[132]=zeros
// Each CTA writes its 64 words. Fault: it writes the first word of the next one, too.
KERNEL overlap(const u32* in, u32* out) {
    int t = threadIdx.x, i = 64 * blockIdx.x + t;
    out[i] = in[i] + blockIdx.x;
    WRONG(if (t == 63) out[i + 1] = in[i + 1] + 7 + blockIdx.x;)
}

// PAIR grid=2 block=64 | u32[130]=arange u32[130]=zeros
// Each word becomes the sum of its neighbours. Fault: in place, while the next CTA needs the old words.
KERNEL in_place(u32* in, u32* out) {
    int t = threadIdx.x, i = 64 * blockIdx.x + t + 1;
    u32 sum = in[i - 1] + in[i + 1];
    __syncthreads();
    RIGHT(out) WRONG(in)[i] = sum;
}

// PAIR grid=4 block=32 | u32[1]=zeros u32[1]=zeros
// A lock around a plain addition. Fault: no fence before the unlock.
KERNEL lock(u32* lock, u32* sum) {
    if (threadIdx.x) return;
    UNTIL(atomicCAS(lock, 0, 1) == 0);
    __threadfence();
    *sum = *sum + 1;
    RIGHT(__threadfence();)
    atomicExch(lock, 0);
}

// PAIR grid=2 block=64 cooperative | u32[128]=arange u32[2]=zeros u32[128]=zeros u32[128]=zeros
// A barrier of the grid by a counter. Fault: no barrier of the CTA before its arrival.
KERNEL grid_barrier(const u32* in, u32* count, u32* middle, u32* out) {
    int t = threadIdx.x, i = 64 * blockIdx.x + t;
    middle[i] = in[i];
    RIGHT(__syncthreads();)
    if (t == 0) {
        __threadfence();
        atomicAdd(count, 1);
        UNTIL(load_acquire(count) == gridDim.x);
        __threadfence();
    }
    __syncthreads();
    out[i] = middle[127 - i];
}

// PAIR grid=4 block=32 | u32[4]=arange u32[4]=zeros u32[4]=zeros u32[4]=zeros
// Each CTA adds its word to the sum of the one before. Fault: status and sum are no release and acquire.
KERNEL look_back(const u32* in, u32* sums, u32* status, u32* out) {
    if (threadIdx.x) return;
    int i = blockIdx.x;
    u32 sum = in[i];
    if (i) {
        UNTIL(RIGHT(load_acquire) WRONG(load_relaxed)(status + i - 1));
        sum += sums[i - 1];
    }
    sums[i] = sum;
    RIGHT(store_release) WRONG(store_relaxed)(status + i, 1);
    out[i] = sum;
}

// PAIR grid=2 block=32 | u32[1]=zeros u32[2]=zeros
// A CTA waits for one that started earlier. Fault: for one that starts later, and may need its place.
KERNEL later_cta(u32* flag, u32* out) {
    if (threadIdx.x) return;
    if (blockIdx.x == RIGHT(0) WRONG(1)) store_release(flag, 1);
    else UNTIL(load_acquire(flag));
    out[blockIdx.x] = 1;
}

// PAIR grid=3 block=32 cooperative | u32[1]=zeros u32[3]=zeros
// CTAs count themselves and wait for the number of the grid. Fault: they wait for one more.
KERNEL counts_too_far(u32* count, u32* out) {
    if (threadIdx.x) return;
    atomicAdd(count, 1);
    UNTIL(load_acquire(count) == gridDim.x WRONG(+ 1));
    out[blockIdx.x] = 1;
}
