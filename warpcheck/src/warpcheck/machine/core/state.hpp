// State of the emulated chip: SMs, clusters, CTAs, warps, barriers.
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
    Converge,   // a .sync or .aligned instruction waits for other lanes
    Mbarrier,   // try_wait on an incomplete phase
    Named,      // bar.sync
    ClusterBarrier,
    TmemAlloc,
    Registers,  // setmaxnreg.inc, until the CTA's pool has enough registers
    Poll,       // memory has not changed after the last read
    Warpgroup,  // wgmma.wait_group, until the other warps have issued their wgmma
    Failed,     // found an error and stopped
};

// Observation of a polling instruction: address of the first lane (0 for a barrier), and a digest of the values that
// all lanes read.
struct Look {
    static constexpr uint32_t kNone = ~0u;
    uint32_t pc = kNone, times = 0;
    uint64_t address = 0, value = 0;
    uint32_t bytes = 0;         // read by one lane
    uint64_t registers = 0;     // weak loads: digest of the warp's registers

    bool at(const Look& other) const { return pc == other.pc && address == other.address; }
};

// Lanes of a warp that share a program counter.
struct Fragment {
    uint32_t pc = 0;
    uint32_t mask = 0;
    Wait wait = Wait::None;
    // If `wait` is Mbarrier: the awaited barrier and phase.
    Cta* bar_cta = nullptr;
    uint32_t bar_offset = 0;
    uint64_t bar_phase = 0;
    bool timed_out = false;     // the next try_wait returns false
    uint64_t poll_epoch = ~0ull;    // Poll: epoch of the machine at the last observation
    std::vector<Look> looks;        // observations by strong loads, atomics and test_wait in this epoch
    std::array<Look, 8> weak_looks; // the last observations by weak loads in this epoch
    uint32_t weak_count = 0;
    Look last;
    Look missed;                    // observation it waited with when only clusters not yet started could continue
    uint64_t started = 0;           // number of clusters started then
};

// Of the current phase of an mbarrier: an expect_tx without arrival. `others`: bytes that others than it and what comes
// after it expected, less those that they completed.
struct ExpectTx {
    uint32_t slot, epoch;
    Place place;
    int64_t others;
};

// Warp that found the phase before complete, by its parity.
struct ParityWait {
    uint32_t slot, epoch;
    Place place;
};

struct Mbarrier {
    uint32_t expected = 0;
    int64_t pending = 0;
    int64_t tx = 0;
    uint64_t phase = 0;         // number of completed phases
    Place init;
    Access born;                // the init as an access
    Place last_arrival;
    Order release[2];           // orders released by the arrivals of even and odd phases
    int64_t expected_tx = 0, completed_tx = 0;      // bytes, in the current phase
    std::vector<ExpectTx> expects;
    std::vector<ParityWait> waits;          // for the phase before
    std::vector<std::pair<int32_t, int32_t>> arrivers;      // CTA and warp of all that arrived in any phase
    uint64_t last_arrival_phase = 0;
    Place remote[2];            // an arrival from another CTA in even and odd phases
    bool remote_narrow[2] = {}; // its scope is its CTA
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

// Groups of asynchronous copies that a thread commits and waits for.
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
    uint32_t pending_loads = 0;         // number of tcgen05.ld whose registers are in flight
    std::vector<std::shared_ptr<AsyncOp>> tmem_ops[2];      // tcgen05.ld and tcgen05.st without a wait
    std::map<uint32_t, CopyGroups> bulk;                    // bulk copies, by lane
    CopyGroups copies;                                      // cp.async
    Clock waited_copies;                                    // cp.async that were waited for
    std::vector<std::shared_ptr<AsyncOp>> wgmma_open;
    std::deque<std::vector<std::shared_ptr<AsyncOp>>> wgmma_groups;
    uint32_t wgmma_issued = 0;
    std::vector<uint32_t> written_at;   // programs with wgmma: fence epoch of the last write of each register
    uint32_t fence_epoch = 1;
    uint64_t cluster_arrivals = 0;      // lanes between arrive and wait
    uint64_t cluster_phase[32] = {};
    uint32_t registers = 0;             // per thread; setmaxnreg changes it
    uint32_t register_changes = 0;      // number of setmaxnreg executed
    WarpClock clock;
    std::vector<uint64_t> counts;       // executions, by row
    WarpRecord* timed = nullptr;        // null unless the launch records for the clock

    const uint32_t* row(const Operand& o, const uint32_t* constants) const {
        return (o.kind == Operand::Const ? constants : regs.data()) + o.offset;
    }
};

// wgmma of a warpgroup, collected until all four warps have issued it.
struct WgmmaSlot {
    std::shared_ptr<AsyncOp> op;
    uint32_t issued = 0;
    int32_t row = -1;
    Warp* warps[4] = {};
    uint64_t a_desc = 0, b_desc = 0;
    bool accumulate = true;
};

// One of the setmaxnreg that a warpgroup executes in order, as its first warp executed it.
struct RegisterChange {
    int32_t row = -1;
    uint32_t registers = 0, warps = 0;      // warps: number of warps that have executed it
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
    std::vector<uint32_t> warpgroup_base;                               // number of the first element of each deque
    uint32_t alive_warps = 0;
    bool relinquished = false;
    std::map<uint32_t, uint32_t> tmem_allocations;      // column -> columns
    uint32_t tmem_request = 0;          // columns of a collective tcgen05.alloc that waits for the peer CTA
    int32_t tmem_granted = -1;          // first column, after the peer has allocated
    Shadow races;               // of shared memory, one cell per 4 bytes
    std::unordered_map<uint64_t, Access> arrivals;      // last arrival of each lane, and of each pipe of commits, of other CTAs here
    Order last;                 // what its warps had seen and done at their exit
    uint32_t pool_registers = 0;        // registers in the setmaxnreg pool
    std::map<uint32_t, std::vector<RegisterChange>> register_changes;      // by warpgroup

    static constexpr uint8_t kValid = 1, kBarrier = 2;
    // True if all of these bytes hold defined values.
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
    uint32_t arrived = 0;       // lanes, in the current phase
    uint32_t alive_lanes = 0;
    Order release[2];
    uint32_t alive_ctas = 0;
};

struct Sm {
    uint32_t id = 0;
    std::vector<uint32_t> tmem;         // [kTmemLanes][kTmemColumns]
    std::vector<uint8_t> tmem_valid;
    // The last CTA that allocated a column, also after its deallocation. Kernels may free columns while their last
    // operations run; this is harmless until another CTA allocates the columns.
    std::array<Cta*, kTmemColumns> tmem_owner{};
    std::array<bool, kTmemColumns> tmem_taken{};
    uint32_t shared_used = 0, threads_used = 0, registers_used = 0, ctas = 0;
    Shadow races;               // of tensor memory, lane by lane
};

}  // namespace warpcheck
