// tcgen05.mma: D[M,N] (TMEM) = A[M,K] (shared memory or TMEM) * B[K,N] (shared memory) + D.
// PTX ISA 9.7.16.2, 9.7.16.4.2 (instruction descriptor), 9.7.16.10. See matmul.hpp for the arithmetic.
#pragma once

#include "footprint.hpp"

namespace fa4 {

enum class MmaKind : uint8_t { F16, TF32, F8F6F4, I8, MXF8F6F4, MXF4, MXF4NVF4 };

// One tcgen05.mma instruction with its operands' values.
struct UmmaOp {
    MmaKind kind;
    uint8_t cta_group = 1;          // 1 or 2; with 2, all addresses hold in both CTAs of the pair
    bool weight_stationary = false; // .ws
    bool a_in_tmem = false;
    bool accumulate = false;        // enable-input-d
    uint8_t scale_d = 0;            // D is scaled by 2^-scale_d first
    uint32_t d_tmem = 0;
    uint32_t a_tmem = 0;
    uint64_t a_desc = 0;
    uint64_t b_desc = 0;
    uint32_t idesc = 0;
    uint32_t disable_lane[8] = {};  // bit set: the lane of D is not written; [0..3] even CTA, [4..7] odd CTA
    uint8_t scale_vector = 0;       // block-scaled kinds: scale factors along K per row (1, 2 or 4)
    uint32_t scale_a_tmem = 0;
    uint32_t scale_b_tmem = 0;
};

struct UmmaShape { uint32_t m, n, k; };

// M, N, K of the whole operation (both CTAs together). Raises on encodings that the ISA forbids.
UmmaShape umma_shape(const UmmaOp&);

// All bytes and cells that the operation reads and writes, in both CTAs. D is listed as read only when
// accumulate is set.
void umma_footprint(const UmmaOp&, Footprint& out);

// Executes at once on the memories of the even ([0]) and, for cta_group 2, the odd CTA ([1]).
void umma_execute(const UmmaOp&, const CtaMemory ctas[2]);

}  // namespace fa4
