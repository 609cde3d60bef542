// Vector clocks: what happened before what. races.hpp says how accesses are judged by them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace fa4 {

// Component s: accesses of agent s with an epoch up to it are ordered before the owner of the clock.
struct Clock {
    std::vector<uint32_t> at;

    uint32_t operator[](uint32_t slot) const { return slot < at.size() ? at[slot] : 0; }
    void set(uint32_t slot, uint32_t value) {
        if (slot >= at.size()) at.resize(slot + 1, 0);
        at[slot] = std::max(at[slot], value);
    }
    void join(const Clock& other) {
        if (at.size() < other.at.size()) at.resize(other.at.size(), 0);
        for (size_t i = 0; i < other.at.size(); ++i) at[i] = std::max(at[i], other.at[i]);
    }
};

// Two orders travel together: `seen` is plain happens-before; `proxied` holds the generic-proxy accesses that a
// proxy fence has made visible to the async proxy, for global [0] and shared [1] memory.
struct Order {
    Clock seen;
    Clock proxied[2];

    void join(const Order& other) {
        seen.join(other.seen);
        for (int i = 0; i < 2; ++i) proxied[i].join(other.proxied[i]);
    }
    void clear() { *this = Order(); }
};

// The clock state of one warp.
struct WarpClock {
    Order order;            // what its next operation is ordered after
    Order observed;         // relaxed reads: made effective by an acquire fence
    Order fenced;           // published by a release fence: carried by later relaxed writes
    uint32_t slot = 0, epoch = 1, self_from = 1;
    bool has_fenced = false, has_observed = false;
};

enum AccessKind : uint8_t { kWrite = 1, kAsync = 2, kAtomic = 4 };

struct Access {
    uint32_t slot = 0, epoch = 0;   // epoch 0: none
    int32_t row = -1, cta = -1;
    int16_t warp = -1;
    uint16_t bytes = 0;             // which bytes of the cell
    uint8_t kind = 0;
};

// The last accesses of a few bytes. Two writes, because a word's neighbours may come from somebody else.
template <int Readers>
struct Cell {
    static constexpr int readers = Readers;
    Access writes[2];
    Access reads[Readers];
};

struct CtaShadow { std::vector<Cell<4>> cells; };      // shared memory, 4 bytes a cell
struct TmemShadow { std::vector<Cell<4>> cells; };     // TMEM, one 32-bit cell each

}  // namespace fa4
