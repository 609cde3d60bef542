// Arithmetic of every matrix instruction: tcgen05.mma, wgmma, mma.sync.
// The ISA leaves order and precision of the sums open. Tensor cores do not round after each addition. They align a
// block of products and the accumulator to the largest exponent among them, drop the lower bits, add the rest exactly,
// and round once. The block size, the number of bits kept and the final rounding of each chip are taken from
// measurements in "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", arXiv:2511.10909:
//    e       = max(exponent(c), exponent(a[p]) + exponent(b[p]) over the block), zeros left out
//    sum     = trunc(c, F) + sum of trunc(a[p] b[p], F), trunc(x, F) = x cut toward zero to a multiple of 2^(e - F)
//    d       = sum cut toward zero to binary32 (wgmma's 8-bit floats: to 13 mantissa bits), or rounded to nearest even
//              to f16 where D is f16
// Exponents are those of the stored formats: a subnormal operand counts with its format's least exponent. A result does
// not depend on the host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace warpcheck {

enum class MatmulOutput : uint8_t { F32, E8M13, F16 };

// Parameters of a chip's sums.
struct Summation {
    uint32_t block;             // products summed at once; divides k or exceeds it
    int fraction_bits;          // F
    int min_exponent_a;         // exponents of the least normal numbers of A's and B's formats
    int min_exponent_b;
    MatmulOutput output;
    // Powers of two by which rows of A and columns of B are scaled; they shift the exponents of the formats. May be
    // null.
    const int* scale_exponents_a = nullptr;
    const int* scale_exponents_b = nullptr;
};

// d[i][j] = (accumulate ? d[i][j] : 0) + sum over p < k of a[i * lda + p] * b[p * ldb + j], i < m, j < n. d[i] points
// to row i of the accumulator, in the output format.
void matmul(const Summation& how, uint32_t m, uint32_t n, uint32_t k, const float* a, size_t lda, const float* b, size_t ldb,
            float* const* d, bool accumulate);

// The block-scaled 4-bit kinds. Products are summed exactly in groups of 16. Each group is multiplied by its two scale
// factors, scale_a[i * groups + g] and scale_b[g * n + j]. Groups are aligned by the factors' exponents alone (at least
// min_scale_exponent each), with F = 35. k is a multiple of 16.
void matmul_scaled_groups(uint32_t m, uint32_t n, uint32_t k, const float* a, size_t lda, const float* b, size_t ldb,
                          const float* scale_a, const float* scale_b, int min_scale_exponent, float* const* d,
                          bool accumulate);

// Integers: the sum is exact, then wrapped to 32 bits, or clamped if saturate is set.
void matmul(uint32_t m, uint32_t n, uint32_t k, const int32_t* a, size_t lda, const int32_t* b, size_t ldb,
            int32_t* const* d, bool accumulate, bool saturate);

}  // namespace warpcheck
