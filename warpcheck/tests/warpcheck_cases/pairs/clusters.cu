// CTAs of a cluster: shared memory of others, and its end.
#include "ptx.cuh"

// PAIR grid=2 cluster=2 block=64 | u32[128]=arange u32[128]=zeros
// CTAs exchange a row. Fault: a CTA may end while the other still reads its row.
KERNEL ends_early(const u32* in, u32* out) {
    __shared__ u32 row[64];
    int t = threadIdx.x, i = 64 * blockIdx.x + t;
    row[t] = in[i];
    cluster_sync();
    out[i] = get(mapped(&row[63 - t], cluster_rank() ^ 1));
    RIGHT(cluster_sync();)
}

// PAIR grid=2 cluster=2 block=64 | u32[128]=arange u32[128]=zeros
// The same exchange. Fault: a barrier of the CTA in place of one of the cluster.
KERNEL cta_barrier(const u32* in, u32* out) {
    __shared__ u32 row[64];
    int t = threadIdx.x, i = 64 * blockIdx.x + t;
    row[t] = in[i];
    RIGHT(cluster_sync();) WRONG(__syncthreads();)
    out[i] = get(mapped(&row[63 - t], cluster_rank() ^ 1));
    cluster_sync();
}

// PAIR grid=2 cluster=2 block=64 | u32[128]=arange u32[128]=zeros
// CTAs write into each other's row. Fault: the other CTA need not have started, and clears its row later.
KERNEL starts_late(const u32* in, u32* out) {
    __shared__ u32 row[64];
    int t = threadIdx.x, i = 64 * blockIdx.x + t;
    row[t] = 0;
    RIGHT(cluster_sync();)
    put(mapped(&row[63 - t], cluster_rank() ^ 1), in[i]);
    cluster_sync();
    out[i] = row[t];
}

// PAIR grid=2 cluster=2 block=64 | u32[128]=arange u32[128]=zeros
// A cluster barrier releases what was written. Fault: its arrival is relaxed.
KERNEL relaxed_cluster_barrier(const u32* in, u32* out) {
    __shared__ u32 row[64];
    int t = threadIdx.x, i = 64 * blockIdx.x + t;
    row[t] = in[i];
    RIGHT(IN("barrier.cluster.arrive.release.aligned;");) WRONG(IN("barrier.cluster.arrive.relaxed.aligned;");)
    IN("barrier.cluster.wait.acquire.aligned;");
    out[i] = get(mapped(&row[63 - t], cluster_rank() ^ 1));
    cluster_sync();
}

// PAIR grid=2 cluster=2 block=64 | u32[128]=arange u32[128]=zeros
// Arrival and wait are split, with own work between. Fault: the row is written between them.
KERNEL written_after_arrival(const u32* in, u32* out) {
    __shared__ u32 row[64];
    int t = threadIdx.x, i = 64 * blockIdx.x + t;
    RIGHT(row[t] = in[i];)
    IN("barrier.cluster.arrive.release.aligned;");
    WRONG(row[t] = in[i];)
    out[i] = 1;
    IN("barrier.cluster.wait.acquire.aligned;");
    out[i] += get(mapped(&row[63 - t], cluster_rank() ^ 1));
    cluster_sync();
}

// PAIR grid=2 cluster=2 block=64 | u32[128]=arange u32[128]=zeros
// CTAs write into each other's row and arrive there. Fault: no cluster barrier after the initialisation.
KERNEL remote_init(const u32* in, u32* out) {
    __shared__ u32 row[64];
    __shared__ u64 full;
    int t = threadIdx.x, i = 64 * blockIdx.x + t;
    u32 peer = cluster_rank() ^ 1;
    if (t == 0) {
        init(&full, 64);
        fence_init();
    }
    RIGHT(cluster_sync();) WRONG(__syncthreads();)
    put(mapped(&row[t], peer), in[i]);
    arrive_at(mapped(&full, peer));
    wait_cluster(&full, 0);
    out[i] = row[63 - t];
    cluster_sync();
}

// PAIR grid=2 cluster=2 block=64 | u32[128]=arange u32[128]=zeros
// CTA 1 reads a row of CTA 0 and gives it back by an arrival. Fault: CTA 0 ends without a wait for it.
KERNEL arrival_at_ended(const u32* in, u32* out) {
    __shared__ u32 row[64];
    __shared__ u64 empty;
    int t = threadIdx.x, i = 64 * blockIdx.x + t;
    if (t == 0) {
        init(&empty, 64);
        fence_init();
    }
    row[t] = in[i];
    cluster_sync();
    if (cluster_rank() == 1) {
        out[i] = get(mapped(&row[63 - t], 0));
        arrive_at(mapped(&empty, 0));
    } else {
        out[i] = in[i];
        RIGHT(wait_cluster(&empty, 0);)
    }
}

// PAIR grid=2 cluster=2 block=32 | u32[64]=arange u32[64]=zeros
// st.async, whose bytes the receiver expects. Fault: it expects none.
KERNEL remote_bytes(const u32* in, u32* out) {
    __shared__ u32 row[32];
    __shared__ u64 full;
    int t = threadIdx.x, i = 32 * blockIdx.x + t;
    u32 peer = cluster_rank() ^ 1;
    if (t == 0) {
        init(&full, 1);
        fence_init();
        RIGHT(expect(&full, 128);) WRONG(arrive(&full);)
    }
    cluster_sync();
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     mapped(&row[t], peer)), "r"(in[i]), "r"(mapped(&full, peer)) : "memory");
    wait_cluster(&full, 0);
    out[i] = row[31 - t];
    cluster_sync();
}

// PAIR grid=2 cluster=2 block=32 | u32[64]=arange u32[64]=zeros
// A sum of all threads of the cluster in one CTA. Fault: no atomic additions.
KERNEL remote_sum(const u32* in, u32* out) {
    __shared__ u32 sum;
    int t = threadIdx.x, i = 32 * blockIdx.x + t;
    if (t == 0) sum = 0;
    cluster_sync();
    u32 at = mapped(&sum, 0);
    RIGHT(asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(at), "r"(in[i]) : "memory");)
    WRONG(put(at, get(at) + in[i]);)
    cluster_sync();
    out[i] = get(at);
    cluster_sync();
}

// PAIR grid=2 cluster=2 block=64 | u32[128]=arange u32[128]=zeros
// The leader loads a row for both CTAs, twice. Fault: the second load waits for its own readers alone.
KERNEL multicast_slot(const u32* in, u32* out) {
    __shared__ alignas(128) u32 row[64];
    __shared__ u64 full, empty;
    int t = threadIdx.x;
    if (t == 0) {
        init(&full, 1);
        init(&empty, RIGHT(128) WRONG(64));
        fence_init();
    }
    cluster_sync();
    u32 sum = 0;
    for (int i = 0; i < 2; ++i) {
        if (t == 0) expect(&full, 256);
        if (i == 0) cluster_sync();
        if (t == 0 && cluster_rank() == 0) {
            if (i) wait_cluster(&empty, 0);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                         "[%1], 256, [%2], %3;" ::"r"(shared(row)), "l"(in + 64 * i), "r"(shared(&full)),
                         "h"((unsigned short)3) : "memory");
        }
        wait_cluster(&full, i);
        sum += row[63 - t];
        if (RIGHT(i == 0) WRONG(i == 0 && cluster_rank() == 0)) arrive_at(mapped(&empty, 0));
    }
    out[64 * blockIdx.x + t] = sum;
    cluster_sync();
}

// PAIR grid=2 cluster=2 block=32 | u32[64]=arange u32[64]=zeros
// A row of the next CTA, modulo two. Fault: not modulo, so that the last CTA reads one that is not there.
KERNEL rank_past_end(const u32* in, u32* out) {
    __shared__ u32 row[32];
    int t = threadIdx.x, i = 32 * blockIdx.x + t;
    row[t] = in[i];
    cluster_sync();
    out[i] = get(mapped(&row[t], (cluster_rank() + 1) RIGHT(% 2)));
    cluster_sync();
}
