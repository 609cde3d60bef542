// Vector clocks: what happened before what. races.hpp says how accesses are judged by them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace warpcheck {

// Component s: accesses of agent s with an epoch up to it are ordered before the owner of the clock. Copies share their
// components until one of them learns more: most orders that are passed on hold what the receiver has already.
class Clock {
public:
    Clock() = default;
    Clock(const Clock& other) : shared_(other.shared_) { if (shared_) ++shared_->owners; }
    Clock(Clock&& other) noexcept : shared_(std::exchange(other.shared_, nullptr)) {}
    Clock& operator=(Clock other) noexcept {
        std::swap(shared_, other.shared_);
        return *this;
    }
    ~Clock() { if (shared_ && !--shared_->owners) delete shared_; }

    uint32_t size() const { return shared_ ? uint32_t(shared_->at.size()) : 0; }
    uint32_t operator[](uint32_t slot) const { return slot < size() ? shared_->at[slot] : 0; }
    void set(uint32_t slot, uint32_t value) {
        if (value <= (*this)[slot]) return;
        own(slot + 1);
        shared_->at[slot] = value;
    }
    void join(const Clock& other) {
        if (shared_ != other.shared_ && other.shared_) learn(other);
    }
    bool covers(const Clock& other) const {
        const uint32_t both = std::min(size(), other.size());
        for (uint32_t i = 0; i < both; ++i)
            if (other.shared_->at[i] > shared_->at[i]) return false;
        for (uint32_t i = both; i < other.size(); ++i)
            if (other.shared_->at[i]) return false;
        return true;
    }

private:
    struct Shared {
        uint32_t owners;
        std::vector<uint32_t> at;
    };
    void learn(const Clock& other) {
        if (covers(other)) return;
        if (other.covers(*this)) {
            *this = other;
            return;
        }
        own(other.size());
        for (uint32_t i = 0; i < other.size(); ++i) shared_->at[i] = std::max(shared_->at[i], other.shared_->at[i]);
    }
    // Components of its own, `count` at least.
    void own(uint32_t count) {
        if (!shared_) {
            shared_ = new Shared{1, {}};
        } else if (shared_->owners > 1) {
            --shared_->owners;
            shared_ = new Shared{1, shared_->at};
        }
        if (shared_->at.size() < count) shared_->at.resize(count, 0);
    }

    Shared* shared_ = nullptr;
};

// Orders that travel beside plain happens-before: accesses that a fence has made visible to somebody who does not see
// every access that happened before.
enum Via : uint8_t {
    kAsyncGlobal, kAsyncShared,     // generic accesses to global and shared memory -> async proxy
    kBarrierInit,                   // mbarrier.init -> other CTAs and the async proxy
    kMapReleased,                   // generic accesses to tensor maps, released to the tensormap proxy
    kTensorReleased,                // tcgen05 operations handed over by a commit or tcgen05.fence::before_thread_sync
    kTensorWaited,                  // and those that a thread waited for before it arrived, with no fence: in practice over
    kCopyWaited,                    // bulk stores that a thread waited for, and what a proxy fence had shown them: the same
    kCopyArrived,                   // what a thread did before its cp.async.mbarrier.arrive: in practice handed over as well
    kCarried,                       // those above pass from thread to thread, those below take effect where their fence is
    kMap = kCarried, kTensor, kVias
};

// Some lanes of a warp have published more than the warp as a whole. Not `granted`: as by kCopyArrived.
struct Partial {
    uint32_t slot, epoch, lanes;
    bool granted = true;
};

struct Order {
    Clock seen;
    Clock via[kVias];
    std::vector<Partial> partial;

    void join(const Order& other) {
        seen.join(other.seen);
        for (int i = 0; i < kCarried; ++i) via[i].join(other.via[i]);
        for (const Partial& p : other.partial) add(p);
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
    // As `join`, for the same thread: with what does not pass from thread to thread.
    void absorb(const Order& other) {
        join(other);
        for (int i = kCarried; i < kVias; ++i) via[i].join(other.via[i]);
    }
    // With what `other` is ordered after, but by practice alone.
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

// What some lanes of a warp acquired alone.
struct Held { uint32_t lanes; Order order; };
// A cp.async that lanes waited for: each has seen what it copied itself.
struct Copied { uint32_t slot, epoch, lanes; };

// Reach of a release or an acquire: threads of the CTA, of the cluster, of the chip.
constexpr int kScopes = 3;

// The clock state of one warp. What a lane acquires, and what it releases, is its own; of the other lanes what they
// acquired and did before the warp last synchronised.
struct WarpClock {
    Order order;                // what its next operation is ordered after
    std::vector<Held> held;     // and, of some lanes, more
    std::vector<Copied> copied;
    Order observed[kScopes];    // relaxed reads, by their reach: made effective by an acquire fence
    Order fenced[kScopes];      // published by a release fence of this reach: carried by later relaxed writes
    uint32_t domain[kScopes] = {};      // numbers of its CTA and cluster, and 0
    uint32_t slot = 0, epoch = 1, self_from = 1;
    uint32_t synced = 0;                // epoch up to which the lanes see each other's accesses
    uint32_t met = 0;                   // and up to which their reads are over: a shuffle or vote took values of all lanes
    uint32_t last_write[32] = {}, last_read[32] = {};   // epochs, by lane
    uint32_t alive = ~0u;               // lanes that have not ended
    uint32_t unsynced = 0;              // lanes that may have accesses since
    bool has_fenced = false, has_observed = false;

    void touch(int lane, bool write) {
        (write ? last_write : last_read)[lane] = epoch;
        unsynced |= 1u << lane;
    }
    // May `lanes` publish for all of the warp?
    bool whole(uint32_t lanes) const {
        for (uint32_t others = unsynced & ~lanes; others; others &= others - 1)
            if (last_write[__builtin_ctz(others)] > synced || last_read[__builtin_ctz(others)] > std::max(synced, met)) return false;
        return true;
    }
    // What `lanes` have beside `order`. `own`: for an operation of theirs; else for others, to whom they release it.
    void add_held(Order& to, uint32_t lanes, bool own) const {
        for (const Held& h : held)
            if (h.lanes & lanes) own ? to.absorb(h.order) : to.join(h.order);
        for (const Copied& c : copied) {
            if (!(c.lanes & ~lanes)) to.seen.set(c.slot, c.epoch);
            else if (c.lanes & lanes) to.add({c.slot, c.epoch, c.lanes & lanes});
        }
    }
    // The lanes have synchronised: all of them have what each had.
    void share() {
        for (const Held& h : held) order.absorb(h.order);
        for (const Copied& c : copied) order.seen.set(c.slot, c.epoch);
        held.clear(), copied.clear();
    }
    // Enters the warp's accesses so far, as `lanes` may publish them.
    void stamp(Order& to, uint32_t lanes) const {
        if (whole(lanes)) {
            to.seen.set(slot, epoch);
        } else {
            to.seen.set(slot, synced);
            to.add({slot, epoch, lanes});
        }
    }
};

}  // namespace warpcheck
