// Footprint of an operation (the memory it touches), and the error by which a unit refuses an operation.
// Every unit has two functions: one lists the footprint of an operation, one executes it on raw pointers. Units keep no
// state. The engine owns all memory and decides when an operation takes effect; it checks bounds, poison and races by
// the footprint.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace warpcheck {

// Reason of a refusal. The engine turns each into one of the emulator's checks.
enum class Fault : uint8_t {
    Unsupported,    // legal, but no unit models it
    BadDescriptor,  // reserved bits, or a combination that the ISA forbids
    Misaligned,
    OutOfBounds,    // address outside the shared memory window or TMEM
};

struct UnitError : std::runtime_error {
    Fault fault;
    UnitError(Fault f, const std::string& what) : std::runtime_error(what), fault(f) {}
};

// Byte range in the shared memory of one CTA. `offset` counts from the start of the CTA's shared window (the low 18
// bits of a matrix descriptor or of a shared::cta address).
struct SharedRange {
    uint32_t offset;
    uint32_t bytes;
    uint8_t cta;    // 0: the even CTA of a pair, or the only one; 1: the odd one
    bool write;
};

// Rectangle of 32-bit TMEM cells: lanes [lane, lane + lanes) x columns [column, column + columns). A narrow element
// counts as its whole cell.
struct TmemRect {
    uint16_t lane, lanes;
    uint16_t column, columns;
    uint8_t cta;
    bool write;
};

struct Footprint {
    std::vector<SharedRange> shared;
    std::vector<TmemRect> tmem;

    void clear() { shared.clear(); tmem.clear(); }
};

// Tensor memory of one CTA: 128 lanes x 512 columns of 32-bit cells, stored lane by lane.
constexpr uint32_t kTmemLanes = 128;
constexpr uint32_t kTmemColumns = 512;

// TMEM address: the lane is in the upper, the column in the lower 16 bits.
struct TmemAddress {
    uint32_t lane, column;
    explicit constexpr TmemAddress(uint32_t taddr) : lane(taddr >> 16), column(taddr & 0xFFFF) {}
};

// Memories of one CTA, as an operation accesses them.
struct CtaMemory {
    uint8_t* shared = nullptr;      // offset 0 of the shared window
    uint32_t shared_bytes = 0;
    uint32_t* tmem = nullptr;       // [kTmemLanes][kTmemColumns]
};

}  // namespace warpcheck
