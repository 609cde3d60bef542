// Data races by happens-before (PTX ISA chapter 8). Every access is compared with the last write and the last reads of
// the same bytes: it must be ordered after them by the synchronisation that was actually performed, whatever the
// schedule happened to do. A generic-proxy write needs a proxy fence before the async proxy may touch its bytes.
#pragma once

#include <deque>
#include <string>

#include "clock.hpp"
#include "footprint.hpp"

namespace fa4 {

struct Place;
struct Warp;
struct AsyncOp;
struct Cta;
struct Sm;

// Who accesses, and after what.
struct Agent {
    const Order* order;
    uint32_t slot, epoch, self_from;
    int32_t row, cta;
    int16_t warp;
    bool async;     // async proxy
};

class Races {
public:
    bool enabled = false;

    uint32_t take_slot();
    void give_slot(uint32_t slot) { free_.push_back(slot); }
    uint32_t next_epoch(uint32_t slot) { return ++epochs_[slot]; }

    void start(WarpClock& clock);
    // Publishes the warp's accesses so far into `to`, and starts a new epoch.
    void release(WarpClock& clock, Order& to);
    void acquire(WarpClock& clock, const Order& from);
    void proxy_fence(WarpClock& clock, int spaces);
    void fence(WarpClock& clock, int semantics);
    // Strong accesses to a location that carries a flag.
    void flag_write(WarpClock& clock, uint64_t key, int semantics);
    void flag_read(WarpClock& clock, uint64_t key, int semantics);

    void global(const Agent& agent, uint64_t address, uint32_t bytes, uint8_t kind);
    void shared(const Agent& agent, Cta& cta, uint32_t offset, uint32_t bytes, uint8_t kind);
    void tmem(const Agent& agent, Sm& sm, const TmemRect& rect, uint8_t kind);

    // A barrier object or allocation starts afresh.
    void forget_shared(Cta& cta, uint32_t offset, uint32_t bytes);

private:
    template <class C>
    void touch(C& cell, const Agent& agent, uint16_t bytes, uint8_t kind, int space);
    void compare(const Access& prior, const Agent& agent, uint16_t bytes, uint8_t kind, int space);
    [[noreturn]] void report(const Access& prior, const Agent& agent, uint8_t kind, int space, bool proxy);

    static constexpr uint32_t kPage = 1024, kGlobalCell = 16;
    std::vector<uint32_t> epochs_;
    std::deque<uint32_t> free_;
    std::unordered_map<uint64_t, std::vector<Cell<2>>> pages_;
    std::unordered_map<uint64_t, Order> flags_;
};

}  // namespace fa4
