// tcgen05.mma: D[M,N] (TMEM) = A[M,K] (shared memory or TMEM) * B[K,N] (shared memory) + D. PTX ISA 9.7.16.2 (shapes),
// 9.7.16.4.2 (instruction descriptor), 9.7.16.10 (data paths, block scaling). matmul.hpp holds the arithmetic. The data
// paths are the layouts in the ISA's figures:
//   A, D: M = 256, cta_group 2             lane = row within the CTA's half
//   B:    M = 128, cta_group 2             lanes 0-63 hold the first half of N, lanes 64-127 the second
//   E:    M = 64, .ws                      as B, in one CTA
//   F:    M = 64                           16 lanes of each warp's 32
//   G:    M = 32, .ws                      32 lanes of each warp hold a quarter of N
#pragma once

#include "block_scale.hpp"
#include "enumerations.hpp"
#include "matmul.hpp"
#include "operand.hpp"

namespace warpcheck {

// A tcgen05.mma instruction with the values of its operands.
struct UmmaOp {
    MmaKind kind;
    uint8_t cta_group = 1;          // 1 or 2; with 2, every address applies to both CTAs of the pair
    bool weight_stationary = false; // .ws
    bool a_in_tmem = false;
    bool accumulate = false;        // enable-input-d
    uint8_t scale_d = 0;            // D is scaled by 2^-scale_d first
    uint32_t d_tmem = 0;
    uint32_t a_tmem = 0;
    uint64_t a_desc = 0;
    uint64_t b_desc = 0;
    uint32_t idesc = 0;
    uint32_t disable_lane[8] = {};  // lanes of D that are not written, a bit each; [0..3] even CTA, [4..7] odd CTA
    uint8_t scale_vector = 0;       // block-scaled kinds: scale factors along K (1, 2 or 4)
    uint32_t scale_a_tmem = 0;
    uint32_t scale_b_tmem = 0;
};

// Decoded instruction descriptor, with the shape that it implies.
struct InstrDesc {
    uint32_t m, n, k;               // of the whole operation, over both CTAs
    MmaType a, b, d;
    bool negate_a, negate_b;
    bool mn_major_a, mn_major_b;
    bool saturate;
    Packing packing;                // of A and B in shared memory
    bool block_scaled;
    ScaleType scale_type;
    uint8_t scale_id_a, scale_id_b; // byte in the 32-bit cell at which a row's scale factors start
};

inline InstrDesc decode_instr_desc(const UmmaOp& op) {
    const uint32_t bits = op.idesc;
    const auto field = [bits](uint32_t first, uint32_t count) { return bits >> first & ((1u << count) - 1); };
    const auto bad = [&](const std::string& what) { return UnitError(Fault::BadDescriptor, "tcgen05.mma: " + what); };
    const auto narrow = [&](uint32_t code) {
        constexpr int kInvalid = -1;
        constexpr int types[8] = {int(MmaType::E4M3), int(MmaType::E5M2), kInvalid, int(MmaType::E2M3),
                                  int(MmaType::E3M2), int(MmaType::E2M1), kInvalid, kInvalid};
        if (types[code] == kInvalid) throw bad("element type " + std::to_string(code) + " is invalid for f8f6f4 kinds");
        return MmaType(types[code]);
    };
    InstrDesc d{};
    if (field(2, 1)) throw UnitError(Fault::Unsupported, "tcgen05.mma: sparse matrices are not modelled");
    d.block_scaled = op.kind >= MmaKind::MXF8F6F4;
    d.negate_a = field(13, 1);
    d.negate_b = field(14, 1);
    d.mn_major_a = field(15, 1);
    d.mn_major_b = field(16, 1);
    d.n = field(17, 6) << 3;
    d.m = d.block_scaled ? field(27, 2) << 7 : field(24, 5) << 4;
    d.packing = Packing::Dense;
    d.d = MmaType::F32;
    switch (op.kind) {
        case MmaKind::F16:
            if (field(7, 3) > 1 || field(10, 3) > 1) throw bad("kind::f16 takes f16 (0) and bf16 (1) operands");
            d.a = field(7, 3) ? MmaType::BF16 : MmaType::F16;
            d.b = field(10, 3) ? MmaType::BF16 : MmaType::F16;
            d.k = 16;
            break;
        case MmaKind::TF32: d.a = d.b = MmaType::TF32; d.k = 8; break;
        case MmaKind::F8F6F4: case MmaKind::MXF8F6F4:
            d.a = narrow(field(7, 3));
            d.b = narrow(field(10, 3));
            d.packing = Packing::Padded16;
            d.k = 32;
            break;
        case MmaKind::I8:
            d.a = field(7, 3) ? MmaType::S8 : MmaType::U8;
            d.b = field(10, 3) ? MmaType::S8 : MmaType::U8;
            d.saturate = field(3, 1);
            d.k = 32;
            break;
        case MmaKind::MXF4: case MmaKind::MXF4NVF4:
            d.a = d.b = MmaType::E2M1;
            if (field(31, 1)) throw UnitError(Fault::Unsupported, "tcgen05.mma: K = 96 (sm_103a) is not modelled");
            d.k = 64;
            break;
    }
    if (!d.block_scaled) {
        const uint32_t format = field(4, 2);
        if (op.kind == MmaKind::I8 ? format != 2 : format > 1 || (op.kind == MmaKind::TF32 && format != 1))
            throw bad("accumulator type " + std::to_string(format) + " does not fit the kind");
        d.d = op.kind == MmaKind::I8 ? MmaType::S32 : format ? MmaType::F32 : MmaType::F16;
    } else {
        d.scale_type = field(23, 1) ? ScaleType::UE8M0 : ScaleType::UE4M3;
        d.scale_id_a = uint8_t(field(29, 2));
        d.scale_id_b = uint8_t(field(4, 2));
        const uint32_t vector = op.scale_vector;
        const bool fits = op.kind == MmaKind::MXF8F6F4 ? vector == 1 : op.kind == MmaKind::MXF4 ? vector == 2 : vector == 2 || vector == 4;
        if (!fits) throw bad("scale_vec::" + std::to_string(vector) + "X does not fit the kind");
        if (d.scale_id_a + vector > 4 || d.scale_id_b + vector > 4) throw bad("scale factor id leaves its 32-bit cell");
    }
    const uint32_t m = d.m, n = d.n;
    bool shape_ok;
    if (op.weight_stationary)
        shape_ok = op.cta_group == 1 && !d.block_scaled && (m == 32 || m == 64 || m == 128) && (n == 64 || n == 128 || n == 256);
    else if (op.cta_group == 1)
        shape_ok = (m == 128 || (m == 64 && !d.block_scaled)) && n >= 8 && n <= 256 && n % 8 == 0;
    else
        shape_ok = (m == 128 || m == 256) && n >= 16 && n <= 256 && n % 16 == 0;
    if (op.kind == MmaKind::I8 && (n > 32 || op.cta_group == 2)) shape_ok &= n % (16 * op.cta_group) == 0;
    const bool is_narrow = op.kind == MmaKind::F8F6F4 || op.kind == MmaKind::MXF8F6F4 || op.kind == MmaKind::I8;
    if (is_narrow && d.mn_major_b) shape_ok &= n % (16 * op.cta_group) == 0;  // ISA, "N shape for 8bit transpose B"
    // The ISA's table does not contain this condition; cutlass/arch/mma_sm100_umma.hpp asserts it for every 2x1SM_TS
    // operation.
    if (op.cta_group == 2 && op.a_in_tmem) shape_ok &= n % 32 == 0;
    if (!shape_ok)
        throw bad("M = " + std::to_string(m) + ", N = " + std::to_string(n) + " is not a shape of cta_group::" +
                  std::to_string(op.cta_group) + (op.weight_stationary ? " .ws" : "") + (op.a_in_tmem ? ", A in tensor memory" : ""));
    return d;
}

namespace detail {

// Part of D in the TMEM of one CTA: rows [0, rows) of that CTA's half of A, columns [n0, n0 + columns) of B.
struct UmmaBlock {
    uint8_t cta;
    uint32_t rows, n0, columns;
    uint32_t first_lane;    // lane of row 0, relative to D's address
    bool half_lanes;        // layout F: row i is in lane 32 * (i / 16) + i % 16
    uint32_t lane(uint32_t row) const { return first_lane + (half_lanes ? row / 16 * 32 + row % 16 : row); }
};

inline std::vector<UmmaBlock> umma_blocks(const UmmaOp& op, const InstrDesc& d) {
    std::vector<UmmaBlock> blocks;
    const uint32_t rows = d.m / op.cta_group;
    const bool split = op.weight_stationary || (op.cta_group == 2 && rows == 64);
    const uint32_t parts = split ? 128 / rows : 1;
    for (uint8_t cta = 0; cta < op.cta_group; ++cta)
        for (uint32_t p = 0; p < parts; ++p)
            blocks.push_back({cta, rows, p * d.n / parts, d.n / parts, p * rows, rows == 64 && !split});
    return blocks;
}

inline SharedOperand umma_operand(uint64_t desc, MmaType type, Packing packing, bool mn_major, uint32_t mn, uint32_t k) {
    if (element_bits(type) < 8 && mn_major)
        throw UnitError(Fault::BadDescriptor, "tcgen05.mma: operands below 8 bits cannot be transposed");
    if (element_bits(type) >= 8) packing = Packing::Dense;
    const SmemDesc smem = decode_smem_desc_sm100(desc);
    if (mn_major && (smem.swizzle == Swizzle::B128Atom32) != (type == MmaType::TF32))
        throw UnitError(Fault::BadDescriptor, "tcgen05.mma: transposed tf32 operands need the 128-byte swizzle with 32-byte atoms, all others any other mode");
    return {OperandLayout(smem, mn_major), type, packing, mn_major, mn, k};
}

inline SharedOperand umma_a(const UmmaOp& op, const InstrDesc& d) {
    return umma_operand(op.a_desc, d.a, d.packing, d.mn_major_a, d.m / op.cta_group, d.k);
}
inline SharedOperand umma_b(const UmmaOp& op, const InstrDesc& d) {
    return umma_operand(op.b_desc, d.b, d.packing, d.mn_major_b, d.n / op.cta_group, d.k);
}

// Storage of A in 32-bit columns of TMEM: 8-bit containers for narrow types, except the packed 4-bit elements of mxf4.
inline Packing umma_tmem_packing(const InstrDesc& d) {
    return d.packing == Packing::Padded16 && element_bits(d.a) < 8 ? Packing::Container8 : Packing::Dense;
}
inline uint32_t umma_a_columns(const InstrDesc& d) {
    const uint32_t bits = umma_tmem_packing(d) == Packing::Container8 ? 8 : element_bits(d.a);
    return d.k * bits / 32;
}

// Columns of the scale factors of `count` rows: one 32-bit column per 32 rows; row i is in lane i % 32 of every warp's
// part.
inline uint32_t scale_columns(uint32_t count) { return (count + 31) / 32; }

inline uint8_t scale_code(const uint32_t* tmem, uint32_t taddr, uint32_t lane_part, uint32_t row, uint32_t byte) {
    const TmemAddress base(taddr & 0x3FFFFFFF);     // bits 30-31 hold the scale factor id
    const uint32_t cell = tmem[(32 * lane_part + row % 32) * kTmemColumns + base.column + row / 32];
    return uint8_t(cell >> 8 * byte);
}

inline void add_rows(const UmmaBlock& block, uint32_t base_lane, uint32_t column, uint32_t columns, bool write,
                     std::vector<TmemRect>& out) {
    const uint32_t run = block.half_lanes ? 16 : block.rows;
    for (uint32_t row = 0; row < block.rows; row += run) {
        const TmemRect rect{uint16_t(base_lane + block.lane(row)), uint16_t(run), uint16_t(column), uint16_t(columns), block.cta, write};
        if (rect.lane + rect.lanes > kTmemLanes || rect.column + rect.columns > kTmemColumns)
            throw UnitError(Fault::OutOfBounds, "tcgen05.mma: lane " + std::to_string(rect.lane) + ", columns " +
                            std::to_string(column) + ".." + std::to_string(column + columns - 1) + " leave tensor memory");
        out.push_back(rect);
    }
}

}  // namespace detail

// All bytes and cells that the operation reads and writes, in both CTAs. D is listed as read only if `accumulate` is
// set. Lanes of the disable mask are listed as well.
inline void umma_footprint(const UmmaOp& op, Footprint& out) {
    const InstrDesc d = decode_instr_desc(op);
    const TmemAddress base_d(op.d_tmem), base_a(op.a_tmem);
    const bool half = d.m == 64 && op.cta_group == 1 && !op.weight_stationary;
    if (base_d.lane != 0 && !(half && base_d.lane == 16))
        throw UnitError(Fault::Misaligned, "tcgen05.mma: D starts at lane " + std::to_string(base_d.lane) + ", expected " + (half ? "0 or 16" : "0"));
    for (const detail::UmmaBlock& block : detail::umma_blocks(op, d)) {
        if (op.a_in_tmem) detail::add_rows(block, base_a.lane, base_a.column, detail::umma_a_columns(d), false, out.tmem);
        if (op.accumulate) detail::add_rows(block, base_d.lane, base_d.column, block.columns, false, out.tmem);
        detail::add_rows(block, base_d.lane, base_d.column, block.columns, true, out.tmem);
    }
    for (uint8_t cta = 0; cta < op.cta_group; ++cta) {
        if (!op.a_in_tmem) detail::umma_a(op, d).footprint(cta, out.shared);
        detail::umma_b(op, d).footprint(cta, out.shared);
        if (!d.block_scaled) continue;
        const bool split = op.cta_group == 2 && d.m == 128;
        for (const auto& [taddr, rows] : {std::pair{op.scale_a_tmem, d.m / op.cta_group}, std::pair{op.scale_b_tmem, split ? d.n / 2 : d.n}}) {
            const TmemAddress base(taddr & 0x3FFFFFFF);
            const TmemRect rect{0, uint16_t(kTmemLanes), uint16_t(base.column), uint16_t(detail::scale_columns(rows)), cta, false};
            if (rect.column + rect.columns > kTmemColumns)
                throw UnitError(Fault::OutOfBounds, "tcgen05.mma: scale factors at column " + std::to_string(base.column) + " leave tensor memory");
            out.tmem.push_back(rect);
        }
    }
}

namespace detail {

// Unpacks the rows of A of one block from TMEM; each block reads the copy in its own lanes.
template <class T>
inline void unpack_tmem_a(const UmmaOp& op, const InstrDesc& d, const UmmaBlock& block, const uint32_t* tmem, T* out) {
    const TmemAddress base(op.a_tmem);
    for (uint32_t row = 0; row < block.rows; ++row) {
        const uint32_t* cells = tmem + (base.lane + block.lane(row)) * kTmemColumns + base.column;
        T* line = out + row * d.k;
        unpack_elements(d.a, umma_tmem_packing(d), reinterpret_cast<const uint8_t*>(cells), d.k, line);
        if (d.negate_a) for (uint32_t i = 0; i < d.k; ++i) line[i] = -line[i];
    }
}

// Reads scale factors. Each row of D takes A's factors from the copy of its own warp; the block takes B's from the copy
// of its first warp.
inline ScaleFactors read_scale_factors(const UmmaOp& op, const InstrDesc& d, const UmmaBlock& block, const uint32_t* tmem, uint32_t groups) {
    return ScaleFactors(
        block.rows, block.columns, groups, op.scale_vector, d.scale_type,
        [&](uint32_t row, uint32_t part) { return scale_code(tmem, op.scale_a_tmem, block.lane(row) / 32, row, d.scale_id_a + part); },
        [&](uint32_t column, uint32_t part) { return scale_code(tmem, op.scale_b_tmem, block.first_lane / 32, column, d.scale_id_b + part); });
}

inline bool lane_disabled(const UmmaOp& op, uint8_t cta, uint32_t lane) {
    return op.disable_lane[4 * cta + lane / 32] >> lane % 32 & 1;
}

inline void execute_float(const UmmaOp& op, const InstrDesc& d, const CtaMemory ctas[2]) {
    const uint32_t rows = d.m / op.cta_group, half_n = d.n / op.cta_group;
    std::vector<float> a(rows * d.k), b(size_t(d.k) * d.n);
    for (uint32_t cta = 0; cta < op.cta_group; ++cta)
        umma_b(op, d).unpack(ctas[cta].shared, ctas[cta].shared_bytes, d.negate_b, b.data() + cta * half_n, 1, d.n);
    // Blackwell's tensor cores sum all products of an instruction at once.
    const Summation how{d.k, 25, least_exponent(d.a), least_exponent(d.b), d.d == MmaType::F16 ? MatmulOutput::F16 : MatmulOutput::F32};
    int a_cta = -1;     // CTA whose A is in `a`
    for (const UmmaBlock& block : umma_blocks(op, d)) {
        const CtaMemory& memory = ctas[block.cta];
        if (op.a_in_tmem) {
            unpack_tmem_a(op, d, block, memory.tmem, a.data());
        } else if (a_cta != block.cta || d.block_scaled) {
            umma_a(op, d).unpack(memory.shared, memory.shared_bytes, d.negate_a, a.data(), d.k, 1);
            a_cta = block.cta;
        }
        const float* const b_block = b.data() + block.n0;
        const TmemAddress base(op.d_tmem);
        const float scale = op.scale_d ? bits_to_float(uint32_t(127 - op.scale_d) << 23) : 1.0f;
        std::vector<float*> d_rows(block.rows);
        std::vector<float> scratch;
        std::vector<uint32_t*> cells(block.rows);
        const bool direct = d.d == MmaType::F32;
        if (!direct) scratch.resize(size_t(block.rows) * block.columns);
        std::vector<float> discarded(block.columns * 4);
        for (uint32_t row = 0; row < block.rows; ++row) {
            const uint32_t lane = base.lane + block.lane(row);
            cells[row] = memory.tmem + lane * kTmemColumns + base.column;
            d_rows[row] = direct ? reinterpret_cast<float*>(cells[row]) : scratch.data() + size_t(row) * block.columns;
            if (lane_disabled(op, block.cta, lane)) {
                cells[row] = nullptr;
                d_rows[row] = discarded.data();
                continue;
            }
            if (!op.accumulate || (direct && scale == 1.0f)) continue;
            for (uint32_t j = 0; j < block.columns; ++j)
                d_rows[row][j] = scale * (direct ? d_rows[row][j] : f16_to_float(uint16_t(cells[row][j])));
        }
        if (d.block_scaled) {
            const bool four_bits = op.kind != MmaKind::MXF8F6F4;
            const ScaleFactors factors = read_scale_factors(op, d, block, memory.tmem, scale_groups(four_bits, d.k));
            matmul_block_scaled(how, four_bits, d.scale_type, factors, block.rows, block.columns, d.k, a.data(), d.k, b_block, d.n,
                                d_rows.data(), op.accumulate);
        } else {
            matmul(how, block.rows, block.columns, d.k, a.data(), d.k, b_block, d.n, d_rows.data(), op.accumulate);
        }
        if (direct) continue;
        for (uint32_t row = 0; row < block.rows; ++row)
            if (cells[row]) for (uint32_t j = 0; j < block.columns; ++j) cells[row][j] = float_to_f16(d_rows[row][j]);
    }
}

inline void execute_integer(const UmmaOp& op, const InstrDesc& d, const CtaMemory ctas[2]) {
    const uint32_t half_n = d.n / op.cta_group;
    std::vector<int32_t> a(size_t(d.m / op.cta_group) * d.k), b(size_t(d.k) * d.n), discarded(d.n);
    for (uint32_t cta = 0; cta < op.cta_group; ++cta)
        umma_b(op, d).unpack(ctas[cta].shared, ctas[cta].shared_bytes, false, b.data() + cta * half_n, 1, d.n);
    for (const UmmaBlock& block : umma_blocks(op, d)) {
        const CtaMemory& memory = ctas[block.cta];
        if (op.a_in_tmem) unpack_tmem_a(op, d, block, memory.tmem, a.data());
        else umma_a(op, d).unpack(memory.shared, memory.shared_bytes, false, a.data(), d.k, 1);
        const TmemAddress base(op.d_tmem);
        std::vector<int32_t*> d_rows(block.rows);
        for (uint32_t row = 0; row < block.rows; ++row) {
            const uint32_t lane = base.lane + block.lane(row);
            d_rows[row] = lane_disabled(op, block.cta, lane) ? discarded.data()
                        : reinterpret_cast<int32_t*>(memory.tmem + lane * kTmemColumns + base.column);
        }
        matmul(block.rows, block.columns, d.k, a.data(), d.k, b.data() + block.n0, d.n, d_rows.data(), op.accumulate, d.saturate);
    }
}

}  // namespace detail

// Executes the operation on the memories of the even ([0]) and, for cta_group 2, the odd CTA ([1]).
inline void umma_execute(const UmmaOp& op, const CtaMemory ctas[2]) {
    const InstrDesc d = decode_instr_desc(op);
    if (d.d == MmaType::S32) detail::execute_integer(op, d, ctas);
    else detail::execute_float(op, d, ctas);
}

// Number of floating-point (or integer) operations: 2 M N K.
inline uint64_t umma_flops(const UmmaOp& op) {
    const InstrDesc d = decode_instr_desc(op);
    return 2ull * d.m * d.n * d.k;
}

}  // namespace warpcheck
