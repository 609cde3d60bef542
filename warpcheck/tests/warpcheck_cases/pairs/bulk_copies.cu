// Bulk and tensor copies (TMA): bytes that mbarriers count, groups, proxies.
#include "ptx.cuh"

#define READY(...)                       \
    if (threadIdx.x == 0) { __VA_ARGS__; } \
    __syncthreads();

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// A load of a row. Fault: threads read it without a wait.
KERNEL load_unwaited(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); fence_init())
    if (t == 0) {
        expect(&full, 256);
        load(row, in, 256, &full);
    }
    RIGHT(wait(&full, 0);) WRONG(__syncthreads();)
    out[t] = row[63 - t];
    __syncthreads();
    wait(&full, 0);
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// A load by another thread than the one that initialised. Fault: no fence.mbarrier_init.
KERNEL init_unfenced(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); RIGHT(fence_init()))
    if (t == 32) {
        expect(&full, 256);
        load(row, in, 256, &full);
    }
    wait(&full, 0);
    out[t] = row[63 - t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// The arrival announces the bytes of the load. Fault: a plain arrival.
KERNEL unannounced(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); fence_init())
    if (t == 0) {
        RIGHT(expect(&full, 256);) WRONG(arrive(&full);)
        load(row, in, 256, &full);
    }
    wait(&full, 0);
    out[t] = row[63 - t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// Two loads, one arrival for the bytes of both. Fault: it announces the bytes of the first.
KERNEL half_announced(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); fence_init())
    if (t == 0) {
        expect(&full, RIGHT(256) WRONG(128));
        load(row, in, 128, &full);
        load(row + 32, in + 32, 128, &full);
    }
    wait(&full, 0);
    out[t] = row[63 - t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// The same loads. Fault: the arrival announces more bytes than come.
KERNEL too_much_announced(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); fence_init())
    if (t == 0) {
        expect(&full, RIGHT(256) WRONG(272));
        load(row, in, 128, &full);
        load(row + 32, in + 32, 128, &full);
    }
    wait(&full, 0);
    out[t] = row[63 - t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// Bytes are announced before the arrival. Fault: the second half is announced after it.
KERNEL announced_late(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); fence_init())
    if (t == 0) {
        RIGHT(expect_more(&full, 128);)
        expect(&full, 128);
        load(row, in, 128, &full);
        WRONG(expect_more(&full, 128);)
        load(row + 32, in + 32, 128, &full);
    }
    wait(&full, 0);
    out[t] = row[63 - t];
}

// A ring of two slots that bulk loads fill, and a warp reads.
#define RING(EMPTY, FREE)                                              \
    __shared__ alignas(128) u32 rows[2][32];                           \
    __shared__ u64 full[2], empty[2];                                  \
    int t = threadIdx.x % 32;                                          \
    READY(for (int i = 0; i < 2; ++i) {                                \
        init(&full[i], 1);                                             \
        init(&empty[i], 32);                                           \
    } fence_init())                                                    \
    for (int i = 0; i < 6; ++i) {                                      \
        int slot = i % 2, phase = i / 2 % 2;                           \
        if (threadIdx.x == 32) {                                       \
            EMPTY;                                                     \
            expect(&full[slot], 128);                                  \
            load(rows[slot], in + 32 * i, 128, &full[slot]);           \
        } else if (threadIdx.x < 32) {                                 \
            wait(&full[slot], phase);                                  \
            out[32 * i + t] = rows[slot][31 - t];                      \
            FREE;                                                      \
        }                                                              \
    }

// PAIR block=64 | u32[192]=arange u32[192]=zeros
// Loads fill a ring. Fault: a slot is loaded again without a wait for its readers.
KERNEL slot_in_use(const u32* in, u32* out) { RING(RIGHT(wait(&empty[slot], phase ^ 1)), arrive(&empty[slot])) }

// PAIR block=64 | u32[192]=arange u32[192]=zeros
// The same ring, whose readers scrub the slot. Fault: no proxy fence between their stores and the next load.
KERNEL scrubbed_slot(const u32* in, u32* out) {
    RING(wait(&empty[slot], phase ^ 1), __syncwarp(); rows[slot][t] = 0; RIGHT(fence_async()); arrive(&empty[slot]))
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// A store of a row that threads wrote. Fault: no fence.proxy.async.
KERNEL store_unfenced(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    int t = threadIdx.x;
    row[t] = in[63 - t];
    RIGHT(fence_async();)
    __syncthreads();
    if (t == 0) {
        store(out, row, 256);
        commit_stores();
        wait_stores();
    }
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// The same store. Fault: no barrier between the writers and the store.
KERNEL store_too_early(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    int t = threadIdx.x;
    row[t] = in[63 - t];
    fence_async();
    RIGHT(__syncthreads();)
    if (t == 0) {
        store(out, row, 256);
        commit_stores();
        wait_stores();
    }
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// The thread that stores fences what it knows of by the barrier. Fault: its fence is of global memory.
KERNEL fence_by_storer(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    int t = threadIdx.x;
    row[t] = in[63 - t];
    __syncthreads();
    if (t == 0) {
        RIGHT(fence_async();) WRONG(IN("fence.proxy.async.global;");)
        store(out, row, 256);
        commit_stores();
        wait_stores();
    }
}

// PAIR block=64 | u32[256]=arange u32[256]=zeros
// Rows are stored one after the other from one place. Fault: no wait until the last store has read it.
KERNEL source_in_use(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    int t = threadIdx.x;
    for (int i = 0; i < 4; ++i) {
        RIGHT(if (t == 0) wait_stores_read();)
        __syncthreads();
        row[t] = in[64 * i + 63 - t];
        fence_async();
        __syncthreads();
        if (t == 0) {
            store(out + 64 * i, row, 256);
            commit_stores();
        }
    }
    if (t == 0) wait_stores();
}

// PAIR block=64 | u32[256]=arange u32[256]=zeros
// The same stores. Fault: the stores belong to no group when they are waited for.
KERNEL store_uncommitted(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    int t = threadIdx.x;
    for (int i = 0; i < 4; ++i) {
        if (t == 0) wait_stores_read();
        __syncthreads();
        row[t] = in[64 * i + 63 - t];
        fence_async();
        __syncthreads();
        if (t == 0) {
            store(out + 64 * i, row, 256);
            RIGHT(commit_stores();)
        }
    }
    if (t == 0) {
        commit_stores();
        wait_stores();
    }
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros u32[1]=zeros
// A thread reads back what it stored in bulk. Fault: it waits until the source is read, not until all is written.
KERNEL read_back(const u32* in, u32* out, u32* last) {
    __shared__ alignas(128) u32 row[32];
    int t = threadIdx.x;
    row[t] = in[t];
    fence_async();
    __syncwarp();
    if (t == 0) {
        store(out, row, 128);
        commit_stores();
        RIGHT(wait_stores();) WRONG(wait_stores_read();)
        *last = load_relaxed(out + 31);
    }
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros u32[32]=zeros
// A thread writes global memory that it then loads in bulk. Fault: no proxy fence of global memory.
KERNEL global_unfenced(const u32* in, u32* middle, u32* out) {
    __shared__ alignas(128) u32 row[32];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); fence_init())
    middle[t] = in[t] + 1;
    RIGHT(fence_async();) WRONG(IN("fence.proxy.async.shared::cta;");)
    __syncwarp();
    if (t == 0) {
        expect(&full, 128);
        load(row, middle, 128, &full);
    }
    wait(&full, 0);
    out[t] = row[31 - t];
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// An addition in bulk of a row that threads wrote. Fault: no fence.proxy.async.
KERNEL reduce_unfenced(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    int t = threadIdx.x;
    row[t] = in[63 - t];
    RIGHT(fence_async();)
    __syncthreads();
    if (t == 0) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 256;" ::"l"(out),
                     "r"(shared(row)) : "memory");
        commit_stores();
        wait_stores();
    }
}

// PAIR block=64 | f32[16x32]=arange map=0 f32[64]=zeros
// A tensor load of two lines of 32. Fault: threads read it without a wait.
KERNEL tensor_unwaited(const float* in, const __grid_constant__ Map map, float* out) {
    __shared__ alignas(128) float tile[64];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); fence_init())
    if (t == 0) {
        expect(&full, 256);
        load_tensor(tile, &map, 0, 4, &full);
    }
    RIGHT(wait(&full, 0);) WRONG(__syncthreads();)
    out[t] = tile[63 - t];
    __syncthreads();
    wait(&full, 0);
}

// PAIR block=64 | f32[64]=arange f32[16x32]=zeros map=1
// A tensor store of two lines. Fault: no fence.proxy.async after the writes.
KERNEL tensor_store_unfenced(const float* in, float* out, const __grid_constant__ Map map) {
    __shared__ alignas(128) float tile[64];
    int t = threadIdx.x;
    tile[t] = in[t];
    RIGHT(fence_async();)
    __syncthreads();
    if (t == 0) {
        store_tensor(&map, 0, 4, tile);
        commit_stores();
        wait_stores();
    }
}

// PAIR block=64 | f32[128]=arange f32[16x32]=zeros map=1
// Two tensor stores from one tile. Fault: no wait until the first has read it.
KERNEL tensor_source_in_use(const float* in, float* out, const __grid_constant__ Map map) {
    __shared__ alignas(128) float tile[64];
    int t = threadIdx.x;
    for (int i = 0; i < 2; ++i) {
        tile[t] = in[64 * i + t];
        fence_async();
        __syncthreads();
        if (t == 0) {
            store_tensor(&map, 0, 4 * i, tile);
            commit_stores();
            RIGHT(wait_stores_read();)
        }
        __syncthreads();
    }
    if (t == 0) wait_stores();
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// A load of a row to an aligned place. Fault: the place is 8 bytes further.
KERNEL load_misaligned(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[36];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); fence_init())
    u32* to = row + RIGHT(4) WRONG(2);
    if (t == 0) {
        expect(&full, 128);
        load(to, in, 128, &full);
    }
    wait(&full, 0);
    out[t] = to[31 - t];
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// A load of the whole row. Fault: it reads 128 bytes from the middle of a row of 128.
KERNEL load_past_end(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[32];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1); fence_init())
    if (t == 0) {
        expect(&full, 128);
        load(row, in WRONG(+ 16), 128, &full);
    }
    wait(&full, 0);
    out[t] = row[31 - t];
}
