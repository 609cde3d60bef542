// wgmma.mma_async: D[64,N] (registers of a warpgroup) = A[64,K] (registers or shared memory) * B[K,N] (shared) + D.
// PTX ISA 9.7.15.5. See matmul.hpp for the arithmetic.
#pragma once

#include "footprint.hpp"

namespace fa4 {

enum class MmaType : uint8_t { F16, BF16, TF32, F64, E4M3, E5M2, S8, U8, S4, U4, B1, F32, S32, E2M1, E2M3, E3M2 };

struct WgmmaOp {
    MmaType d_type, a_type, b_type;
    uint16_t n;
    bool a_in_registers = false;
    bool accumulate = true;         // scale-d
    bool negate_a = false;          // imm-scale-a == -1
    bool negate_b = false;
    bool mn_major_a = false;        // imm-trans-a
    bool mn_major_b = false;
    bool saturate = false;          // .satfinite of integer types
    uint64_t a_desc = 0;
    uint64_t b_desc = 0;
};

uint32_t wgmma_k(const WgmmaOp&);
uint32_t wgmma_d_registers(const WgmmaOp&);   // 32-bit registers per thread of D
void wgmma_footprint(const WgmmaOp&, std::vector<SharedRange>& out);

// d[warp * wgmma_d_registers() + r] and a[warp * 4 + r] point to the 32 threads' values of a register of that warp
// (warp 0..3 of the warpgroup). `a` is unused when A lies in shared memory.
void wgmma_execute(const WgmmaOp&, const uint8_t* shared, const uint32_t* const* a, uint32_t* const* d);

}  // namespace fa4
