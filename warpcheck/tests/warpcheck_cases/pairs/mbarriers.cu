// mbarriers between threads: counts, phases, lifetime.
//
// READY initialises what thread 0 says and shows it to the CTA.
#include "ptx.cuh"

#define READY(...)                       \
    if (threadIdx.x == 0) { __VA_ARGS__; } \
    __syncthreads();

// PAIR block=64 | u32[32]=arange u32[32]=zeros
// One warp hands a row to another. Fault: the barrier expects one arrival too many.
KERNEL count_too_large(const u32* in, u32* out) {
    __shared__ u32 row[32];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, RIGHT(32) WRONG(33)))
    if (t < 32) {
        row[t] = in[t];
        arrive(&full);
    } else {
        wait(&full, 0);
        out[t - 32] = row[63 - t];
    }
}

// PAIR block=96 | u32[64]=arange u32[32]=zeros
// Two warps hand a row to a third. Fault: the barrier expects the arrivals of one.
KERNEL count_too_small(const u32* in, u32* out) {
    __shared__ u32 row[64];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, RIGHT(64) WRONG(32)))
    if (t < 64) {
        row[t] = in[t];
        arrive(&full);
    } else {
        wait(&full, 0);
        out[t - 64] = row[t - 64] + row[t - 32];
    }
}

// PAIR block=64 | u32[32]=arange u32[32]=zeros
// The first phase has parity 0. Fault: the consumer waits for parity 1, which is over from the start.
KERNEL first_parity(const u32* in, u32* out) {
    __shared__ u32 row[32];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 32))
    if (t < 32) {
        row[t] = in[t];
        arrive(&full);
    } else {
        wait(&full, RIGHT(0) WRONG(1));
        out[t - 32] = row[63 - t];
    }
}

// A ring of two slots between two warps.
#define RING(EMPTY, FULL, FREE)                     \
    __shared__ u32 rows[2][32];                     \
    __shared__ u64 full[2], empty[2];               \
    int t = threadIdx.x % 32;                       \
    READY(for (int i = 0; i < 2; ++i) {             \
        init(&full[i], 32);                         \
        init(&empty[i], 32);                        \
    })                                              \
    for (int i = 0; i < 6; ++i) {                   \
        int slot = i % 2, phase = i / 2 % 2;        \
        if (threadIdx.x < 32) {                     \
            EMPTY;                                  \
            rows[slot][t] = in[32 * i + t];         \
            arrive(&full[slot]);                    \
        } else {                                    \
            FULL;                                   \
            out[32 * i + t] = rows[slot][31 - t];   \
            FREE;                                   \
        }                                           \
    }

// PAIR block=64 | u32[192]=arange u32[192]=zeros
// A ring whose producer runs ahead by two slots. Fault: it does not wait until a slot is free.
KERNEL no_wait_for_free(const u32* in, u32* out) {
    RING(RIGHT(wait(&empty[slot], phase ^ 1)), wait(&full[slot], phase), arrive(&empty[slot]))
}

// PAIR block=64 | u32[192]=arange u32[192]=zeros
// The same ring. Fault: the consumer does not wait for a full slot.
KERNEL no_wait_for_full(const u32* in, u32* out) {
    RING(wait(&empty[slot], phase ^ 1), RIGHT(wait(&full[slot], phase)), arrive(&empty[slot]))
}

// PAIR block=64 | u32[192]=arange u32[192]=zeros
// The same ring. Fault: the parity of the wait for a full slot never changes.
KERNEL parity_stays(const u32* in, u32* out) {
    RING(wait(&empty[slot], phase ^ 1), wait(&full[slot], RIGHT(phase) WRONG(0)), arrive(&empty[slot]))
}

// PAIR block=64 | u32[192]=arange u32[192]=zeros
// The same ring. Fault: the producer starts with the parity of the consumer.
KERNEL producer_parity(const u32* in, u32* out) {
    RING(wait(&empty[slot], phase RIGHT(^ 1)), wait(&full[slot], phase), arrive(&empty[slot]))
}

// PAIR block=64 | u32[192]=arange u32[192]=zeros
// The same ring. Fault: the consumer gives the other slot back.
KERNEL other_slot(const u32* in, u32* out) {
    RING(wait(&empty[slot], phase ^ 1), wait(&full[slot], phase), arrive(&empty[slot WRONG(^ 1)]))
}

// PAIR block=64 | u32[192]=arange u32[192]=zeros
// The same ring. Fault: a wait that asks once and goes on.
KERNEL asked_once(const u32* in, u32* out) {
    RING(wait(&empty[slot], phase ^ 1), RIGHT(wait(&full[slot], phase)) WRONG(over(&full[slot], phase)),
         arrive(&empty[slot]))
}

// PAIR block=64 | u32[32]=arange u32[32]=zeros
// Arrivals release the stores before them. Fault: they are relaxed.
KERNEL relaxed_arrival(const u32* in, u32* out) {
    __shared__ u32 row[32];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 32))
    if (t < 32) {
        row[t] = in[t];
        RIGHT(arrive(&full);) WRONG(arrive_relaxed(&full);)
    } else {
        wait(&full, 0);
        out[t - 32] = row[63 - t];
    }
}

// PAIR block=64 | u32[32]=arange u32[32]=zeros
// Thread 0 initialises. Fault: no barrier between the initialisation and the first arrival.
KERNEL init_unseen(const u32* in, u32* out) {
    __shared__ u32 row[32];
    __shared__ u64 full;
    int t = threadIdx.x;
    if (t == 0) init(&full, 32);
    RIGHT(__syncthreads();)
    if (t < 32) {
        row[t] = in[t];
        arrive(&full);
    } else {
        wait(&full, 0);
        out[t - 32] = row[63 - t];
    }
}

// PAIR block=64 | u32[32]=arange u32[32]=zeros
// One lane arrives for its warp. Fault: no __syncwarp before it.
KERNEL elected_arrival(const u32* in, u32* out) {
    __shared__ u32 row[32];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 1))
    if (t < 32) {
        row[t] = in[t];
        RIGHT(__syncwarp();)
        if (t == 0) arrive(&full);
    } else {
        wait(&full, 0);
        out[t - 32] = row[63 - t];
    }
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// The bytes of a barrier serve as data at the end. Fault: it is not invalidated.
KERNEL no_inval(const u32* in, u32* out) {
    __shared__ alignas(8) u32 row[32];
    u64* full = (u64*)row;
    int t = threadIdx.x;
    READY(init(full, 32))
    u32 x = in[t];
    arrive(full);
    wait(full, 0);
    __syncwarp();
    RIGHT(if (t == 0) inval(full);)
    __syncwarp();
    row[t] = x;
    __syncwarp();
    out[t] = row[31 - t];
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// A barrier is invalidated after its use. Fault: it is used once more.
KERNEL used_after_inval(const u32* in, u32* out) {
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 32))
    arrive(&full);
    wait(&full, 0);
    __syncwarp();
    if (t == 0) inval(&full);
    __syncwarp();
    RIGHT(if (t == 0) init(&full, 32);)
    __syncwarp();
    arrive(&full);
    wait(&full, 0);
    out[t] = in[t];
}

// PAIR block=32 | u32[32]=arange u32[32]=zeros
// A barrier gets another count. Fault: it is initialised again while it lives.
KERNEL second_init(const u32* in, u32* out) {
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 32))
    arrive(&full);
    wait(&full, 0);
    __syncthreads();
    READY(RIGHT(inval(&full);) init(&full, 1))
    if (t == 0) arrive(&full);
    wait(&full, 0);
    out[t] = in[t];
}

// PAIR block=64 | u32[32]=arange u32[32]=zeros
// A warp waits for two phases in turn. Fault: nothing keeps the second phase from ending before the first wait.
KERNEL lapped(const u32* in, u32* out) {
    __shared__ u64 full, taken;
    int t = threadIdx.x;
    READY(init(&full, 32); init(&taken, 32))
    if (t < 32) {
        arrive(&full);
        RIGHT(wait(&taken, 0);)
        arrive(&full);
    } else {
        wait(&full, 0);
        RIGHT(arrive(&taken);)
        wait(&full, 1);
        out[t - 32] = in[t - 32];
    }
}

// PAIR block=64 | u32[32]=arange u32[32]=zeros
// All threads of a warp arrive, those without data too. Fault: they do not.
KERNEL arrival_in_branch(const u32* in, u32* out) {
    __shared__ u32 row[32];
    __shared__ u64 full;
    int t = threadIdx.x;
    READY(init(&full, 32))
    if (t < 32) {
        row[t] = 0;
        if (t < 20) row[t] = in[t];
        if (RIGHT(true) WRONG(t < 20)) arrive(&full);
    } else {
        wait(&full, 0);
        out[t - 32] = row[63 - t];
    }
}

// PAIR block=64 | u32[64]=arange u32[64]=zeros
// Two warps give each other a row. Fault: both wait before they arrive.
KERNEL both_wait(const u32* in, u32* out) {
    __shared__ u32 row[64];
    __shared__ u64 ready[2];
    int t = threadIdx.x, mine = t / 32;
    READY(init(&ready[0], 32); init(&ready[1], 32))
    row[t] = in[t];
    RIGHT(arrive(&ready[mine]);)
    wait(&ready[mine ^ 1], 0);
    WRONG(arrive(&ready[mine]);)
    out[t] = row[63 - t];
}

// PAIR block=64 | u32[96]=arange u32[96]=zeros
// Three tiles are handed over. Fault: the consumer waits for a fourth.
KERNEL one_tile_more(const u32* in, u32* out) {
    __shared__ u32 rows[4][32];
    __shared__ u64 full;
    int t = threadIdx.x % 32;
    READY(init(&full, 64))
    if (threadIdx.x < 32) {
        for (int i = 0; i < 3; ++i) {
            rows[i][t] = in[32 * i + t];
            arrive(&full);
            wait(&full, i % 2);
        }
    } else {
        for (int i = 0; i < 3 WRONG(+ 1); ++i) {
            arrive(&full);
            wait(&full, i % 2);
            if (i < 3) out[32 * i + t] = rows[i][31 - t];
        }
    }
}
