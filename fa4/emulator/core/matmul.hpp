// The arithmetic of every matrix instruction: tcgen05.mma, wgmma, mma.sync.
//
// Order of summation. The ISA leaves it open, and hardware sums blocks of products with a common exponent. Here
//     d = fma(a[K-1], b[K-1], ... fma(a[1], b[1], fma(a[0], b[0], d)))
// in binary32 with round to nearest even, k ascending, one instruction after the other. Products of the formats
// that tensor cores take are exact in binary32 (two times at most 11 significant bits), so that a fused and an
// unfused multiply-add agree and every machine gives the same bits; the exception are products of bf16 or tf32 beyond
// the exponent range of binary32. Accumulators of 16 bits are rounded once per instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fa4 {

// d[i][j] = (accumulate ? d[i][j] : 0) + sum over p < k of a[i * lda + p] * b[p * ldb + j], i < m, j < n.
// d[i] points to row i of the accumulator.
void matmul(uint32_t m, uint32_t n, uint32_t k, const float* a, size_t lda, const float* b, size_t ldb,
            float* const* d, bool accumulate);

// The same for 8-bit (and narrower) integers, exact, then wrapped to 32 bits or clamped when saturate is set.
void matmul(uint32_t m, uint32_t n, uint32_t k, const int32_t* a, size_t lda, const int32_t* b, size_t ldb,
            int32_t* const* d, bool accumulate, bool saturate);

}  // namespace fa4
