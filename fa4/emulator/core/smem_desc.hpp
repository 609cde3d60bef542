// Shared-memory matrix descriptors of wgmma and tcgen05, and the canonical layouts they describe.
// PTX ISA 9.7.15.5.1.2 (wgmma), 9.7.16.3 and 9.7.16.4.1 (tcgen05).
#pragma once

#include "footprint.hpp"

namespace fa4 {

enum class Swizzle : uint8_t { None, B32, B64, B128, B128Atom32 };

// A decoded descriptor; all offsets in bytes.
struct SmemDesc {
    uint32_t start;         // offset in the shared window
    uint32_t leading;       // LBO
    uint32_t stride;        // SBO
    uint8_t base_offset;    // phase of the swizzle pattern, in 128-byte lines
    bool leading_is_address;  // tcgen05 on sm_103a: LBO is the address of the second half of K
    Swizzle swizzle;
};

SmemDesc decode_smem_desc_sm90(uint64_t desc);
SmemDesc decode_smem_desc_sm100(uint64_t desc);

// Byte address after the swizzle, for an address before it. XORs the 16-byte (or 32-byte) chunk index with
// the index of the 128-byte line; the pattern repeats on absolute addresses (256, 512 or 1024 bytes).
uint32_t swizzle_address(Swizzle mode, uint32_t address);

// Where the bytes of an operand tile lie: an (mn x k) matrix of `bits`-wide elements, K- or MN-major.
// One chunk is 16 bytes: T = 128 / bits elements that follow each other along the major dimension.
struct OperandLayout {
    SmemDesc desc;
    bool mn_major;
    // Offset of chunk (line, chunk): for K-major line = mn and chunk = k / T; for MN-major line = k and chunk = mn / T.
    uint32_t chunk_offset(uint32_t line, uint32_t chunk) const;
};

}  // namespace fa4
