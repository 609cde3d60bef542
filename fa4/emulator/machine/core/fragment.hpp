// Matrix fragments in the registers of a warp, common to mma.sync and wgmma (PTX ISA 9.7.14.5, 9.7.15.5.1.1).
// With g = thread / 4 and t = thread % 4, and a row of K cut into 32-bit words:
//   A (16 x K): register r holds word t + 4 (r / 2) of row g + 8 (r % 2); with 8 rows: word t + 4 r of row g
//   B (K x 8):  register r holds word t + 4 r of column g
//   C, D (. x 8), 32 bits: register r holds column 2 t + r % 2 of row g + 8 (r / 2)
//                 16 bits: register r holds columns 2 t and 2 t + 1 of row g + 8 r
#pragma once

#include "operand.hpp"

namespace fa4 {
namespace detail {

// Elements of A or B in one 32-bit register.
inline uint32_t word_elements(MmaType type, Packing packing) {
    return 32 / (packing == Packing::Container8 ? 8 : element_bits(type));
}

// Unpacks a fragment whose register r lies in row (column, for B) g + 8 (r % row_groups) to out[row * k + element].
template <class T>
inline void unpack_fragment(MmaType type, Packing packing, uint32_t registers, uint32_t row_groups, uint32_t k,
                            const uint32_t* const* regs, bool negate, T* out) {
    const uint32_t per_word = word_elements(type, packing);
    T values[32 * 32];
    for (uint32_t r = 0; r < registers; ++r) {
        unpack_elements(type, packing, reinterpret_cast<const uint8_t*>(regs[r]), 32 * per_word, values);
        for (uint32_t thread = 0; thread < 32; ++thread) {
            const uint32_t row = thread / 4 + 8 * (r % row_groups);
            const uint32_t word = thread % 4 + 4 * (r / row_groups);
            const T* mine = values + thread * per_word;
            for (uint32_t i = 0; i < per_word; ++i) out[row * k + word * per_word + i] = negate ? -mine[i] : mine[i];
        }
    }
}

// Moves an accumulator of `rows` x (8 groups) between registers and a dense matrix. T is float or int32_t; half
// accumulators are f16 pairs.
template <class T>
inline void unpack_accumulator(bool half, uint32_t rows, uint32_t groups, const uint32_t* const* regs, T* out) {
    const uint32_t n = 8 * groups, row_groups = rows / 8, per_group = half ? row_groups : 2 * row_groups;
    for (uint32_t r = 0; r < groups * per_group; ++r) {
        const uint32_t group = r / per_group, index = r % per_group;
        for (uint32_t thread = 0; thread < 32; ++thread) {
            T* line = out + (thread / 4 + 8 * (half ? index : index / 2)) * n + 8 * group + 2 * (thread % 4);
            const uint32_t bits = regs[r][thread];
            if (half) {
                line[0] = T(f16_to_float(uint16_t(bits)));
                line[1] = T(f16_to_float(uint16_t(bits >> 16)));
            } else {
                std::memcpy(&line[index % 2], &bits, 4);
            }
        }
    }
}

template <class T>
inline void pack_accumulator(bool half, uint32_t rows, uint32_t groups, const T* in, uint32_t* const* regs) {
    const uint32_t n = 8 * groups, row_groups = rows / 8, per_group = half ? row_groups : 2 * row_groups;
    for (uint32_t r = 0; r < groups * per_group; ++r) {
        const uint32_t group = r / per_group, index = r % per_group;
        for (uint32_t thread = 0; thread < 32; ++thread) {
            const T* line = in + (thread / 4 + 8 * (half ? index : index / 2)) * n + 8 * group + 2 * (thread % 4);
            if (half) regs[r][thread] = float_to_f16(float(line[0])) | uint32_t(float_to_f16(float(line[1]))) << 16;
            else std::memcpy(&regs[r][thread], &line[index % 2], 4);
        }
    }
}

}  // namespace detail
}  // namespace fa4
