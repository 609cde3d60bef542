// Floating-point formats narrower than 32 bits, and conversions between them. PTX ISA 5.2.3 (formats), 9.7.9.21 (cvt:
// rounding, .satfinite, NaN).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "enumerations.hpp"

namespace warpcheck {

inline float bits_to_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

// A signed binary format: 1 sign bit, E exponent bits, M mantissa bits. `max_code` is the largest finite
// magnitude; formats without infinity set inf_code to nan_code (or to max_code, where there is no NaN either).
template <int E, int M, uint32_t MaxCode, uint32_t InfCode, uint32_t NanCode>
struct Format {
    static constexpr int exponent_bits = E, mantissa_bits = M, bias = (1 << (E - 1)) - 1;
    static constexpr uint32_t max_code = MaxCode, inf_code = InfCode, nan_code = NanCode;
    static constexpr uint32_t sign_bit = 1u << (E + M);
    static constexpr uint32_t magnitude_mask = sign_bit - 1;
};

using F16 = Format<5, 10, 0x7BFF, 0x7C00, 0x7FFF>;
using BF16 = Format<8, 7, 0x7F7F, 0x7F80, 0x7FFF>;
using E4M3 = Format<4, 3, 0x7E, 0x7F, 0x7F>;      // no infinity; 0x7F is NaN
using E5M2 = Format<5, 2, 0x7B, 0x7C, 0x7F>;
using E2M1 = Format<2, 1, 0x7, 0x7, 0x7>;         // no infinity, no NaN
using E2M3 = Format<2, 3, 0x1F, 0x1F, 0x1F>;
using E3M2 = Format<3, 2, 0x1F, 0x1F, 0x1F>;

// Exact value of a code. Binary32 holds every value of these formats.
template <class F>
inline float decode_float(uint32_t code) {
    const uint32_t sign = (code & F::sign_bit) ? 0x80000000u : 0;
    const uint32_t magnitude = code & F::magnitude_mask;
    if constexpr (F::nan_code != F::max_code) {
        if (magnitude > F::max_code)
            return bits_to_float(sign | (magnitude == F::inf_code && F::inf_code != F::nan_code ? 0x7F800000u : 0x7FC00000u));
    }
    const uint32_t exponent = magnitude >> F::mantissa_bits;
    const uint32_t mantissa = magnitude & ((1u << F::mantissa_bits) - 1);
    if (exponent == 0) {    // subnormal: mantissa * 2^(1 - bias - M), an exact product of binary32 numbers
        const int scale = 1 - F::bias - F::mantissa_bits;
        if constexpr (F::exponent_bits == 8) return bits_to_float(sign | mantissa << (23 - F::mantissa_bits));
        else return bits_to_float(float_to_bits(float(mantissa) * bits_to_float(uint32_t(127 + scale) << 23)) | sign);
    }
    return bits_to_float(sign | (exponent + 127 - F::bias) << 23 | mantissa << (23 - F::mantissa_bits));
}

// Rounds a binary32 value to the format. An overflow gives the largest finite value if the rounding direction or
// satfinite requires it, else infinity (NaN if the format has no infinity). NaN gives the format's positive NaN, or its
// largest finite value if it has no NaN.
template <class F>
inline uint32_t encode_float(float value, Round round = Round::NearestEven, bool satfinite = false) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return F::nan_code;
    const bool negative = bits >> 31;
    const uint32_t sign = negative ? F::sign_bit : 0;
    const bool toward_zero = round == Round::Zero || (round == Round::Up && negative) || (round == Round::Down && !negative);
    const bool away = (round == Round::Up && !negative) || (round == Round::Down && negative);
    if (magnitude == 0x7F800000u) return sign | (satfinite ? F::max_code : F::inf_code);

    const int biased = int(magnitude >> 23);
    const int exponent = biased ? biased - 127 : -126;
    const uint32_t mantissa = (magnitude & 0x7FFFFFu) | (biased ? 0x800000u : 0);
    const int min_exponent = 1 - F::bias;
    int shift = 23 - F::mantissa_bits;
    if (exponent < min_exponent) shift += min_exponent - exponent;
    if (shift > 25) shift = 25;     // everything is below half of the smallest subnormal
    uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1);
    const uint32_t half = shift ? 1u << (shift - 1) : 0;
    bool up = false;
    switch (round) {
        case Round::NearestEven: up = rest > half || (rest == half && shift && (kept & 1)); break;
        case Round::NearestAway: up = shift && rest >= half; break;
        default: up = away && rest != 0;
    }
    kept += up;
    // A carry out of the mantissa increments the exponent, because codes have the order of their values.
    uint32_t code = kept;
    if (exponent >= min_exponent) code += uint32_t(exponent - min_exponent) << F::mantissa_bits;
    if (code > F::max_code) code = satfinite || toward_zero ? F::max_code : F::inf_code;
    return sign | code;
}

inline float f16_to_float(uint16_t code) { return decode_float<F16>(code); }
inline float bf16_to_float(uint16_t code) { return bits_to_float(uint32_t(code) << 16); }
inline float tf32_to_float(uint32_t bits) { return bits_to_float(bits & 0xFFFFE000u); }   // the low 13 bits are ignored
inline float e4m3_to_float(uint8_t code) { return decode_float<E4M3>(code); }
inline float e5m2_to_float(uint8_t code) { return decode_float<E5M2>(code); }
inline float e2m1_to_float(uint8_t code) { return decode_float<E2M1>(code & 0xF); }
inline float e2m3_to_float(uint8_t code) { return decode_float<E2M3>(code & 0x3F); }
inline float e3m2_to_float(uint8_t code) { return decode_float<E3M2>(code & 0x3F); }

inline float ue8m0_to_float(uint8_t code) {     // 2^(code - 127)
    if (code == 0xFF) return bits_to_float(0x7FC00000u);
    return bits_to_float(code ? uint32_t(code) << 23 : 0x00400000u);
}

inline uint16_t float_to_f16(float value, Round round = Round::NearestEven, bool satfinite = false) {
    return uint16_t(encode_float<F16>(value, round, satfinite));
}

inline uint16_t float_to_bf16(float value, Round round = Round::NearestEven, bool satfinite = false) {
    return uint16_t(encode_float<BF16>(value, round, satfinite));
}

// tf32 is a binary32 whose mantissa keeps its upper ten bits.
inline uint32_t float_to_tf32(float value, Round round = Round::NearestEven, bool satfinite = false) {
    using TF32 = Format<8, 10, 0x3FBFF, 0x3FC00, 0x3FFFF>;
    const uint32_t code = encode_float<TF32>(value, round, satfinite);
    return code == TF32::nan_code ? 0x7FFFFFFFu : code << 13;
}

// PTX rounds to formats of 8 bits and fewer only with .rn.satfinite.
inline uint8_t float_to_e4m3(float v) { return uint8_t(encode_float<E4M3>(v, Round::NearestEven, true)); }
inline uint8_t float_to_e5m2(float v) { return uint8_t(encode_float<E5M2>(v, Round::NearestEven, true)); }
inline uint8_t float_to_e2m1(float v) { return uint8_t(encode_float<E2M1>(v, Round::NearestEven, true)); }
inline uint8_t float_to_e2m3(float v) { return uint8_t(encode_float<E2M3>(v, Round::NearestEven, true)); }
inline uint8_t float_to_e3m2(float v) { return uint8_t(encode_float<E3M2>(v, Round::NearestEven, true)); }

// cvt.{rz,rp}{.satfinite}.ue8m0: drops the sign; NaN gives 0xFF; rounding up goes to the next power of two.
inline uint8_t float_to_ue8m0(float value, Round round, bool satfinite) {
    const uint32_t magnitude = float_to_bits(value) & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0xFF;
    if (magnitude == 0x7F800000u) return satfinite ? 0xFE : 0xFF;
    const uint32_t exponent = magnitude >> 23, mantissa = magnitude & 0x7FFFFF;
    // The smallest code is 2^-127, which binary32 holds as the subnormal 0x00400000.
    const bool above = exponent ? mantissa != 0 : mantissa > 0x400000;
    uint32_t code = exponent + (round == Round::Up && above);
    if (code > 0xFE) code = satfinite ? 0xFE : 0xFF;
    return uint8_t(code);
}

// Bulk conversion of matrix operands, as plain loops that compilers vectorise.
inline void f16_to_float(const uint16_t* source, float* destination, size_t count) {
    const float scale = bits_to_float((127u + 112u) << 23);     // moves the exponent bias from 15 to 127
    for (size_t i = 0; i < count; ++i) {
        const uint32_t magnitude = source[i] & 0x7FFFu;
        uint32_t bits = float_to_bits(bits_to_float(magnitude << 13) * scale);
        bits |= magnitude >= 0x7C00u ? 0x7F800000u : 0;         // infinity and NaN
        destination[i] = bits_to_float(bits | (source[i] & 0x8000u) << 16);
    }
}

inline void bf16_to_float(const uint16_t* source, float* destination, size_t count) {
    for (size_t i = 0; i < count; ++i) destination[i] = bits_to_float(uint32_t(source[i]) << 16);
}

}  // namespace warpcheck
