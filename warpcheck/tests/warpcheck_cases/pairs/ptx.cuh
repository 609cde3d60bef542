// Before every file of pairs: the instructions that CUDA C++ has no function for.
//
// RIGHT(...) is in the right kernel of a pair only, WRONG(...) in the one with the fault. HARDWARE bounds the waits, so
// that a deadlock does not occupy a GPU.
#ifdef FAULT
#define RIGHT(...)
#define WRONG(...) __VA_ARGS__
#else
#define RIGHT(...) __VA_ARGS__
#define WRONG(...)
#endif
#define KERNEL extern "C" __global__ void
#define IN(text) asm volatile(text ::: "memory")

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) Map { char bytes[128]; };

#ifdef HARDWARE
__device__ inline u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
#define UNTIL(condition) for (u64 start = now(); !(condition) && now() - start < 3000000000ull;)
#else
#define UNTIL(condition) while (!(condition))
#endif

__device__ inline u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// mbarriers
__device__ inline void init(u64* b, u32 n) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared(b)), "r"(n) : "memory");
}
__device__ inline void inval(u64* b) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared(b)) : "memory"); }
__device__ inline void arrive(u64* b) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared(b)) : "memory");
}
__device__ inline void arrive_relaxed(u64* b) {
    asm volatile("mbarrier.arrive.relaxed.cta.shared.b64 _, [%0];" ::"r"(shared(b)) : "memory");
}
__device__ inline void expect(u64* b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared(b)), "r"(bytes) : "memory");
}
__device__ inline void expect_more(u64* b, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared.b64 [%0], %1;" ::"r"(shared(b)), "r"(bytes) : "memory");
}
__device__ inline bool over(u64* b, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(shared(b)), "r"(parity) : "memory");
    return done;
}
__device__ inline void wait(u64* b, u32 parity) { UNTIL(over(b, parity)); }
__device__ inline void fence_init() { IN("fence.mbarrier_init.release.cluster;"); }

// Copies
__device__ inline void fence_async() { IN("fence.proxy.async;"); }
__device__ inline void load(void* to, const void* from, u32 bytes, u64* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared(b)) : "memory");
}
__device__ inline void store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared(from)), "r"(bytes) : "memory");
}
__device__ inline void load_tensor(void* to, const Map* map, int x, int y, u64* b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
                 "[%4];" ::"r"(shared(to)), "l"(map), "r"(x), "r"(y), "r"(shared(b)) : "memory");
}
__device__ inline void store_tensor(const Map* map, int x, int y, const void* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
                 "r"(y), "r"(shared(from)) : "memory");
}
__device__ inline void commit_stores() { IN("cp.async.bulk.commit_group;"); }
__device__ inline void wait_stores() { IN("cp.async.bulk.wait_group 0;"); }
__device__ inline void wait_stores_read() { IN("cp.async.bulk.wait_group.read 0;"); }
__device__ inline void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared(to)), "l"(__cvta_generic_to_global(from))
                 : "memory");
}
__device__ inline void commit_copies() { IN("cp.async.commit_group;"); }
#define WAIT_COPIES(n) IN("cp.async.wait_group " #n ";")

// Clusters
__device__ inline u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(r)); return r; }
__device__ inline void cluster_sync() {
    IN("barrier.cluster.arrive.release.aligned;");
    IN("barrier.cluster.wait.acquire.aligned;");
}
__device__ inline u32 mapped(const void* p, u32 rank) {
    u32 a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared(p)), "r"(rank));
    return a;
}
__device__ inline void put(u32 address, u32 x) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ inline u32 get(u32 address) {
    u32 x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ inline void arrive_at(u32 address) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ inline void wait_cluster(u64* b, u32 parity) {
    u32 done = 0;
    UNTIL(done) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(shared(b)), "r"(parity) : "memory");
    }
}

// Flags in global memory
#define LOAD_AS(name, how)                                                                              \
    __device__ inline u32 name(const u32* p) {                                                          \
        u32 x;                                                                                          \
        asm volatile("ld." how ".u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(p)) : "memory"); \
        return x;                                                                                       \
    }
#define STORE_AS(name, how)                                                                                        \
    __device__ inline void name(u32* p, u32 x) {                                                                   \
        asm volatile("st." how ".u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(x) : "memory");            \
    }
LOAD_AS(load_acquire, "acquire.gpu.global")
LOAD_AS(load_acquire_cta, "acquire.cta.global")
LOAD_AS(load_relaxed, "relaxed.gpu.global")
LOAD_AS(load_weak, "weak.global")
STORE_AS(store_release, "release.gpu.global")
STORE_AS(store_release_cta, "release.cta.global")
STORE_AS(store_relaxed, "relaxed.gpu.global")
