// mma.sync of one warp, ldmatrix, stmatrix and movmatrix. PTX ISA 9.7.14.5. matmul.hpp holds the arithmetic.
#pragma once

#include "block_scale.hpp"
#include "enumerations.hpp"
#include "fragment.hpp"
#include "matmul.hpp"

namespace warpcheck {

// mma.sync.m8n8kK and .m16n8kK with row-major A and column-major B: all shapes except the f16 m8n8k4 of sm_70.
struct MmaSyncOp {
    uint16_t m, n, k;               // elements
    MmaType d_type, a_type, b_type, c_type;
    bool saturate = false;          // .satfinite of integer types
    bool containers = false;        // .kind::f8f6f4, mxf8f6f4: 4- and 6-bit elements in 8-bit containers
    uint16_t arch = 100;            // 80 for sm_80; selects how products are summed
    uint8_t scale_vector = 0;       // block-scaled kinds: scale factors along K (1, 2 or 4)
    ScaleType scale_type = ScaleType::UE8M0;
};

// Scale operand of a block-scaled mma.sync: the values of scale-a-data (or scale-b-data) in the 32 threads, and its
// selectors. The factors of a row or column are `scale_vector` bytes from byte `byte` on.
struct MmaScales {
    const uint32_t* data = nullptr;
    uint32_t byte = 0, thread = 0;

    // Thread whose register holds the factors of row `row` of A: `thread` is 0 for the lower, 1 for the upper pair of
    // a quad, of which the first thread has row g and the second row g + 8.
    uint32_t thread_of_row(uint32_t row) const { return 4 * (row % 8) + 2 * thread + row / 8; }
    // Thread whose register holds the factors of column `column` of B.
    uint32_t thread_of_column(uint32_t column) const { return 4 * column + thread; }
    uint8_t code(uint32_t from, uint32_t block) const { return uint8_t(data[from] >> 8 * (byte + block)); }
};

namespace detail {
inline Packing mma_packing(const MmaSyncOp& op, MmaType type) {
    return op.containers && element_bits(type) < 8 ? Packing::Container8 : Packing::Dense;
}
inline uint32_t mma_accumulator_registers(const MmaSyncOp& op, MmaType type) {
    const uint32_t bits = type == MmaType::F64 ? 64 : type == MmaType::F16 ? 16 : 32;
    return op.m * op.n * bits / (32 * 32);
}
inline uint32_t mma_operand_registers(const MmaSyncOp& op, MmaType type, uint32_t rows) {
    const uint32_t bits = mma_packing(op, type) == Packing::Container8 ? 8 : element_bits(type);
    return rows * op.k * bits / (32 * 32);
}
}  // namespace detail

// 32-bit registers per thread. An f64 takes two: low, high.
inline uint32_t mma_sync_registers_a(const MmaSyncOp& op) { return detail::mma_operand_registers(op, op.a_type, op.m); }
inline uint32_t mma_sync_registers_b(const MmaSyncOp& op) { return detail::mma_operand_registers(op, op.b_type, op.n); }
inline uint32_t mma_sync_registers_c(const MmaSyncOp& op) { return detail::mma_accumulator_registers(op, op.c_type); }
inline uint32_t mma_sync_registers_d(const MmaSyncOp& op) { return detail::mma_accumulator_registers(op, op.d_type); }

namespace detail {

// Sums of D^T. A block is 16 bytes of K up to sm_89, and 32 bytes on later chips. sm_89 keeps fewer bits of 8-bit
// floats. The measurements (matmul.hpp) include sm_120, whose block-scaled kinds sum as those of tcgen05.mma. sm_121 is
// assumed to sum as sm_120.
inline Summation mma_summation(const MmaSyncOp& op) {
    const bool narrow = op.arch == 89 && element_bits(op.a_type) == 8;
    const uint32_t bytes = op.arch >= 90 ? 32 : 16, element = element_bits(op.a_type) < 8 ? 8 : element_bits(op.a_type);
    const MatmulOutput wide = narrow ? MatmulOutput::E8M13 : MatmulOutput::F32;
    return {bytes * 8 / element, narrow ? 13 : op.arch >= 90 ? 25 : 24, least_exponent(op.b_type), least_exponent(op.a_type),
            op.d_type == MmaType::F16 ? MatmulOutput::F16 : wide};
}

template <class T>
inline void mma_compute(const MmaSyncOp& op, const uint32_t* const* a_regs, const uint32_t* const* b_regs,
                        const uint32_t* const* c_regs, uint32_t* const* d_regs, const MmaScales& scale_a, const MmaScales& scale_b) {
    // Computes D^T = B^T A^T. The registers hold the eight columns of B like rows, and the rows of A fill more vector
    // lanes of the host.
    constexpr uint32_t kMaxK = 256;
    T rows[16 * kMaxK], columns[8 * kMaxK], d[8 * 16];
    unpack_fragment(op.a_type, mma_packing(op, op.a_type), mma_sync_registers_a(op), op.m / 8, a_regs, false, rows, 1, op.m);
    unpack_fragment(op.b_type, mma_packing(op, op.b_type), mma_sync_registers_b(op), 1, b_regs, false, columns, op.k, 1);
    unpack_accumulator(op.c_type == MmaType::F16, op.m, 1, c_regs, d, 1, op.m);
    T* sums[8];
    for (uint32_t j = 0; j < 8; ++j) sums[j] = d + j * op.m;
    if constexpr (std::is_same_v<T, float>) {
        if (op.scale_vector) {
            const bool four_bits = !op.containers;
            const ScaleFactors factors(
                8, op.m, scale_groups(four_bits, op.k), op.scale_vector, op.scale_type,
                [&](uint32_t column, uint32_t block) { return scale_b.code(scale_b.thread_of_column(column), block); },
                [&](uint32_t row, uint32_t block) { return scale_a.code(scale_a.thread_of_row(row), block); });
            matmul_block_scaled(mma_summation(op), four_bits, op.scale_type, factors, 8, op.m, op.k, columns, op.k, rows, op.m, sums, true);
        } else {
            matmul(mma_summation(op), 8, op.m, op.k, columns, op.k, rows, op.m, sums, true);
        }
    } else {
        matmul(8, op.m, op.k, columns, op.k, rows, op.m, sums, true, op.saturate);
    }
    pack_accumulator(op.d_type == MmaType::F16, op.m, 1, d, 1, op.m, d_regs);
}

// Fragments of f64 have the layout of 32-bit ones, with 64-bit words in two registers each.
inline void mma_compute_f64(const MmaSyncOp& op, const uint32_t* const* a_regs, const uint32_t* const* b_regs,
                            const uint32_t* const* c_regs, uint32_t* const* d_regs) {
    const auto load = [](const uint32_t* const* regs, uint32_t r, uint32_t thread) {
        const uint64_t bits = regs[2 * r][thread] | uint64_t(regs[2 * r + 1][thread]) << 32;
        double value;
        std::memcpy(&value, &bits, 8);
        return value;
    };
    double a[16][16], b[16][8];
    const uint32_t groups = op.m / 8;
    for (uint32_t thread = 0; thread < 32; ++thread) {
        const uint32_t g = thread / 4, t = thread % 4;
        for (uint32_t r = 0; r < groups * op.k / 4; ++r) a[g + 8 * (r % groups)][t + 4 * (r / groups)] = load(a_regs, r, thread);
        for (uint32_t r = 0; r < op.k / 4u; ++r) b[t + 4 * r][g] = load(b_regs, r, thread);
    }
    for (uint32_t thread = 0; thread < 32; ++thread) {
        for (uint32_t r = 0; r < 2 * groups; ++r) {
            const uint32_t row = thread / 4 + 8 * (r / 2), column = 2 * (thread % 4) + r % 2;
            double sum = load(c_regs, r, thread);
            for (uint32_t p = 0; p < op.k; ++p) sum = __builtin_fma(a[row][p], b[p][column], sum);
            uint64_t bits;
            std::memcpy(&bits, &sum, 8);
            d_regs[2 * r][thread] = uint32_t(bits);
            d_regs[2 * r + 1][thread] = uint32_t(bits >> 32);
        }
    }
}

}  // namespace detail

// a[r], b[r], c[r] and d[r] point to the values of register r in the 32 threads; d may alias c. The scales are for
// block-scaled operations.
inline void mma_sync_execute(const MmaSyncOp& op, const uint32_t* const* a, const uint32_t* const* b, const uint32_t* const* c,
                             uint32_t* const* d, const MmaScales& scale_a = {}, const MmaScales& scale_b = {}) {
    if ((op.m != 8 && op.m != 16) || op.n != 8 || op.k > 256 || (op.a_type == MmaType::F64 && op.k > 16))
        throw UnitError(Fault::Unsupported, "mma.sync: m" + std::to_string(op.m) + "n" + std::to_string(op.n) + "k" +
                        std::to_string(op.k) + " is not modelled");
    if (op.scale_vector)
        for (const auto& [scales, threads] : {std::pair{&scale_a, 2u}, std::pair{&scale_b, 4u}})
            if (scales->byte + op.scale_vector > 4 || scales->byte % op.scale_vector || scales->thread >= threads)
                throw UnitError(Fault::BadDescriptor, "mma.sync: byte " + std::to_string(scales->byte) + ", thread " +
                                std::to_string(scales->thread) + " selects no scale factors of scale_vec::" +
                                std::to_string(op.scale_vector) + "X, " + (threads == 2 ? "A" : "B"));
    if (op.a_type == MmaType::F64) detail::mma_compute_f64(op, a, b, c, d);
    else if (is_integer(op.a_type)) detail::mma_compute<int32_t>(op, a, b, c, d, scale_a, scale_b);
    else detail::mma_compute<float>(op, a, b, c, d, scale_a, scale_b);
}

struct LdMatrixOp { MatrixShape shape; uint8_t num; bool trans; };

constexpr uint32_t kMatrixRowBytes = 16;    // read or written at each address

namespace detail {
constexpr bool is_16x16(MatrixShape s) {
    return s == MatrixShape::M16N16B8 || s == MatrixShape::M16N16B4 || s == MatrixShape::M16N16B6;
}

// Converts a row of 16 bytes, or of 16 narrow elements, to 16 bytes.
inline void load_matrix_row(MatrixShape shape, const uint8_t* row, uint8_t out[16]) {
    const bool four = shape == MatrixShape::M8N16B4 || shape == MatrixShape::M16N16B4;
    const bool six = shape == MatrixShape::M8N16B6 || shape == MatrixShape::M16N16B6;
    if (!four && !six) { std::memcpy(out, row, 16); return; }
    for (uint32_t i = 0; i < 16; ++i) out[i] = uint8_t(four ? bit_field(row, 4 * i, 4) << 2 : bit_field(row, 6 * i, 6));
}
}  // namespace detail

// 32-bit registers per thread.
inline uint32_t ldmatrix_registers(const LdMatrixOp& op) { return detail::is_16x16(op.shape) ? 2 * op.num : op.num; }
// Threads 0 .. rows - 1 supply addresses.
inline uint32_t ldmatrix_rows(const LdMatrixOp& op) { return (detail::is_16x16(op.shape) ? 16 : 8) * op.num; }

// rows[t] points to the 16 bytes at thread t's address.
inline void ldmatrix_execute(const LdMatrixOp& op, const uint8_t* const* rows, uint32_t* const* regs) {
    uint8_t data[32][16];
    for (uint32_t i = 0; i < ldmatrix_rows(op); ++i) detail::load_matrix_row(op.shape, rows[i], data[i]);
    for (uint32_t r = 0; r < ldmatrix_registers(op); ++r) {
        for (uint32_t thread = 0; thread < 32; ++thread) {
            const uint32_t g = thread / 4, t = thread % 4;
            uint8_t bytes[4];
            if (detail::is_16x16(op.shape)) {       // transposed: column g + 8 (r % 2), rows 4 t .. 4 t + 3
                for (uint32_t i = 0; i < 4; ++i) bytes[i] = data[16 * (r / 2) + 4 * t + i][g + 8 * (r % 2)];
            } else if (op.trans) {                  // 16-bit elements: column g, rows 2 t and 2 t + 1
                std::memcpy(bytes, data[8 * r + 2 * t] + 2 * g, 2);
                std::memcpy(bytes + 2, data[8 * r + 2 * t + 1] + 2 * g, 2);
            } else {
                std::memcpy(bytes, data[8 * r + g] + 4 * t, 4);
            }
            std::memcpy(&regs[r][thread], bytes, 4);
        }
    }
}

inline void stmatrix_execute(const LdMatrixOp& op, uint8_t* const* rows, const uint32_t* const* regs) {
    for (uint32_t r = 0; r < op.num; ++r) {
        for (uint32_t thread = 0; thread < 32; ++thread) {
            const uint32_t g = thread / 4, t = thread % 4;
            uint8_t bytes[4];
            std::memcpy(bytes, &regs[r][thread], 4);
            if (op.shape == MatrixShape::M16N8B8) {     // bytes 0, 1: rows 2 t, 2 t + 1 of column g; 2, 3: of column g + 8
                for (uint32_t i = 0; i < 4; ++i) rows[8 * r + 2 * t + i % 2][g + 8 * (i / 2)] = bytes[i];
            } else if (op.trans) {
                std::memcpy(rows[8 * r + 2 * t] + 2 * g, bytes, 2);
                std::memcpy(rows[8 * r + 2 * t + 1] + 2 * g, bytes + 2, 2);
            } else {
                std::memcpy(rows[8 * r + g] + 4 * t, bytes, 4);
            }
        }
    }
}

// movmatrix.sync.aligned.m8n8.trans.b16. source and destination hold the values of 32 threads, and may be the same
// array.
inline void movmatrix_execute(const uint32_t* source, uint32_t* destination) {
    uint16_t matrix[8][8];
    for (uint32_t thread = 0; thread < 32; ++thread) std::memcpy(&matrix[thread / 4][2 * (thread % 4)], &source[thread], 4);
    for (uint32_t thread = 0; thread < 32; ++thread) {
        const uint32_t g = thread / 4, t = thread % 4;
        destination[thread] = matrix[2 * t][g] | uint32_t(matrix[2 * t + 1][g]) << 16;
    }
}

}  // namespace warpcheck
