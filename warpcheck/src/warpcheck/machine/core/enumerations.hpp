// Enumerations of instruction modifiers that are neither numbers nor flags. `enumerations()` gives the names to Python,
// where the lowering writes them as strings.
#pragma once

#include <cstdint>

namespace warpcheck {

// Enumeration with the text of its enumerators: "A, B = 4, C".
#define WARPCHECK_ENUM(Name, ...) \
    enum class Name : uint8_t { __VA_ARGS__ }; \
    constexpr const char* enumerators(Name) { return #__VA_ARGS__; }

// Memory and the memory model.
WARPCHECK_ENUM(Space, Generic, Global, Shared, SharedCluster, Local, Param, Const)
WARPCHECK_ENUM(Semantics, Weak = 0, Relaxed = 1, Acquire = 2, Release = 4, AcquireRelease = 6, Sc = 14)     // 2, 4 and 8 are bits
WARPCHECK_ENUM(Scope, Cta, Cluster, Gpu, Sys)
WARPCHECK_ENUM(ProxyKind, Async, Tensormap, Alias)
WARPCHECK_ENUM(AtomicOp, Add, Min, Max, Inc, Dec, And, Or, Xor, Exch, Cas)
WARPCHECK_ENUM(ReduceOp, Add, Min, Max, Inc, Dec, And, Or, Xor)
WARPCHECK_ENUM(CopySource, Whole, Size, Ignore)           // cp.async: no further operand, src-size, ignore-src

// Arithmetic and logic.
WARPCHECK_ENUM(Round, NearestEven, Zero, Down, Up, NearestAway)
WARPCHECK_ENUM(Comparison, Eq, Ne, Lt, Le, Gt, Ge, Equ, Neu, Ltu, Leu, Gtu, Geu, Num, Nan)
WARPCHECK_ENUM(Boolean, None, And, Or, Xor)
WARPCHECK_ENUM(Permutation, Index, F4e, B4e, Rc8, Ecl, Ecr, Rc16)
WARPCHECK_ENUM(FloatProperty, Finite, Infinite, Number, NotANumber, Normal, Subnormal)

// Warps and barriers.
WARPCHECK_ENUM(ShuffleMode, Up, Down, Butterfly, Index)
WARPCHECK_ENUM(VoteMode, All, Any, Uniform)
WARPCHECK_ENUM(BarrierReduction, Popc, And, Or)
WARPCHECK_ENUM(Timer, Clock, ClockHigh, Clock64, Global, GlobalLow, GlobalHigh)

// Matrices. MmaType is the element type of a matrix instruction.
WARPCHECK_ENUM(MmaType, F16, BF16, TF32, F64, E4M3, E5M2, S8, U8, S4, U4, B1, F32, S32, E2M1, E2M3, E3M2)
WARPCHECK_ENUM(ScaleType, UE8M0, UE4M3)                   // factors of block-scaled kinds
WARPCHECK_ENUM(MmaKind, F16, TF32, F8F6F4, I8, MXF8F6F4, MXF4, MXF4NVF4)
// Shapes of ldmatrix and stmatrix. Thread (rows per matrix) * j + i holds the address of row i of matrix j.
WARPCHECK_ENUM(MatrixShape,
    M8N8B16,        // ld, st
    M16N8B8,        // st.trans; 8 rows of 16 bytes in shared memory
    M16N16B8,       // ld.trans; 16 rows
    M8N16B6,        // ld of 6-bit elements (b6x16_p32) to 8-bit containers
    M8N16B4,        // ld of 4-bit elements (b4x16_p64)
    M16N16B6,       // M8N16B6 with .trans
    M16N16B4)
WARPCHECK_ENUM(TmemShape, S16x64b, S16x128b, S16x256b, S32x32b, S16x32bx2)
WARPCHECK_ENUM(TmemCopyShape, S128x256b, S4x256b, S128x128b, S64x128b_02_13, S64x128b_01_23, S32x128b_x4)
WARPCHECK_ENUM(TmemCopyFormat, None, B4x16Pad64, B6x16Pad32)      // decompressed to 8-bit containers
WARPCHECK_ENUM(TensorMapField, GlobalAddress, Rank, BoxDim, GlobalDim, GlobalStride, ElementStride, ElemType, Interleave,
    SwizzleMode, SwizzleAtomicity, FillMode)

}  // namespace warpcheck
