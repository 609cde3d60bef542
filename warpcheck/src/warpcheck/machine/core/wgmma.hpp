// wgmma.mma_async: D[64,N] (registers of a warpgroup) = A[64,K] (registers or shared memory) * B[K,N] (shared) + D. PTX
// ISA 9.7.15.5. matmul.hpp holds the arithmetic.
#pragma once

#include "fragment.hpp"
#include "matmul.hpp"

namespace warpcheck {

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

inline uint32_t wgmma_k(const WgmmaOp& op) { return 256 / element_bits(op.a_type); }

// 32-bit registers per thread that hold D.
inline uint32_t wgmma_d_registers(const WgmmaOp& op) { return op.d_type == MmaType::F16 ? op.n / 4 : op.n / 2; }

namespace detail {

inline SharedOperand wgmma_operand(uint64_t desc, MmaType type, bool mn_major, uint32_t mn, uint32_t k) {
    if (mn_major && element_bits(type) != 16)
        throw UnitError(Fault::BadDescriptor, "wgmma: only 16-bit operands can be transposed");
    return {OperandLayout(decode_smem_desc_sm90(desc), mn_major), type, Packing::Dense, mn_major, mn, k};
}
inline SharedOperand wgmma_a(const WgmmaOp& op) { return wgmma_operand(op.a_desc, op.a_type, op.mn_major_a, 64, wgmma_k(op)); }
inline SharedOperand wgmma_b(const WgmmaOp& op) { return wgmma_operand(op.b_desc, op.b_type, op.mn_major_b, op.n, wgmma_k(op)); }

// Hopper's tensor cores sum all products of an instruction at once; they keep fewer bits of 8-bit floats.
inline Summation wgmma_summation(const WgmmaOp& op) {
    const bool narrow = element_bits(op.a_type) == 8;
    const MatmulOutput wide = narrow ? MatmulOutput::E8M13 : MatmulOutput::F32;
    return {wgmma_k(op), narrow ? 13 : 25, least_exponent(op.a_type), least_exponent(op.b_type), op.d_type == MmaType::F16 ? MatmulOutput::F16 : wide};
}

template <class T>
inline void wgmma_compute(const WgmmaOp& op, const CtaMemory& memory, const uint32_t* const* a_regs, uint32_t* const* d_regs) {
    const uint32_t k = wgmma_k(op), n = op.n, per_warp = wgmma_d_registers(op);
    const bool half = op.d_type == MmaType::F16;
    static thread_local std::vector<T> a, b, d;     // static, so that they are allocated only when they grow
    const auto grow = [](std::vector<T>& v, size_t size) { if (v.size() < size) v.resize(size); };
    grow(a, 64 * k), grow(b, size_t(k) * n), grow(d, 64 * n);
    wgmma_b(op).unpack(memory.shared, memory.shared_bytes, op.negate_b, b.data(), 1, n);
    if (!op.a_in_registers) wgmma_a(op).unpack(memory.shared, memory.shared_bytes, op.negate_a, a.data(), k, 1);
    T* rows[64];
    for (uint32_t i = 0; i < 64; ++i) rows[i] = d.data() + i * n;
    for (uint32_t warp = 0; warp < 4; ++warp) {
        if (op.a_in_registers)
            unpack_fragment(op.a_type, Packing::Dense, 4, 2, a_regs + 4 * warp, op.negate_a, a.data() + 16 * warp * k, k, 1);
        if (op.accumulate) unpack_accumulator(half, 16, n / 8, d_regs + per_warp * warp, d.data() + 16 * warp * n, n, 1);
    }
    if constexpr (std::is_same_v<T, float>) matmul(wgmma_summation(op), 64, n, k, a.data(), k, b.data(), n, rows, op.accumulate);
    else matmul(64, n, k, a.data(), k, b.data(), n, rows, op.accumulate, op.saturate);
    for (uint32_t warp = 0; warp < 4; ++warp)
        pack_accumulator(half, 16, n / 8, d.data() + 16 * warp * n, n, 1, d_regs + per_warp * warp);
}

}  // namespace detail

// Appends the shared memory that the operation reads.
inline void wgmma_footprint(const WgmmaOp& op, std::vector<SharedRange>& out) {
    if (!op.a_in_registers) detail::wgmma_a(op).footprint(0, out);
    detail::wgmma_b(op).footprint(0, out);
}

// d[warp * wgmma_d_registers() + r] and a[warp * 4 + r] point to the values of a register in the 32 threads of warp
// 0..3 of the warpgroup. `a` is unused if A is in shared memory.
inline void wgmma_execute(const WgmmaOp& op, const CtaMemory& memory, const uint32_t* const* a, uint32_t* const* d) {
    if (op.n % 8 || op.n == 0 || op.n > 256)
        throw UnitError(Fault::BadDescriptor, "wgmma: N = " + std::to_string(op.n) + ", expected a multiple of 8 up to 256");
    if (is_integer(op.a_type)) detail::wgmma_compute<int32_t>(op, memory, a, d);
    else detail::wgmma_compute<float>(op, memory, a, d);
}

}  // namespace warpcheck
