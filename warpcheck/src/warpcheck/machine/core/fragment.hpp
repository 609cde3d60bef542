// Layout of matrix fragments in the registers of a warp, common to mma.sync and wgmma (PTX ISA 9.7.14.5, 9.7.15.5.1.1).
// With g = thread / 4 and t = thread % 4, and a row of K cut into 32-bit words:
//   A (16 x K): register r holds word t + 4 (r / 2) of row g + 8 (r % 2); with 8 rows: word t + 4 r of row g
//   B (K x 8):  register r holds word t + 4 r of column g
//   C, D (. x 8), 32 bits: register r holds column 2 t + r % 2 of row g + 8 (r / 2)
//                 16 bits: register r holds columns 2 t and 2 t + 1 of row g + 8 r
#pragma once

#include "operand.hpp"

namespace warpcheck {
namespace detail {

// Number of elements of A or B in one 32-bit register.
inline uint32_t word_elements(MmaType type, Packing packing) {
    return 32 / (packing == Packing::Container8 ? 8 : element_bits(type));
}

// Unpacks a fragment to out[row * row_stride + element * k_stride]. Register r holds row (for B, column) g + 8 (r %
// row_groups).
template <class T>
inline void unpack_fragment(MmaType type, Packing packing, uint32_t registers, uint32_t row_groups, const uint32_t* const* regs,
                            bool negate, T* out, size_t row_stride, size_t k_stride) {
    const uint32_t per_word = word_elements(type, packing);
    T values[32 * 32];
    for (uint32_t r = 0; r < registers; ++r) {
        unpack_elements(type, packing, reinterpret_cast<const uint8_t*>(regs[r]), 32 * per_word, values);
        for (uint32_t i = 0; negate && i < 32 * per_word; ++i) values[i] = -values[i];
        T* const first = out + 8 * (r % row_groups) * row_stride + 4 * (r / row_groups) * per_word * k_stride;
        const T* from = values;
        for (uint32_t g = 0; g < 8; ++g)
            for (uint32_t e = 0; e < 4 * per_word; ++e) first[g * row_stride + e * k_stride] = *from++;
    }
}

// Calls f(register, row, column, thread) for each pair of neighbouring columns of an accumulator of `rows` x (8
// groups). The pair is in the two halves of the register, or in the register and the next one.
template <class F>
inline void each_of_accumulator(bool half, uint32_t rows, uint32_t groups, F&& f) {
    const uint32_t row_groups = rows / 8;
    uint32_t r = 0;
    for (uint32_t group = 0; group < groups; ++group)
        for (uint32_t index = 0; index < row_groups; ++index, r += half ? 1 : 2)
            for (uint32_t g = 0; g < 8; ++g)
                for (uint32_t t = 0; t < 4; ++t) f(r, 8 * index + g, 8 * group + 2 * t, 4 * g + t);
}

// Moves an accumulator of `rows` x (8 groups) between registers and matrix[row * row_stride + column * column_stride].
// T is float or int32_t; half accumulators are pairs of f16.
template <class T>
inline void unpack_accumulator(bool half, uint32_t rows, uint32_t groups, const uint32_t* const* regs, T* out, size_t row_stride,
                               size_t column_stride) {
    if (half)
        each_of_accumulator(true, rows, groups, [=](uint32_t r, uint32_t row, uint32_t column, uint32_t thread) {
            T* const at = out + row * row_stride + column * column_stride;
            const uint32_t bits = regs[r][thread];
            at[0] = T(f16_to_float(uint16_t(bits)));
            at[column_stride] = T(f16_to_float(uint16_t(bits >> 16)));
        });
    else
        each_of_accumulator(false, rows, groups, [=](uint32_t r, uint32_t row, uint32_t column, uint32_t thread) {
            T* const at = out + row * row_stride + column * column_stride;
            std::memcpy(at, &regs[r][thread], 4);
            std::memcpy(at + column_stride, &regs[r + 1][thread], 4);
        });
}

template <class T>
inline void pack_accumulator(bool half, uint32_t rows, uint32_t groups, const T* in, size_t row_stride, size_t column_stride,
                             uint32_t* const* regs) {
    if (half)
        each_of_accumulator(true, rows, groups, [=](uint32_t r, uint32_t row, uint32_t column, uint32_t thread) {
            const T* const at = in + row * row_stride + column * column_stride;
            regs[r][thread] = float_to_f16(float(at[0])) | uint32_t(float_to_f16(float(at[column_stride]))) << 16;
        });
    else
        each_of_accumulator(false, rows, groups, [=](uint32_t r, uint32_t row, uint32_t column, uint32_t thread) {
            const T* const at = in + row * row_stride + column * column_stride;
            std::memcpy(&regs[r][thread], at, 4);
            std::memcpy(&regs[r + 1][thread], at + column_stride, 4);
        });
}

}  // namespace detail
}  // namespace warpcheck
