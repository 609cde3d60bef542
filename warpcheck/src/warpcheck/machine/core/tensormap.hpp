// The 128-byte tensor map (TMA descriptor): decoding, encoding, and changes in place (tensormap.replace).
// NVIDIA does not document the layout. Two methods gave the same result: comparing the maps that compiled host
// functions pack when one argument differs, and reading the bit insertions that the assembler emits for each field of
// tensormap.replace. Only the first 64 bytes carry information (32-bit words, little-endian):
//   words 0-1    global address
//   word 2       bits 4-6 rank - 1, 7-10 element type, 11-12 interleave, 13-14 and 22 swizzle mode, 15 NaN fill,
//                16 round to tf32, 17-18 L2 promotion, 19-20 swizzle atomicity, 21 set on tensors of 128 KiB or more;
//                bits 0-3 hold 2 in every map seen
//   words 3-6    strides of dimensions 1-4, in 16 bytes, low 32 bits
//   word 7       bits 4 i .. 4 i + 3: bits 32-35 of the stride of dimension i + 1
//   words 8-12   extents - 1
//   word 13      bits 3 i .. 3 i + 2: element stride of dimension i, - 1; bits 24-31 box extent of dimension 0, - 1
//   word 14      bytes: box extents of dimensions 1-4, - 1
#pragma once

#include <cstring>

#include "enumerations.hpp"
#include "footprint.hpp"

namespace warpcheck {

// Element types, as numbered in the map. tensormap.replace numbers tf32 11, tf32.ftz 12 and the packed types 13-15; the
// map stores tf32 as f32 with the rounding bit, and the packed types as 11-13.
enum class TmaType : uint8_t {
    U8, U16, U32, S32, U64, S64, F16, F32, F32Ftz, F64, BF16,
    B4x16,        // 16 4-bit elements in 8 bytes
    B4x16Pad64,   // as B4x16 in global memory; in shared memory 8 bytes of padding follow
    B6x16Pad32,   // 16 6-bit elements in 12 bytes of global memory; in shared memory 4 bytes of padding follow
};

enum class TmaSwizzle : uint8_t { None, B32, B64, B128, B96 };
enum class TmaAtomicity : uint8_t { B16, B32, B32Flip8, B64 };
enum class TmaInterleave : uint8_t { None, B16, B32 };

struct TensorMap {
    uint64_t base = 0;              // global address
    uint8_t rank = 1;               // 1..5
    TmaType type = TmaType::U8;
    bool tf32 = false;              // loads round f32 to tf32
    TmaSwizzle swizzle = TmaSwizzle::None;
    TmaAtomicity atomicity = TmaAtomicity::B16;
    TmaInterleave interleave = TmaInterleave::None;
    bool nan_fill = false;          // out-of-bounds elements read as NaN instead of zero
    uint64_t extent[5] = {1, 1, 1, 1, 1};        // elements; dimension 0 is contiguous
    uint64_t stride[5] = {};                     // bytes; stride[0] is unused
    uint32_t box[5] = {1, 1, 1, 1, 1};           // elements
    uint32_t element_stride[5] = {1, 1, 1, 1, 1};// traversal stride, 1..8
};

// Bits of an element in global memory.
constexpr uint32_t tma_element_bits(TmaType type) {
    switch (type) {
        case TmaType::U8: return 8;
        case TmaType::U16: case TmaType::F16: case TmaType::BF16: return 16;
        case TmaType::U64: case TmaType::S64: case TmaType::F64: return 64;
        case TmaType::B4x16: case TmaType::B4x16Pad64: return 4;
        case TmaType::B6x16Pad32: return 6;
        default: return 32;
    }
}

namespace detail {
constexpr uint32_t kMapWords = 16;

inline uint32_t map_bits(const uint32_t* words, uint32_t word, uint32_t first, uint32_t count) {
    return words[word] >> first & ((count == 32) ? ~0u : (1u << count) - 1);
}
inline void set_map_bits(uint32_t* words, uint32_t word, uint32_t first, uint32_t count, uint32_t value) {
    const uint32_t mask = (count == 32 ? ~0u : (1u << count) - 1) << first;
    words[word] = (words[word] & ~mask) | (value << first & mask);
}
}  // namespace detail

inline TensorMap decode_tensormap(const uint8_t* map128) {
    uint32_t words[detail::kMapWords];
    std::memcpy(words, map128, sizeof words);
    const auto bits = [&words](uint32_t word, uint32_t first, uint32_t count) {
        return detail::map_bits(words, word, first, count);
    };
    TensorMap map;
    map.base = uint64_t(words[1]) << 32 | words[0];
    map.rank = uint8_t(bits(2, 4, 3) + 1);
    if (map.rank > 5) throw UnitError(Fault::BadDescriptor, "tensor map: rank " + std::to_string(map.rank) + ", expected 1 to 5");
    if (bits(2, 7, 4) > uint32_t(TmaType::B6x16Pad32))
        throw UnitError(Fault::BadDescriptor, "tensor map: unknown element type " + std::to_string(bits(2, 7, 4)));
    map.type = TmaType(bits(2, 7, 4));
    if (bits(2, 11, 2) > 2) throw UnitError(Fault::BadDescriptor, "tensor map: unknown interleave mode 3");
    map.interleave = TmaInterleave(bits(2, 11, 2));
    map.swizzle = bits(2, 22, 1) ? TmaSwizzle::B96 : TmaSwizzle(bits(2, 13, 2));
    map.nan_fill = bits(2, 15, 1);
    map.tf32 = bits(2, 16, 1);
    map.atomicity = TmaAtomicity(bits(2, 19, 2));
    for (uint32_t i = 0; i < map.rank; ++i) {
        map.extent[i] = uint64_t(words[8 + i]) + 1;
        if (i) map.stride[i] = (uint64_t(words[2 + i]) | uint64_t(bits(7, 4 * (i - 1), 4)) << 32) << 4;
        map.element_stride[i] = bits(13, 3 * i, 3) + 1;
        map.box[i] = (i ? bits(14, 8 * (i - 1), 8) : bits(13, 24, 8)) + 1;
    }
    return map;
}

// tensormap.replace: writes one field in place. `ordinal` selects the dimension of a field that has several (for
// GlobalStride, 0 is the stride of dimension 1). `value` is the operand of the instruction.
inline void tensormap_replace(uint8_t* map128, TensorMapField field, uint32_t ordinal, uint64_t value) {
    uint32_t words[detail::kMapWords];
    std::memcpy(words, map128, sizeof words);
    const auto set = [&words](uint32_t word, uint32_t first, uint32_t count, uint64_t v) {
        detail::set_map_bits(words, word, first, count, uint32_t(v));
    };
    if (ordinal > 4 || (field == TensorMapField::GlobalStride && ordinal > 3))
        throw UnitError(Fault::BadDescriptor, "tensormap.replace: ordinal " + std::to_string(ordinal) + " is beyond rank 5");
    switch (field) {
        case TensorMapField::GlobalAddress: words[0] = uint32_t(value); words[1] = uint32_t(value >> 32); break;
        case TensorMapField::Rank: set(2, 4, 3, value); break;
        case TensorMapField::BoxDim:
            ordinal ? set(14, 8 * (ordinal - 1), 8, value - 1) : set(13, 24, 8, value - 1);
            break;
        case TensorMapField::GlobalDim: words[8 + ordinal] = uint32_t(value) - 1; break;
        case TensorMapField::GlobalStride:
            words[3 + ordinal] = uint32_t(value >> 4);
            set(7, 4 * ordinal, 4, value >> 36);
            break;
        case TensorMapField::ElementStride: set(13, 3 * ordinal, 3, value - 1); break;
        case TensorMapField::ElemType: {
            const bool tf32 = value == 11 || value == 12;
            set(2, 16, 1, tf32);
            set(2, 7, 4, tf32 ? value - 4 : value > 12 ? value - 2 : value);
            break;
        }
        case TensorMapField::Interleave: set(2, 11, 2, value); break;
        case TensorMapField::SwizzleMode: set(2, 13, 2, value); set(2, 22, 1, value >> 2); break;
        case TensorMapField::SwizzleAtomicity: set(2, 19, 2, value); break;
        case TensorMapField::FillMode: set(2, 15, 1, value); break;
    }
    std::memcpy(map128, words, sizeof words);
}

inline void encode_tensormap(const TensorMap& map, uint8_t* map128) {
    std::memset(map128, 0, 128);
    map128[8] = 2;
    const auto replace = [map128](TensorMapField field, uint32_t ordinal, uint64_t value) {
        tensormap_replace(map128, field, ordinal, value);
    };
    replace(TensorMapField::GlobalAddress, 0, map.base);
    replace(TensorMapField::Rank, 0, map.rank - 1u);
    const uint32_t type = uint32_t(map.type);
    replace(TensorMapField::ElemType, 0, map.tf32 ? type + 4 : type > uint32_t(TmaType::BF16) ? type + 2 : type);
    replace(TensorMapField::Interleave, 0, uint64_t(map.interleave));
    replace(TensorMapField::SwizzleMode, 0, uint64_t(map.swizzle));
    replace(TensorMapField::SwizzleAtomicity, 0, uint64_t(map.atomicity));
    replace(TensorMapField::FillMode, 0, map.nan_fill);
    for (uint32_t i = 0; i < map.rank; ++i) {
        replace(TensorMapField::BoxDim, i, map.box[i]);
        replace(TensorMapField::GlobalDim, i, map.extent[i]);
        if (i) replace(TensorMapField::GlobalStride, i - 1, map.stride[i]);
        replace(TensorMapField::ElementStride, i, map.element_stride[i]);
    }
}

}  // namespace warpcheck
