// Vector clocks: the happens-before order between accesses. races.hpp compares accesses by these clocks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace warpcheck {

// Vector clock. Component s is an epoch: accesses of slot s up to it are ordered before the owner of the clock. The
// components lie in blocks. Clocks share blocks, and tables of them, until one of them grows (copy on write): most joins
// add nothing new, and a CTA knows few slots of the many that a grid takes.
class Clock {
public:
    Clock() = default;
    Clock(const Clock& other) : table_(other.table_) { if (table_) ++table_->owners; }
    Clock(Clock&& other) noexcept : table_(std::exchange(other.table_, nullptr)) {}
    Clock& operator=(Clock other) noexcept {
        std::swap(table_, other.table_);
        return *this;
    }
    ~Clock() { if (table_ && !--table_->owners) delete table_; }

    uint32_t operator[](uint32_t slot) const {
        const Block* const block = table_ ? table_->find(slot / kBlock) : nullptr;
        return block ? block->at[slot % kBlock] : 0;
    }
    void set(uint32_t slot, uint32_t value) {
        if (value <= (*this)[slot]) return;
        own();
        Block*& block = table_->place(slot / kBlock);
        own(block);
        block->at[slot % kBlock] = value;
    }
    void join(const Clock& other) {
        if (table_ != other.table_ && other.table_) learn(other);
    }
    bool covers(const Clock& other) const {
        if (!other.table_ || table_ == other.table_) return true;
        for (size_t i = 0; i < other.table_->blocks.size(); ++i)
            if (const Block* const theirs = other.table_->blocks[i]) {
                const Block* const mine = table_ ? table_->find(other.table_->first + uint32_t(i)) : nullptr;
                if (mine == theirs) continue;
                if (!mine || !mine->covers(*theirs)) return false;
            }
        return true;
    }

private:
    static constexpr uint32_t kBlock = 32;
    // Has a component that is not 0.
    struct Block {
        uint32_t owners = 1;
        uint32_t at[kBlock] = {};

        bool covers(const Block& other) const {
            uint32_t more = 0;
            for (uint32_t i = 0; i < kBlock; ++i) more |= other.at[i] > at[i];
            return !more;
        }
    };
    // Blocks from number `first` on; null: all components are 0.
    struct Table {
        uint32_t owners = 1, first = 0;
        std::vector<Block*> blocks;

        Table() = default;
        Table(const Table& other) : first(other.first), blocks(other.blocks) {
            for (Block* const block : blocks)
                if (block) ++block->owners;
        }
        Table& operator=(const Table&) = delete;
        ~Table() {
            for (Block* const block : blocks) release(block);
        }
        Block* find(uint32_t number) const { return number - first < blocks.size() ? blocks[number - first] : nullptr; }
        Block*& place(uint32_t number) {
            if (blocks.empty()) first = number;
            if (number < first) {
                blocks.insert(blocks.begin(), first - number, nullptr);
                first = number;
            }
            if (number - first >= blocks.size()) blocks.resize(number - first + 1);
            return blocks[number - first];
        }
    };
    static void release(Block* block) { if (block && !--block->owners) delete block; }
    void learn(const Clock& other) {
        if (covers(other)) return;
        if (other.covers(*this)) {
            *this = other;
            return;
        }
        own();
        for (size_t i = 0; i < other.table_->blocks.size(); ++i) {
            Block* const theirs = other.table_->blocks[i];
            if (!theirs) continue;
            Block*& mine = table_->place(other.table_->first + uint32_t(i));
            if (mine == theirs || (mine && mine->covers(*theirs))) continue;
            if (!mine || theirs->covers(*mine)) {
                release(mine);
                mine = theirs;
                ++mine->owners;
                continue;
            }
            own(mine);
            for (uint32_t k = 0; k < kBlock; ++k) mine->at[k] = std::max(mine->at[k], theirs->at[k]);
        }
    }
    // Makes the table unshared.
    void own() {
        if (!table_) {
            table_ = new Table;
        } else if (table_->owners > 1) {
            --table_->owners;
            table_ = new Table(*table_);
            table_->owners = 1;
        }
    }
    static void own(Block*& block) {
        if (!block) {
            block = new Block;
        } else if (block->owners > 1) {
            --block->owners;
            block = new Block(*block);
            block->owners = 1;
        }
    }

    Table* table_ = nullptr;
};

// Orders beside plain happens-before. Each one lists the accesses that a fence, or a weaker mechanism, has ordered for
// a purpose that plain happens-before does not cover, such as another proxy.
enum Via : uint8_t {
    kAsyncGlobal, kAsyncShared,     // generic accesses to global and shared memory, made visible to the async proxy
    kBarrierInit,                   // mbarrier.init, made visible to other CTAs and the async proxy
    kMapReleased,                   // generic accesses to tensor maps, released to the tensormap proxy
    kTensorReleased,                // tcgen05 operations, released by a commit or tcgen05.fence::before_thread_sync
    kTensorWaited,                  // the same, waited for before an arrival without a fence: ordered in practice
    kCopyWaited,                    // bulk stores that a thread waited for, and what a proxy fence showed them: ordered in practice
    kCopyArrived,                   // accesses of a thread before its cp.async.mbarrier.arrive: ordered in practice
    kHandedOn,                      // accesses that a thread had acquired before a relaxed arrival: ordered in practice
    kExecuted,                      // beyond plain happens-before: instructions of warps that are over, whatever is visible
    kCarried,                       // kinds above pass between threads; kinds below take effect in the fencing thread only
    kMap = kCarried, kTensor, kVias
};

// Some lanes of a warp have published accesses up to a later epoch than the whole warp. If not `granted`, the order is
// that of kCopyArrived.
struct Partial {
    uint32_t slot, epoch, lanes;
    bool granted = true;

    bool covers(const Partial& other) const {
        return slot == other.slot && epoch >= other.epoch && !(other.lanes & ~lanes) && granted >= other.granted;
    }
};

struct Order {
    Clock seen;
    Clock via[kVias];
    std::vector<Partial> partial;
    // What fence.sc of threads had before them, where an observation, also a relaxed one, leads from such a fence to the
    // owner. A later fence.sc of the owner then comes after those fences, and acquires it (ISA 8.9.3, 8.9.4). Shared, because
    // most joins add nothing new.
    std::shared_ptr<const Order> fences;

    // True if warp `slot` had executed its instructions of this epoch.
    bool after(uint32_t slot, uint32_t epoch) const { return seen[slot] >= epoch || via[kExecuted][slot] >= epoch; }
    // Joins what had been executed before `other`, and nothing that it makes visible.
    void join_executed(const Order& other) {
        via[kExecuted].join(other.seen);
        via[kExecuted].join(other.via[kExecuted]);
    }
    void join(const Order& other) {
        seen.join(other.seen);
        for (int i = 0; i < kCarried; ++i) via[i].join(other.via[i]);
        for (const Partial& p : other.partial) add(p);
        join_fences(other);
    }
    void join_fences(const Order& other) {
        if (!other.fences || other.fences == fences || (fences && fences->covers(*other.fences))) return;
        if (!fences || other.fences->covers(*fences)) {
            fences = other.fences;
            return;
        }
        auto both = std::make_shared<Order>(*fences);
        both->join(*other.fences);
        fences = std::move(both);
    }
    // True if it contains everything in `other`.
    bool covers(const Order& other) const {
        if (!seen.covers(other.seen)) return false;
        for (int i = 0; i < kVias; ++i)
            if (!via[i].covers(other.via[i])) return false;
        for (const Partial& p : other.partial)
            if (seen[p.slot] < p.epoch && std::none_of(partial.begin(), partial.end(), [&](const Partial& mine) { return mine.covers(p); })) return false;
        return !other.fences || other.fences == fences || (fences && fences->covers(*other.fences));
    }
    void add(const Partial& added) {
        for (Partial& p : partial)
            if (p.slot == added.slot && p.granted == added.granted) {
                p.epoch = std::max(p.epoch, added.epoch);
                p.lanes |= added.lanes;
                return;
            }
        partial.push_back(added);
    }
    // Joins an order of the same thread, including the kinds that do not pass from thread to thread.
    void absorb(const Order& other) {
        join(other);
        for (int i = kCarried; i < kVias; ++i) via[i].join(other.via[i]);
    }
    // Joins everything that `other` is ordered after, as order in practice only (kCopyArrived).
    void lean_on(const Order& other) {
        for (int i = 0; i < kCarried; ++i) via[i].join(other.via[i]);
        via[kCopyArrived].join(other.seen);
        for (Partial p : other.partial) {
            p.granted = false;
            add(p);
        }
    }
    void clear() { *this = Order(); }
};

// Order that only some lanes of a warp have acquired.
struct Held { uint32_t lanes; Order order; };
// A cp.async that lanes waited for. Each lane sees only the bytes that it copied itself.
struct Copied { uint32_t slot, epoch, lanes; };

// Scope of a release or an acquire: CTA, cluster, GPU.
constexpr int kScopes = 3;

// Clock state of one warp. Each lane acquires and releases for itself. It sees the accesses and acquisitions of other
// lanes up to the last synchronisation of the warp (`synced`).
struct WarpClock {
    Order order;                // what the next operation of the warp is ordered after
    std::vector<Held> held;     // orders of some lanes beyond `order`
    std::vector<Copied> copied;
    Order observed[kScopes];    // by scope: relaxed reads, which take effect at an acquire fence
    Order fenced[kScopes];      // by scope: published by a release fence, and carried by later relaxed writes
    uint32_t domain[kScopes] = {};      // numbers of the CTA and of the cluster, and 0 for the GPU
    uint32_t slot = 0, epoch = 1, self_from = 1;
    uint32_t synced = 0;                // lanes see each other's accesses up to this epoch
    uint32_t met = 0;                   // reads up to this epoch are over: a shuffle or vote exchanged values of all lanes
    uint32_t last_write[32] = {}, last_read[32] = {};   // epochs, by lane
    uint32_t alive = ~0u;               // lanes that have not exited
    uint32_t unsynced = 0;              // lanes that may have accesses after `synced`
    bool has_fenced = false, has_observed = false;

    void touch(int lane, bool write) {
        (write ? last_write : last_read)[lane] = epoch;
        unsynced |= 1u << lane;
    }
    // True if `lanes` may publish the accesses of the whole warp.
    bool whole(uint32_t lanes) const {
        for (uint32_t others = unsynced & ~lanes; others; others &= others - 1)
            if (last_write[__builtin_ctz(others)] > synced || last_read[__builtin_ctz(others)] > std::max(synced, met)) return false;
        return true;
    }
    // Joins what `lanes` have acquired beyond `order`. `own`: the target is an operation of these lanes; otherwise it
    // is a release to other threads.
    void add_held(Order& to, uint32_t lanes, bool own) const {
        for (const Held& h : held)
            if (h.lanes & lanes) own ? to.absorb(h.order) : to.join(h.order);
        for (const Copied& c : copied) {
            if (!(c.lanes & ~lanes)) to.seen.set(c.slot, c.epoch);
            else if (c.lanes & lanes) to.add({c.slot, c.epoch, c.lanes & lanes});
        }
    }
    // The lanes have synchronised: every lane gets what each lane had.
    void share() {
        for (const Held& h : held) order.absorb(h.order);
        for (const Copied& c : copied) order.seen.set(c.slot, c.epoch);
        held.clear(), copied.clear();
    }
    // Joins the fences of `lanes`.
    void add_fences(Order& to, uint32_t lanes) const {
        to.join_fences(order);
        for (const Held& h : held)
            if (h.lanes & lanes) to.join_fences(h.order);
    }
    // Publishes the warp's accesses so far into `to`, as far as `lanes` may publish them.
    void stamp(Order& to, uint32_t lanes) const {
        if (whole(lanes)) {
            to.seen.set(slot, epoch);
        } else {
            to.seen.set(slot, synced);
            to.add({slot, epoch, lanes});
            to.via[kExecuted].set(slot, epoch);
        }
    }
};

}  // namespace warpcheck
