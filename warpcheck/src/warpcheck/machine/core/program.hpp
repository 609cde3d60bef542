// Flat instruction table of a kernel. The Python side lowers PTX to it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "modifiers.hpp"

namespace warpcheck {

inline std::string hex(uint64_t v) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(v));
    return text;
}

// clang-format off
#define WARPCHECK_TYPES(X) \
    X(pred) X(b8) X(b16) X(b32) X(b64) X(b128) X(u8) X(u16) X(u32) X(u64) X(s8) X(s16) X(s32) X(s64) \
    X(f16) X(bf16) X(f16x2) X(bf16x2) X(f32) X(f64) X(f32x2) X(tf32) \
    X(e4m3) X(e5m2) X(e2m1) X(e2m3) X(e3m2) X(ue8m0)
// clang-format on

enum class Type : uint8_t {
#define X(name) name,
    WARPCHECK_TYPES(X)
#undef X
        count
};

// Generic addresses. A global address is the host's address of the memory; the other windows lie above.
constexpr uint64_t kSharedBase = 0x0100000000000000ull;
constexpr uint64_t kParamBase = 0x0200000000000000ull;
constexpr uint64_t kLocalBase = 0x0300000000000000ull;
constexpr uint64_t kWindowMask = 0xFF00000000000000ull;
// As on hardware, bits 24 and up of a shared address hold the CTA's rank in its cluster.
constexpr uint32_t kRankShift = 24;
constexpr uint32_t kSharedMask = (1u << kRankShift) - 1;
// The system reserves the first kilobyte of shared memory.
constexpr uint32_t kSharedReserved = 1024;

// A register or a constant. Both are rows: 32 lanes of uint32_t (up to 32 bits), 32 lanes of uint64_t (64 bits), or two
// planes of 32 uint64_t (128 bits). A predicate is one word with a bit per lane.
struct Operand {
    enum Kind : uint8_t { None, Reg, Const };
    uint32_t offset = 0;    // in 32-bit words, in the register file or the constant bank
    int32_t id = -1;        // register number, for its valid bits; -1 for constants
    Kind kind = None;
    uint8_t bits = 0;
    bool negated = false;   // predicates
};

struct Instr {
    Op op;
    Type type = Type::b32, type2 = Type::b32;
    uint8_t ndst = 0;           // number of destinations, which are the first operands
    bool aligned = false;       // .aligned: all lanes of the warp must execute it together
    bool sync = false;          // waits for all lanes of its member mask
    Operand guard;
    uint32_t first = 0, count = 0;  // operands
    mod::Modifiers modifiers;

    // The modifiers, as the record that modifiers.hpp assigns to the operation.
    template <class M>
    const M& as() const {
        if (mod::kRecordOf[size_t(op)] != M::kRecord) throw std::logic_error("an instruction was read by another one's modifiers");
        return *reinterpret_cast<const M*>(modifiers.bytes);
    }
};

// Values of registers that are set when a warp starts.
enum class Preset : uint8_t {
    TidX, TidY, TidZ, NtidX, NtidY, NtidZ, CtaidX, CtaidY, CtaidZ, NctaidX, NctaidY, NctaidZ, LaneId, WarpId, NwarpId,
    SmId, NsmId, GridId, ClusteridX, ClusteridY, ClusteridZ, NclusteridX, NclusteridY, NclusteridZ, ClusterCtaidX,
    ClusterCtaidY, ClusterCtaidZ, ClusterNctaidX, ClusterNctaidY, ClusterNctaidZ, ClusterCtarank, ClusterNctarank,
    IsExplicitCluster, LanemaskEq, LanemaskLe, LanemaskLt, LanemaskGe, LanemaskGt, DynamicSmemSize, TotalSmemSize,
    AggrSmemSize, SharedSymbol, Zero, count
};

struct PresetRegister {
    Operand where;
    Preset what;
    uint64_t value;     // SharedSymbol: offset in the shared window
};

struct Program {
    std::vector<Instr> code;
    std::vector<Operand> operands;
    std::vector<uint32_t> constants;        // rows of constants
    std::vector<PresetRegister> presets;
    uint32_t register_words = 0;
    uint32_t register_count = 0;
    std::vector<uint8_t> register_bits;     // by register number
    uint32_t local_bytes = 0;               // per thread
    uint32_t static_shared_bytes = 0;
    uint32_t max_registers = 0;             // per thread at launch, as on the chip
    bool moves_registers = true;            // false: the assembler ignores setmaxnreg, as the count at launch is unknown
    bool uses_wgmma = false;
    std::map<uint32_t, std::string> barrier_names;      // by offset in the shared window

    // "load_mma_KV.full[0] (mbarrier at 0x488)", or "the mbarrier at 0x488" if it has no name.
    std::string barrier(uint32_t offset) const {
        const auto found = barrier_names.find(offset);
        return found == barrier_names.end() ? "the mbarrier at " + hex(offset) : found->second + " (mbarrier at " + hex(offset) + ")";
    }
};

}  // namespace warpcheck
