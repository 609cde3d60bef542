// The 128-byte tensor map (TMA descriptor) that host code packs: decoded, encoded, and edited in place
// (tensormap.replace). The layout was found by varying one field at a time; see docs in the struct.
#pragma once

#include "footprint.hpp"

namespace fa4 {

enum class TmaType : uint8_t {      // PTX ISA 9.7.9.28, .elemtype
    U8, U16, U32, S32, U64, S64, F16, F32, F32Ftz, F64, BF16, TF32, TF32Ftz,
    U4x16Packed8,    // 16 4-bit elements in 8 bytes
    U4x16Packed16,   // 16 4-bit elements in 8 bytes of global memory, 16 bytes in shared memory (8 of padding)
    U6x16Packed16,   // 16 6-bit elements in 12 bytes of global memory, 16 bytes in shared memory (4 of padding)
};

enum class TmaSwizzle : uint8_t { None, B32, B64, B128, B128Atom32, B128Atom32Flip8, B128Atom64, B96 };
enum class TmaInterleave : uint8_t { None, B16, B32 };

struct TensorMap {
    uint64_t base;              // global address
    uint8_t rank;               // 1..5
    TmaType type;
    TmaSwizzle swizzle;
    TmaInterleave interleave;
    bool nan_fill;              // out-of-bounds elements read as NaN instead of zero
    bool im2col;
    uint64_t extent[5];         // elements; dimension 0 is contiguous
    uint64_t stride[5];         // bytes; stride[0] is the element size
    uint32_t box[5];            // elements
    uint32_t element_stride[5]; // traversal stride, 1..8
};

TensorMap decode_tensormap(const uint8_t* map128);

// tensormap.replace: writes one field. `ordinal` is the dimension where the field has one.
enum class TensorMapField : uint8_t {
    GlobalAddress, Rank, BoxDim, GlobalDim, GlobalStride, ElementStride, ElemType, Interleave, SwizzleMode,
    FillMode, SwizzleAtomicity,
};
void tensormap_replace(uint8_t* map128, TensorMapField field, uint32_t ordinal, uint64_t value);

}  // namespace fa4
