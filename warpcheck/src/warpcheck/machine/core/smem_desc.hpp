// Shared-memory matrix descriptors of wgmma and tcgen05, and the canonical layouts that they describe. PTX ISA
// 9.7.15.5.1.2 (wgmma), 9.7.16.3 and 9.7.16.4.1 (tcgen05).
#pragma once

#include "footprint.hpp"

namespace warpcheck {

enum class Swizzle : uint8_t { None, B32, B64, B128, B128Atom32 };

// Decoded descriptor. All offsets are in bytes.
struct SmemDesc {
    uint32_t start;             // offset in the shared window
    uint32_t leading;           // LBO
    uint32_t stride;            // SBO
    uint8_t base_offset;        // phase of the swizzle pattern, in 128-byte lines
    bool leading_is_address;    // sm_103a: LBO holds the address of the second part of K
    Swizzle swizzle;
};

namespace detail {
inline SmemDesc decode_smem_fields(uint64_t desc) {
    const auto field = [desc](int first, int bits) { return uint32_t(desc >> first) & ((1u << bits) - 1); };
    return {field(0, 14) << 4, field(16, 14) << 4, field(32, 14) << 4, uint8_t(field(49, 3)), false, Swizzle::None};
}
}  // namespace detail

inline SmemDesc decode_smem_desc_sm90(uint64_t desc) {
    SmemDesc d = detail::decode_smem_fields(desc);
    constexpr Swizzle modes[4] = {Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32};
    d.swizzle = modes[desc >> 62];
    return d;
}

inline SmemDesc decode_smem_desc_sm100(uint64_t desc) {
    SmemDesc d = detail::decode_smem_fields(desc);
    if ((desc >> 46 & 7) != 1)
        throw UnitError(Fault::BadDescriptor, "shared-memory descriptor: bits 46-48 hold " +
                        std::to_string(desc >> 46 & 7) + ", expected 1");
    d.leading_is_address = desc >> 52 & 1;
    switch (desc >> 61) {
        case 0: d.swizzle = Swizzle::None; break;
        case 1: d.swizzle = Swizzle::B128Atom32; break;
        case 2: d.swizzle = Swizzle::B128; break;
        case 4: d.swizzle = Swizzle::B64; break;
        case 6: d.swizzle = Swizzle::B32; break;
        default: throw UnitError(Fault::BadDescriptor, "shared-memory descriptor: invalid swizzle mode " +
                                 std::to_string(desc >> 61) + " in bits 61-63");
    }
    return d;
}

// Swizzled address: the index of the 16-byte chunk (B128Atom32: 32-byte chunk) in a row of the pattern is XORed with
// the index of the 128-byte line. `address` is absolute in the shared window.
constexpr uint32_t swizzle_address(Swizzle mode, uint32_t address) {
    switch (mode) {
        case Swizzle::B32: return address ^ (address >> 7 & 1) << 4;
        case Swizzle::B64: return address ^ (address >> 7 & 3) << 4;
        case Swizzle::B128: return address ^ (address >> 7 & 7) << 4;
        case Swizzle::B128Atom32: return address ^ (address >> 7 & 3) << 5;
        default: return address;
    }
}

// Positions of the chunks of an operand tile. A chunk is 16 bytes: T = 128 / (bits of an element) consecutive elements
// along the major dimension. A line is an index of the other dimension. In units of chunks, the canonical layouts of
// PTX ISA 9.7.16.3.3 are, for a swizzle with w chunks per row (w = 1, 2, 4, 8):
//   K-major,  no swizzle   (line (8, m), chunk k)      : ((1, SBO), LBO)
//   K-major,  swizzled     (line (8, m), chunk k)      : ((w, SBO), 1)
//   MN-major, no swizzle   (line (8, k), chunk m)      : ((1, LBO), SBO)
//   MN-major, swizzled     (line (8, k), chunk (w, m)) : ((w, SBO), (1, LBO))
//   MN-major, B128Atom32   (line (4, k), chunk (8, m)) : ((8, SBO), (1, LBO))
class OperandLayout {
public:
    OperandLayout(const SmemDesc& desc, bool mn_major) : d_(desc), mn_major_(mn_major) {
        if (d_.swizzle == Swizzle::B128Atom32 && !mn_major)
            throw UnitError(Fault::BadDescriptor, "shared-memory descriptor: 128-byte swizzle with 32-byte atoms is for MN-major operands only");
        if (d_.leading_is_address)
            throw UnitError(Fault::Unsupported, "shared-memory descriptor: absolute leading-dimension addresses (sm_103a, K = 96) are not modelled");
    }

    // Offset of a chunk in the shared window.
    uint32_t chunk_offset(uint32_t line, uint32_t chunk) const {
        uint32_t offset;
        if (d_.swizzle == Swizzle::None) {
            offset = mn_major_ ? (line & 7) * 16 + (line >> 3) * d_.leading + chunk * d_.stride
                               : (line & 7) * 16 + (line >> 3) * d_.stride + chunk * d_.leading;
            return (d_.start + offset) & kWindowMask;
        }
        const uint32_t width = d_.swizzle == Swizzle::B32 ? 2 : d_.swizzle == Swizzle::B64 ? 4 : 8;
        const uint32_t group = d_.swizzle == Swizzle::B128Atom32 ? 4 : 8;
        offset = (line % group) * width * 16 + (line / group) * d_.stride;
        offset += mn_major_ ? (chunk % width) * 16 + (chunk / width) * d_.leading : chunk * 16;
        // The pattern depends on the absolute address. A tile that does not start at a boundary of the pattern has its
        // distance from one, in lines, as the base offset.
        const uint32_t phase = uint32_t(d_.base_offset) << 7;
        return (swizzle_address(d_.swizzle, d_.start + offset - phase) + phase) & kWindowMask;
    }

private:
    static constexpr uint32_t kWindowMask = 0x3FFFF;
    SmemDesc d_;
    bool mn_major_;
};

}  // namespace warpcheck
