// The parts of the emulated chip: SMs, clusters, CTAs, warps, barriers.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.hpp"
#include "footprint.hpp"
#include "place.hpp"
#include "program.hpp"
#include "shadow.hpp"
#include "recorder.hpp"

namespace warpcheck {

struct Cta;
struct Cluster;
struct Sm;
struct Warp;
struct AsyncOp;

enum class Wait : uint8_t {
    None,       // runnable
    Converge,   // a .sync or .aligned instruction waits for the other lanes
    Mbarrier,   // try_wait on an incomplete phase
    Named,      // bar.sync
    ClusterBarrier,
    TmemAlloc,
    Registers,  // setmaxnreg.inc until the CTA's pool has enough
    Poll,       // saw no change since the last look at memory
    Warpgroup,  // wgmma.wait_group until the other warps have issued theirs
    Failed,     // found an error: stays where it is
};

// What an instruction saw: the first lane's address (0: of a barrier) and a digest of what all lanes read.
struct Look {
    static constexpr uint32_t kNone = ~0u;
    uint32_t pc = kNone, times = 0;
    uint64_t address = 0, value = 0;
    uint32_t bytes = 0;         // of one lane

    bool at(const Look& other) const { return pc == other.pc && address == other.address; }
};

// Lanes of a warp that share a program counter.
struct Fragment {
    uint32_t pc = 0;
    uint32_t mask = 0;
    Wait wait = Wait::None;
    // Mbarrier: the barrier and phase that is waited for.
    Cta* bar_cta = nullptr;
    uint32_t bar_offset = 0;
    uint64_t bar_phase = 0;
    bool timed_out = false;     // the next try_wait answers false
    uint64_t poll_epoch = ~0ull;    // Poll: state of the machine at the last look
    std::array<Look, 8> looks;      // in that state; more are forgotten
    uint32_t look_count = 0;
    Look last;
    Look missed;                    // that it waited with when only CTAs that had not started could go on
    uint64_t started = 0;           // clusters at that time
};

struct Mbarrier {
    uint32_t expected = 0;
    int64_t pending = 0;
    int64_t tx = 0;
    uint64_t phase = 0;         // completed phases
    Place init;
    Access born;                // the init as an access
    Place last_arrival;
    Order release[2];           // what the arrivals of the even and odd phases carry
};

struct NamedBarrier {
    uint32_t expected = 0, arrived = 0;
    uint32_t reduce_popc = 0;
    bool reduce_and = true, reduce_or = false;
    struct Waiter { Warp* warp; uint32_t lanes; uint32_t pc; };
    std::vector<Waiter> waiters;
    Order release;
    Place first;
};

// A group of asynchronous copies that one thread waits for.
struct CopyGroups {
    std::vector<std::shared_ptr<AsyncOp>> open;
    std::deque<std::vector<std::shared_ptr<AsyncOp>>> committed;
};

struct Warp {
    Cta* cta = nullptr;
    uint32_t index = 0;         // within the CTA
    uint32_t lanes = 0;         // lanes that exist
    uint32_t alive = 0;         // lanes that have not exited
    std::vector<Fragment> fragments;
    std::vector<uint32_t> regs;
    std::vector<uint32_t> valid;        // per register: lanes that hold a defined value
    std::vector<uint8_t> in_flight;     // per register: 1 tcgen05.ld pending, 2 wgmma pending
    std::vector<uint8_t> local, local_valid;
    uint32_t pending_loads = 0;         // tcgen05.ld whose registers are in flight
    std::vector<std::shared_ptr<AsyncOp>> tmem_ops[2];      // unwaited tcgen05.ld, tcgen05.st
    std::map<uint32_t, CopyGroups> bulk;                    // by lane
    CopyGroups copies;                                      // cp.async
    Clock waited_copies;                                    // and those that were waited for
    std::vector<std::shared_ptr<AsyncOp>> wgmma_open;
    std::deque<std::vector<std::shared_ptr<AsyncOp>>> wgmma_groups;
    uint32_t wgmma_issued = 0;
    std::vector<uint32_t> written_at;   // wgmma programs: fence epoch of the last write of a register
    uint32_t fence_epoch = 1;
    uint64_t cluster_arrivals = 0;      // lanes waiting between arrive and wait
    uint64_t cluster_phase[32] = {};
    uint32_t registers = 0;             // per thread, after setmaxnreg
    uint32_t register_changes = 0;      // setmaxnreg instructions executed
    WarpClock clock;
    std::vector<uint64_t> counts;       // executions by row
    WarpRecord* timed = nullptr;        // null: nobody asks

    const uint32_t* row(const Operand& o, const uint32_t* constants) const {
        return (o.kind == Operand::Const ? constants : regs.data()) + o.offset;
    }
};

// One warpgroup's wgmma instructions, collected until all four warps have issued them.
struct WgmmaSlot {
    std::shared_ptr<AsyncOp> op;
    uint32_t issued = 0;
    int32_t row = -1;
    Warp* warps[4] = {};
    uint64_t a_desc = 0, b_desc = 0;
    bool accumulate = true;
};

// The setmaxnreg instructions of one warpgroup, in order: what the first warp to come executed.
struct RegisterChange {
    int32_t row = -1;
    uint32_t registers = 0, warps = 0;      // warps: how many have executed it
    Place first;
};

struct Cta {
    uint32_t linear = 0;
    uint32_t id[3] = {};
    uint32_t rank = 0;          // in the cluster
    Cluster* cluster = nullptr;
    Sm* sm = nullptr;
    std::vector<uint8_t> shared;
    std::vector<uint8_t> shadow;        // per byte: kValid, kBarrier
    std::map<uint32_t, Mbarrier> barriers;
    std::array<NamedBarrier, 16> named;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::deque<std::shared_ptr<WgmmaSlot>>> warpgroups;     // not yet issued by all four warps
    std::vector<uint32_t> warpgroup_base;                               // number of the first of them
    uint32_t alive_warps = 0;
    bool relinquished = false;
    std::map<uint32_t, uint32_t> tmem_allocations;      // column -> columns
    uint32_t tmem_request = 0;          // columns of a collective tcgen05.alloc that waits for the peer CTA
    int32_t tmem_granted = -1;          // its first column, once the peer has come
    Shadow races;               // of shared memory, a cell for 4 bytes
    std::unordered_map<uint64_t, Access> arrivals;      // of each lane of other CTAs the last one at a barrier here
    Order last;                 // what its warps had seen and done when they ended
    uint32_t pool_registers = 0;        // setmaxnreg pool, registers
    std::map<uint32_t, std::vector<RegisterChange>> register_changes;      // by warpgroup

    static constexpr uint8_t kValid = 1, kBarrier = 2;
    // Do all of these bytes hold a defined value?
    static bool defined(const uint8_t* shadow, size_t bytes) {
        for (; bytes >= 8; shadow += 8, bytes -= 8) {
            uint64_t eight;
            std::memcpy(&eight, shadow, 8);
            if (~eight & kValid * 0x0101010101010101ull) return false;
        }
        for (; bytes; ++shadow, --bytes)
            if (!(*shadow & kValid)) return false;
        return true;
    }
};

struct Cluster {
    uint32_t id[3] = {};
    std::vector<std::unique_ptr<Cta>> ctas;
    uint64_t phase = 0;
    uint32_t arrived = 0;       // lanes of the current phase
    uint32_t alive_lanes = 0;
    Order release[2];
    uint32_t alive_ctas = 0;
};

struct Sm {
    uint32_t id = 0;
    std::vector<uint32_t> tmem;         // [kTmemLanes][kTmemColumns]
    std::vector<uint8_t> tmem_valid;
    // The CTA that allocated a column, until another one does: kernels may give columns back while their last
    // operations still run, which is harmless as long as nobody else gets them.
    std::array<Cta*, kTmemColumns> tmem_owner{};
    std::array<bool, kTmemColumns> tmem_taken{};
    uint32_t shared_used = 0, threads_used = 0, registers_used = 0, ctas = 0;
    Shadow races;               // of tensor memory, lane by lane
};

}  // namespace warpcheck
