// Detection of data races by happens-before (PTX ISA chapter 8). Every access is compared with the last writes and
// reads of the same bytes. It must be ordered after them by synchronisation that the kernel performed, whatever the
// order of this run was. A write by the generic proxy needs a proxy fence before the async proxy accesses the bytes.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>

#include "clock.hpp"
#include "finding.hpp"
#include "footprint.hpp"
#include "shadow.hpp"

namespace warpcheck {

struct Program;
struct Warp;
struct AsyncOp;
struct Cta;
struct Sm;

// Accessor: who it is, and what it is ordered after.
struct Agent {
    const Order* order;
    uint32_t slot, epoch, self_from;
    int32_t row, cta;
    int16_t warp;
    bool async;         // async proxy
    int8_t lane = -1;   // lane of a generic access
    uint32_t synced = ~0u;      // the warp's other lanes are ordered before up to this epoch
    int32_t column = -1;        // column of tensor memory
    const WarpClock* clock = nullptr;   // generic access: orders of its lane beyond `order`
};
// Agent::lane of accesses whose lane does not matter, and of accesses that all lanes make together.
constexpr int8_t kAnyLane = -1, kAllLanes = -2;
constexpr uint32_t kWarp = ~0u;     // all lanes, including exited ones

// Bytes before and after a write. Two racing writes of the same bytes are a finding of another kind.
struct Change { const uint8_t* before = nullptr; const uint8_t* after = nullptr; };

constexpr uint32_t kGlobalPage = 1024, kGlobalCell = 16;    // bytes

// Global memory that a grid touched: a bit per byte of each cell of each page.
struct Touched {
    struct Bytes { uint16_t written = 0, read = 0; };
    std::unordered_map<uint64_t, std::array<Bytes, kGlobalPage / kGlobalCell>> pages;
};

// Memory whose writes are recorded: a byte of `written` for each byte, owned by the caller.
struct Output {
    uint64_t base, bytes;
    uint8_t* written;
};

// Result of the last cell of an operation, reused for equal cells: an operation touches many cells, and most are equal.
template <class C>
struct Repeats {
    bool known = false;
    uint16_t bytes = 0;
    C before, after;
};

class Races {
public:
    Races(Findings& findings, const Program& program) : findings_(findings), program_(program) {}
    bool enabled = false;
    // Order tensor memory by wait and fence only, as ISA 9.7.16.6 says, and by an arrival of cp.async the copied bytes
    // only, as 8.9.1.1 says.
    bool by_letter = false;
    std::vector<Output> outputs;

    // Returns a clock slot for an operation that is ordered after `order`. Seeing an epoch of a slot means seeing all
    // earlier ones; so a slot is reused only if the operation is ordered after everything in it.
    uint32_t take_slot(const Order& order);
    void give_slot(uint32_t slot) {
        issuers_.erase(slot);
        free_.push_back(slot);
    }
    void end(const WarpClock& clock) { ended_.push_back(clock.slot); }
    uint32_t new_slot();
    // From `epoch` on, the slot belongs to a warp or an operation of this CTA.
    void owns(uint32_t slot, uint32_t epoch, int32_t cta);
    int32_t cta_of(const Access& access) const;
    size_t slots() const { return epochs_.size(); }     // taken at one time or another
    uint32_t next_epoch(uint32_t slot) { return ++epochs_[slot]; }

    void start(WarpClock& clock, int32_t cta);
    // Publishes the accesses of `lanes` so far into `to`, and starts a new epoch.
    void release(WarpClock& clock, Order& to, uint32_t lanes);
    void acquire(WarpClock& clock, const Order& from, uint32_t lanes = kWarp);
    void acquire_copy(WarpClock& clock, uint32_t slot, uint32_t epoch, uint32_t lanes);
    // Relaxed operations on a barrier: they carry what fences before or after them order.
    void release_relaxed(WarpClock& clock, Order& to, uint32_t lanes);
    void acquire_relaxed(WarpClock& clock, const Order& from, uint32_t lanes);
    void sync_lanes(WarpClock& clock);
    void meet_lanes(WarpClock& clock);
    void proxy_fence(WarpClock& clock, bool global, bool shared, uint32_t lanes);
    void barrier_init_fence(WarpClock& clock);
    void tensormap_fence(WarpClock& clock, int semantics, uint32_t lanes);
    void tensor_fence(WarpClock& clock, bool after, uint32_t lanes);
    void fence(WarpClock& clock, int semantics, int scope, uint32_t lanes);
    void fence_sc(WarpClock& clock, uint32_t lanes);
    // Strong accesses to a location that is used as a flag.
    void flag_write(WarpClock& clock, uint64_t key, int semantics, int scope, uint32_t lanes);
    void flag_read(WarpClock& clock, uint64_t key, int semantics, int scope, uint32_t lanes);

    void global(const Agent& agent, uint64_t address, uint32_t bytes, uint8_t kind, Change change = {});
    void shared(const Agent& agent, Cta& cta, uint32_t offset, uint32_t bytes, uint8_t kind, Change change = {});
    // All reads, or all writes, of one operation in the shared memory of `ctas`.
    void shared(const Agent& agent, Cta* const* ctas, const std::vector<SharedRange>& ranges, bool write);
    // An access to a few bytes comes soon. The words of several lanes lie far apart, and their loads should overlap.
    void prefetch(const Cta& cta, uint32_t offset, uint32_t bytes) const;
    void tmem(const Agent& agent, Sm& sm, const TmemRect& rect, uint8_t kind);
    // Deallocation of columns: all uses must be ordered before it.
    void end_of_tmem(const Agent& agent, Sm& sm, const TmemRect& rect);
    // Last writer of these bytes of global memory outside of CTA `but`; its row is -1 if it is unknown.
    Place writer(uint64_t address, uint32_t bytes, int32_t but) const;
    // The tensormap proxy reads a tensor map in global memory.
    void tensor_map(const Agent& agent, uint64_t address, uint32_t bytes);
    // Use of a barrier: its init must be visible to the agent.
    void barrier_use(const Agent& agent, const Access& init, bool remote);
    // End of a CTA's shared memory: all accesses must be ordered before the exit of its last warp. `sources`: includes
    // reads by the async proxy; correct kernels end without waiting for the reads of their last bulk store.
    void end_of_shared(const Cta& cta, bool sources);

    // The previous grid may still run. `before`: memory that it touched; null if unknown, so any.
    void overlap(std::shared_ptr<const Touched> before);
    void wait_for_grid_before(WarpClock& clock);
    // Memory that this grid touched, and, unless the grid waited for it, the previous one.
    std::shared_ptr<Touched> touched() const;

    // The operation of this slot and epoch arrives at the mbarrier at `offset`; findings about the operation name it.
    void arrives(uint32_t slot, uint32_t epoch, uint32_t offset) {
        if (slot >= arrivals_.size()) arrivals_.resize(slot + 1);
        arrivals_[slot] = {epoch, offset};
    }

    // Under order_by_letter: `slot` belongs to tcgen05 operations that `thread` issues. In practice these execute in
    // order.
    void same_issuer(uint32_t slot, uint64_t thread) { issuers_[slot] = thread; }

    // A barrier object or an allocation begins: earlier accesses are forgotten.
    void forget_shared(Cta& cta, uint32_t offset, uint32_t bytes);

private:
    void observe_fences(WarpClock& clock, const Order& from, uint32_t lanes);
    template <int space, class C>
    void touch(C& cell, const Agent& agent, uint16_t bytes, uint8_t kind);
    template <int space>
    bool clear(const Access& prior, const Agent& agent) const;
    template <int space>
    void touch_words(uint32_t* numbers, size_t count, Agent& agent, uint16_t bytes, uint8_t kind);
    template <int space, class C>
    void repeat(C& cell, const Agent& agent, uint16_t bytes, uint8_t kind, Repeats<C>& repeats);
    void shared_range(Agent& agent, Cta& cta, uint32_t offset, uint32_t bytes, uint8_t kind, Change change);
    void compare(const Access& prior, const Agent& agent, uint16_t bytes, uint8_t kind, int space);
    bool ordered(const Access& prior, const Agent& agent, int space) const;
    bool handed_on(const Access& prior, const Agent& agent, int space) const;
    void report(Check check, const Access& prior, const Agent& agent, uint8_t kind, int space, const char* missing, bool equal = false);
    bool same_thread(const Access& prior, const Agent& agent) const;
    bool changes_nothing(uint16_t bytes) const;

    void record_write(uint64_t address, uint32_t bytes);
    void compare_with_grid_before(const Agent& agent, uint64_t page, uint32_t cell, uint16_t bytes, uint8_t kind);

    Findings& findings_;
    const Program& program_;
    bool ends_ = false;  // columns are being deallocated
    uint64_t reports_ = 0;
    // Results for the words that the current operation has touched, and the words that it created last.
    struct Known { uint64_t operation = 0; uint32_t before = 0, after = 0; uint16_t bytes = 0; };
    void begin_operation();
    uint32_t number_of(const WholeWord& word);
    Words words_;
    uint64_t operation_ = 0;
    std::array<Known, 64> known_;
    std::array<uint32_t, 8> made_{};
    size_t made_count_ = 0;
    Repeats<Cell> pieces_;
    Change change_;     // change of the cell being compared, from its byte 0; null if unknown
    std::vector<uint32_t> epochs_;
    struct Owner { uint32_t from; int32_t cta; };
    std::vector<std::vector<Owner>> owners_;        // by slot, in the order of their first epochs
    std::deque<uint32_t> free_;         // free slots of operations
    std::deque<uint32_t> ended_;        // slots of ended warps
    std::unordered_map<uint64_t, std::vector<Cell>> pages_;
    std::vector<Cell>* last_page_ = nullptr;     // page of the last access
    uint64_t last_page_number_ = 0;
    std::map<std::tuple<uint64_t, int, uint32_t>, Order> flags_;     // by location, scope and domain
    std::shared_ptr<const Touched> before_;
    int64_t before_slot_ = -1;          // slot of the previous grid if it may still run; it ends in epoch 1
    bool has_waited_ = false;
    struct Arrival { uint32_t epoch = 0, offset = 0; };
    std::vector<Arrival> arrivals_;     // by slot: barrier of its last operation that has one
    std::string barrier_of(uint32_t slot, uint32_t epoch) const;
    std::unordered_map<uint32_t, uint64_t> issuers_;    // under order_by_letter: thread of tcgen05 operations, by slot
};

}  // namespace warpcheck
