#include "matmul.hpp"

#include <algorithm>
#include <limits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FA4_MATMUL_AVX2 1
#include <immintrin.h>
#endif

namespace fa4 {
namespace {

// Any shape, plain C++. Rows of b are walked contiguously, so compilers vectorise the inner loop.
void matmul_portable(uint32_t m, uint32_t n, uint32_t k, const float* a, size_t lda, const float* b, size_t ldb,
                     float* const* d, bool accumulate) {
    for (uint32_t i = 0; i < m; ++i) {
        float* row = d[i];
        if (!accumulate) std::fill(row, row + n, 0.0f);
        for (uint32_t p = 0; p < k; ++p) {
            const float factor = a[i * lda + p];
            const float* line = b + p * ldb;
            for (uint32_t j = 0; j < n; ++j) row[j] += factor * line[j];
        }
    }
}

#ifdef FA4_MATMUL_AVX2
// Rows x 8 * Vectors of d stay in registers over all of k.
template <int Rows, int Vectors>
__attribute__((target("avx2,fma"), always_inline)) inline void block_avx2(
    uint32_t k, const float* a, size_t lda, const float* b, size_t ldb, float* const* d, size_t column, bool accumulate) {
    __m256 sum[Rows][Vectors];
    for (int i = 0; i < Rows; ++i)
        for (int v = 0; v < Vectors; ++v)
            sum[i][v] = accumulate ? _mm256_loadu_ps(d[i] + column + 8 * v) : _mm256_setzero_ps();
    for (uint32_t p = 0; p < k; ++p) {
        __m256 line[Vectors];
        for (int v = 0; v < Vectors; ++v) line[v] = _mm256_loadu_ps(b + p * ldb + column + 8 * v);
        for (int i = 0; i < Rows; ++i) {
            const __m256 factor = _mm256_broadcast_ss(a + i * lda + p);
            for (int v = 0; v < Vectors; ++v) sum[i][v] = _mm256_fmadd_ps(factor, line[v], sum[i][v]);
        }
    }
    for (int i = 0; i < Rows; ++i)
        for (int v = 0; v < Vectors; ++v) _mm256_storeu_ps(d[i] + column + 8 * v, sum[i][v]);
}

__attribute__((target("avx2,fma"))) void matmul_avx2(
    uint32_t m, uint32_t n, uint32_t k, const float* a, size_t lda, const float* b, size_t ldb,
    float* const* d, bool accumulate) {
    for (uint32_t i = 0; i < m; i += 4) {
        uint32_t j = 0;
        for (; j + 16 <= n; j += 16) block_avx2<4, 2>(k, a + i * lda, lda, b, ldb, d + i, j, accumulate);
        for (; j < n; j += 8) block_avx2<4, 1>(k, a + i * lda, lda, b, ldb, d + i, j, accumulate);
    }
}

bool has_avx2() {
    static const bool yes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return yes;
}
#endif

}  // namespace

void matmul(uint32_t m, uint32_t n, uint32_t k, const float* a, size_t lda, const float* b, size_t ldb,
            float* const* d, bool accumulate) {
#ifdef FA4_MATMUL_AVX2
    if (m % 4 == 0 && n % 8 == 0 && has_avx2()) return matmul_avx2(m, n, k, a, lda, b, ldb, d, accumulate);
#endif
    matmul_portable(m, n, k, a, lda, b, ldb, d, accumulate);
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

}  // namespace fa4
