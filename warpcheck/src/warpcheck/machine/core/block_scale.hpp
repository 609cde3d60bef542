// Block scaling of matrix operands, common to tcgen05.mma and mma.sync: each block of K of a row of A, and of a column
// of B, has a scale factor of 8 bits. PTX ISA 9.7.14.3, 9.7.16.10.7. matmul.hpp holds the arithmetic.
#pragma once

#include <cmath>
#include <vector>

#include "enumerations.hpp"
#include "float_formats.hpp"
#include "matmul.hpp"
#include "operand.hpp"

namespace warpcheck {

inline float scale_to_float(uint8_t code, ScaleType type) {
    return type == ScaleType::UE8M0 ? ue8m0_to_float(code) : e4m3_to_float(code & 0x7F);
}

// Kinds mxf4 and mxf4nvf4 scale exact sums of 16 products; kind mxf8f6f4 scales each element of K.
constexpr uint32_t scale_groups(bool four_bits, uint32_t k) { return four_bits ? k / 16 : 1; }

// Factors of the scaled blocks, repeated for each of `groups` parts of K: a[row * groups + part], b[part * columns +
// column].
struct ScaleFactors {
    uint32_t groups;
    std::vector<float> a, b;

    // code_a(row, block) and code_b(column, block) return the stored factor of block `block` of `vector`.
    template <class A, class B>
    ScaleFactors(uint32_t rows, uint32_t columns, uint32_t groups, uint32_t vector, ScaleType type, A&& code_a, B&& code_b)
        : groups(groups), a(size_t(rows) * groups), b(size_t(columns) * groups) {
        const uint32_t repeat = groups / vector;
        for (uint32_t row = 0; row < rows; ++row)
            for (uint32_t part = 0; part < groups; ++part) a[row * groups + part] = scale_to_float(code_a(row, part / repeat), type);
        for (uint32_t column = 0; column < columns; ++column)
            for (uint32_t part = 0; part < groups; ++part) b[part * columns + column] = scale_to_float(code_b(column, part / repeat), type);
    }
};

// matmul with block scaling. `how` serves kind mxf8f6f4, whose factors are powers of two; it may scale a in place.
inline void matmul_block_scaled(Summation how, bool four_bits, ScaleType type, const ScaleFactors& factors, uint32_t m, uint32_t n, uint32_t k,
                                float* a, size_t lda, const float* b, size_t ldb, float* const* d, bool accumulate) {
    if (four_bits) {
        const int least = type == ScaleType::UE8M0 ? -127 : least_exponent(MmaType::E4M3);
        matmul_scaled_groups(m, n, k, a, lda, b, ldb, factors.a.data(), factors.b.data(), least, d, accumulate);
        return;
    }
    const auto exponents = [](const std::vector<float>& values) {
        std::vector<int> out;
        for (const float x : values) out.push_back(std::isnan(x) ? 0 : std::ilogb(x));
        return out;
    };
    const std::vector<int> exponents_a = exponents(factors.a), exponents_b = exponents(factors.b);
    how.scale_exponents_a = exponents_a.data();
    how.scale_exponents_b = exponents_b.data();
    std::vector<float> scaled_b(size_t(k) * n);
    for (uint32_t p = 0; p < k; ++p)
        for (uint32_t j = 0; j < n; ++j) scaled_b[p * n + j] = b[p * ldb + j] * factors.b[j];
    for (uint32_t i = 0; i < m; ++i)
        for (uint32_t p = 0; p < k; ++p) a[i * lda + p] *= factors.a[i];
    matmul(how, m, n, k, a, lda, scaled_b.data(), n, d, accumulate);
}

}  // namespace warpcheck
