// Sums of products of the tensor cores, in portable C++ and with AVX2 and AVX-512.
#include "matmul.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "float_formats.hpp"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define WARPCHECK_MATMUL_AVX2 1
#if defined(__GNUC__) && !defined(__clang__)    // GCC 12 warns about undefined vectors in its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace warpcheck {
namespace {

// Exponents encode three kinds of numbers: finite ones; zeros, which never determine the alignment; and infinity or
// NaN, whose sum with any exponent exceeds kLargest. The exponent of a product with a zero factor is below kNothing, of
// any other product above it.
constexpr int kZero = -900, kSpecial = 2000, kNothing = -600;
// Alignments of the fast path: factors 2^(F - e) and all results are normal binary32 numbers.
constexpr int kSmallest = -100, kLargest = 126;
constexpr int kLeastExponent = -126;    // of binary32; a zero accumulator counts with it

int exponent_of(float value, int least) {
    const uint32_t magnitude = float_to_bits(value) & 0x7FFFFFFFu;
    if (magnitude == 0) return kZero;
    if (magnitude >= 0x7F800000u) return kSpecial;
    return std::max(int(magnitude >> 23) - 127, least);
}

// Truncates to `bits` mantissa bits within binary32's exponent range, subnormals included.
float cut(double value, int bits) {
    if (value == 0 || !std::isfinite(value)) return float(value);
    const int exponent = std::max(std::ilogb(value), kLeastExponent);
    return float(std::ldexp(std::trunc(std::ldexp(value, bits - exponent)), exponent - bits));
}

float round_to_f16(double value) {
    if (value == 0 || !std::isfinite(value)) return float(value);
    const int exponent = std::max(std::ilogb(value), -14);
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, 10 - exponent)), exponent - 10);
    return f16_to_float(float_to_f16(float(rounded)));      // beyond 65504 the result is infinity
}

float finish(double sum, MatmulOutput output) {
    if (std::isnan(sum)) return bits_to_float(0x7FFFFFFFu);
    switch (output) {
        case MatmulOutput::F32: return cut(sum, 23);
        case MatmulOutput::E8M13: return cut(sum, 13);
        default: return round_to_f16(sum);
    }
}

// Sum of one block, for all operands.
float sum_block(const Summation& how, uint32_t count, const float* a, const int* a_exponent, const float* b, size_t ldb,
                const int* b_exponent, float c) {
    int top = std::max(exponent_of(c, kLeastExponent), kLeastExponent);
    for (uint32_t p = 0; p < count; ++p) top = std::max(top, a_exponent[p] + b_exponent[p * ldb]);
    double sum = 0;
    if (top > kSpecial / 2) {       // with infinity or NaN, alignment does not matter
        for (uint32_t p = 0; p < count; ++p) sum += double(a[p]) * double(b[p * ldb]);
        return finish(sum + double(c), how.output);
    }
    const auto aligned = [&](double term) { return std::trunc(std::ldexp(term, how.fraction_bits - top)); };
    for (uint32_t p = 0; p < count; ++p) sum += aligned(double(a[p]) * double(b[p * ldb]));
    return finish(std::ldexp(sum + aligned(c), top - how.fraction_bits), how.output);
}

#ifdef WARPCHECK_MATMUL_AVX2
bool has_avx2() {
    static const bool yes = __builtin_cpu_supports("avx2");
    return yes;
}

bool has_avx512() {
    static const bool yes = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    return yes;
}

// exponent_of for an array.
__attribute__((target("avx2"))) void exponents_avx2(const float* values, uint32_t count, int least, int* out) {
    const __m256i nothing = _mm256_setzero_si256(), last = _mm256_set1_epi32(0x7F7FFFFF);
    uint32_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(values + i)), _mm256_set1_epi32(0x7FFFFFFF));
        __m256i e = _mm256_max_epi32(_mm256_sub_epi32(_mm256_srli_epi32(magnitude, 23), _mm256_set1_epi32(127)), _mm256_set1_epi32(least));
        e = _mm256_blendv_epi8(e, _mm256_set1_epi32(kZero), _mm256_cmpeq_epi32(magnitude, nothing));
        e = _mm256_blendv_epi8(e, _mm256_set1_epi32(kSpecial), _mm256_cmpgt_epi32(magnitude, last));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), e);
    }
    for (; i < count; ++i) out[i] = exponent_of(values[i], least);
}

// Sums of eight columns of one row. Returns false if a number leaves the range of the fast path. A truncated product
// has at most 27 bits, so eight of them fit an int32.
__attribute__((target("avx2"))) bool sum_block_avx2(const Summation& how, uint32_t count, const float* a, const int* a_exponent,
                                                    const float* b, size_t ldb, const int* b_exponent, float* c) {
    const __m256 old = _mm256_loadu_ps(c);
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(old), _mm256_set1_epi32(0x7FFFFFFF));
    __m256i products = _mm256_set1_epi32(2 * kZero);
    for (uint32_t p = 0; p < count; ++p) {
        const __m256i e = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b_exponent + p * ldb));
        products = _mm256_max_epi32(products, _mm256_add_epi32(e, _mm256_set1_epi32(a_exponent[p])));
    }
    __m256i top = _mm256_sub_epi32(_mm256_srli_epi32(magnitude, 23), _mm256_set1_epi32(127));
    top = _mm256_max_epi32(_mm256_max_epi32(top, products), _mm256_set1_epi32(kLeastExponent));
    // If all terms are zero, the sum is +0 at any alignment. This is common: masked rows and padding are zeros.
    const __m256i zeros = _mm256_and_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(kNothing), products), _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256()));
    top = _mm256_blendv_epi8(top, _mm256_setzero_si256(), zeros);
    const __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(top, _mm256_set1_epi32(kLargest)),
                                            _mm256_cmpgt_epi32(_mm256_set1_epi32(kSmallest), top));
    if (!_mm256_testz_si256(outside, outside)) return false;

    const __m256i shift = _mm256_sub_epi32(_mm256_set1_epi32(how.fraction_bits), top);
    const __m256 factor = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(shift, _mm256_set1_epi32(127)), 23));
    const __m256 back = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(127), shift), 23));
    __m256i part = _mm256_cvttps_epi32(_mm256_mul_ps(old, factor));
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    for (uint32_t p = 0;; ) {
        const uint32_t end = std::min(count, p + 8);
        for (; p < end; ++p) {
            const __m256 product = _mm256_mul_ps(_mm256_broadcast_ss(a + p), _mm256_loadu_ps(b + p * ldb));
            part = _mm256_add_epi32(part, _mm256_cvttps_epi32(_mm256_mul_ps(product, factor)));
        }
        low = _mm256_add_pd(low, _mm256_cvtepi32_pd(_mm256_castsi256_si128(part)));
        high = _mm256_add_pd(high, _mm256_cvtepi32_pd(_mm256_extracti128_si256(part, 1)));
        if (p == count) break;
        part = _mm256_setzero_si256();
    }
    low = _mm256_mul_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(back)));
    high = _mm256_mul_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(back, 1)));
    if (how.output == MatmulOutput::F16) {
        alignas(32) double sums[8];
        _mm256_store_pd(sums, low);
        _mm256_store_pd(sums + 4, high);
        for (int i = 0; i < 8; ++i) c[i] = round_to_f16(sums[i]);
        return true;
    }
    const int64_t kept = how.output == MatmulOutput::F32 ? ~((int64_t(1) << 29) - 1) : ~((int64_t(1) << 39) - 1);
    const __m256d mask = _mm256_castsi256_pd(_mm256_set1_epi64x(kept));
    _mm_storeu_ps(c, _mm256_cvtpd_ps(_mm256_and_pd(low, mask)));
    _mm_storeu_ps(c + 4, _mm256_cvtpd_ps(_mm256_and_pd(high, mask)));
    return true;
}

// Sums of sixteen columns of one row.
__attribute__((target("avx512f,avx512dq"))) bool sum_block_avx512(const Summation& how, uint32_t count, const float* a, const int* a_exponent,
                                                                  const float* b, size_t ldb, const int* b_exponent, float* c) {
    const __m512 old = _mm512_loadu_ps(c);
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(old), _mm512_set1_epi32(0x7FFFFFFF));
    __m512i products = _mm512_set1_epi32(2 * kZero);
#pragma GCC unroll 8
    for (uint32_t p = 0; p < count; ++p)
        products = _mm512_max_epi32(products, _mm512_add_epi32(_mm512_loadu_si512(b_exponent + p * ldb), _mm512_set1_epi32(a_exponent[p])));
    __m512i top = _mm512_sub_epi32(_mm512_srli_epi32(magnitude, 23), _mm512_set1_epi32(127));
    top = _mm512_max_epi32(_mm512_max_epi32(top, products), _mm512_set1_epi32(kLeastExponent));
    const __mmask16 zeros = _mm512_cmplt_epi32_mask(products, _mm512_set1_epi32(kNothing)) & _mm512_testn_epi32_mask(magnitude, magnitude);
    top = _mm512_mask_mov_epi32(top, zeros, _mm512_setzero_si512());
    if (_mm512_cmpgt_epi32_mask(top, _mm512_set1_epi32(kLargest)) | _mm512_cmplt_epi32_mask(top, _mm512_set1_epi32(kSmallest))) return false;

    const __m512i shift = _mm512_sub_epi32(_mm512_set1_epi32(how.fraction_bits), top);
    const __m512 factor = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(shift, _mm512_set1_epi32(127)), 23));
    const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127), shift), 23));
    __m512i part = _mm512_cvttps_epi32(_mm512_mul_ps(old, factor));
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    for (uint32_t p = 0;; ) {
        const uint32_t end = std::min(count, p + 8);
#pragma GCC unroll 8
        for (; p < end; ++p) {
            const __m512 product = _mm512_mul_ps(_mm512_set1_ps(a[p]), _mm512_loadu_ps(b + p * ldb));
            part = _mm512_add_epi32(part, _mm512_cvttps_epi32(_mm512_mul_ps(product, factor)));
        }
        low = _mm512_add_pd(low, _mm512_cvtepi32_pd(_mm512_castsi512_si256(part)));
        high = _mm512_add_pd(high, _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(part, 1)));
        if (p == count) break;
        part = _mm512_setzero_si512();
    }
    low = _mm512_mul_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(back)));
    high = _mm512_mul_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(back, 1)));
    if (how.output == MatmulOutput::F16) {
        alignas(64) double sums[16];
        _mm512_store_pd(sums, low);
        _mm512_store_pd(sums + 8, high);
        for (int i = 0; i < 16; ++i) c[i] = round_to_f16(sums[i]);
        return true;
    }
    const int64_t kept = how.output == MatmulOutput::F32 ? ~((int64_t(1) << 29) - 1) : ~((int64_t(1) << 39) - 1);
    const __m512d mask = _mm512_castsi512_pd(_mm512_set1_epi64(kept));
    _mm256_storeu_ps(c, _mm512_cvtpd_ps(_mm512_and_pd(low, mask)));
    _mm256_storeu_ps(c + 8, _mm512_cvtpd_ps(_mm512_and_pd(high, mask)));
    return true;
}
#endif

}  // namespace

void matmul(const Summation& how, uint32_t m, uint32_t n, uint32_t k, const float* a, size_t lda, const float* b, size_t ldb,
            float* const* d, bool accumulate) {
    static thread_local std::vector<int> a_exponents, b_exponents;
    if (a_exponents.size() < m * k) a_exponents.resize(m * k);
    if (b_exponents.size() < k * ldb) b_exponents.resize(k * ldb);
    const auto exponents = [](const float* values, uint32_t count, int least, int* out) {
#ifdef WARPCHECK_MATMUL_AVX2
        if (has_avx2()) return exponents_avx2(values, count, least, out);
#endif
        for (uint32_t i = 0; i < count; ++i) out[i] = exponent_of(values[i], least);
    };
    for (uint32_t p = 0; p < k; ++p) {
        int* const row = &b_exponents[p * ldb];
        exponents(b + p * ldb, n, how.min_exponent_b, row);
        for (uint32_t j = 0; how.scale_exponents_b && j < n; ++j) row[j] = exponent_of(b[p * ldb + j], how.min_exponent_b + how.scale_exponents_b[j]);
    }
    for (uint32_t i = 0; i < m; ++i) {
        exponents(a + i * lda, k, how.min_exponent_a + (how.scale_exponents_a ? how.scale_exponents_a[i] : 0), &a_exponents[i * k]);
        if (!accumulate) std::fill(d[i], d[i] + n, 0.0f);
    }
    for (uint32_t start = 0; start < k; start += how.block) {
        const uint32_t count = std::min(how.block, k - start);
        // Sums row i from column j on in vectors by `sum`; the scalar code takes over if `sum` returns false.
        const auto columns = [&](uint32_t i, uint32_t j, uint32_t width, auto sum) {
            const float *row = a + i * lda + start, *column = b + start * ldb + j;
            const int *row_exponents = &a_exponents[i * k + start], *column_exponents = &b_exponents[start * ldb + j];
            if (sum(how, count, row, row_exponents, column, ldb, column_exponents, d[i] + j)) return;
            for (uint32_t x = 0; x < width; ++x)
                d[i][j + x] = sum_block(how, count, row, row_exponents, column + x, ldb, column_exponents + x, d[i][j + x]);
        };
        uint32_t j = 0;
#ifdef WARPCHECK_MATMUL_AVX2
        for (; has_avx512() && j + 16 <= n; j += 16)
            for (uint32_t i = 0; i < m; ++i) columns(i, j, 16, sum_block_avx512);
        for (; has_avx2() && j + 8 <= n; j += 8)
            for (uint32_t i = 0; i < m; ++i) columns(i, j, 8, sum_block_avx2);
#endif
        for (uint32_t i = 0; i < m; ++i) columns(i, j, n - j, [](auto&&...) { return false; });
    }
}

void matmul_scaled_groups(uint32_t m, uint32_t n, uint32_t k, const float* a, size_t lda, const float* b, size_t ldb,
                          const float* scale_a, const float* scale_b, int min_scale_exponent, float* const* d,
                          bool accumulate) {
    constexpr uint32_t kGroup = 16, kMaxGroups = 8;
    constexpr int kFraction = 35;
    const uint32_t groups = k / kGroup;
    for (uint32_t i = 0; i < m; ++i) {
        for (uint32_t j = 0; j < n; ++j) {
            const float c = accumulate ? d[i][j] : 0.0f;
            int top = std::max(exponent_of(c, kLeastExponent), kLeastExponent);
            double term[kMaxGroups];
            for (uint32_t g = 0; g < groups; ++g) {
                float sum = 0;              // exact: the terms are multiples of 1/4, up to 576
                for (uint32_t p = g * kGroup; p < (g + 1) * kGroup; ++p) sum += a[i * lda + p] * b[p * ldb + j];
                const float fa = scale_a[i * groups + g], fb = scale_b[g * n + j];
                term[g] = double(sum) * double(fa) * double(fb);
                if (sum != 0) top = std::max(top, exponent_of(fa, min_scale_exponent) + exponent_of(fb, min_scale_exponent));
                if (std::isnan(fa) || std::isnan(fb)) top = kSpecial;
            }
            double sum = 0;
            if (top > kSpecial / 2) {
                for (uint32_t g = 0; g < groups; ++g) sum += term[g];
                d[i][j] = finish(sum + double(c), MatmulOutput::F32);
                continue;
            }
            for (uint32_t g = 0; g < groups; ++g) sum += std::trunc(std::ldexp(term[g], kFraction - top));
            sum += std::trunc(std::ldexp(double(c), kFraction - top));
            d[i][j] = finish(std::ldexp(sum, top - kFraction), MatmulOutput::F32);
        }
    }
}

void matmul(uint32_t m, uint32_t n, uint32_t k, const int32_t* a, size_t lda, const int32_t* b, size_t ldb,
            int32_t* const* d, bool accumulate, bool saturate) {
    for (uint32_t i = 0; i < m; ++i) {
        for (uint32_t j = 0; j < n; ++j) {
            int64_t sum = accumulate ? d[i][j] : 0;
            for (uint32_t p = 0; p < k; ++p) sum += int64_t(a[i * lda + p]) * b[p * ldb + j];
            if (saturate)
                sum = std::clamp<int64_t>(sum, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max());
            d[i][j] = int32_t(uint32_t(uint64_t(sum)));
        }
    }
}

}  // namespace warpcheck
