// Floating-point arithmetic in PTX's rounding modes, for hosts of which only round to nearest is assumed. A sum or
// product is computed in binary64 and rounded to odd. Round to odd keeps enough information that a second rounding, to
// binary32 or narrower, is correct in every direction.
#pragma once

#include <cmath>
#include <cstring>

#include "float_formats.hpp"

namespace warpcheck {

inline double bits_to_double(uint64_t bits) { double d; std::memcpy(&d, &bits, 8); return d; }
inline uint64_t double_to_bits(double d) { uint64_t bits; std::memcpy(&bits, &d, 8); return bits; }

// sum + error is the exact value. The result is exact, or odd in its last bit.
inline double round_to_odd(double sum, double error) {
    uint64_t bits = double_to_bits(sum);
    if (error == 0 || (bits & 1) || !std::isfinite(sum)) return sum;
    bits += ((error > 0) == (sum > 0)) ? 1 : -1;
    return bits_to_double(bits);
}

inline double add_odd(double a, double b) {
    const double sum = a + b;
    const double part = sum - a;
    return round_to_odd(sum, (a - (sum - part)) + (b - part));
}

// a * b + c for binary32 operands; the product is exact in binary64.
inline double fma_odd(float a, float b, float c) { return add_odd(double(a) * double(b), double(c)); }

inline float round_float(double value, int mode) {
    float f = float(value);
    if (mode == 0 || std::isnan(value) || double(f) == value) return f;
    const bool above = double(f) > value;
    switch (Round(mode)) {
        case Round::Zero: return std::fabs(double(f)) > std::fabs(value) ? std::nextafterf(f, 0.0f) : f;
        case Round::Down: return above ? std::nextafterf(f, -INFINITY) : f;
        case Round::Up: return above ? f : std::nextafterf(f, INFINITY);
        default: return f;
    }
}

// Rounds to binary32 by round to odd, for a second rounding to 16 bits or fewer.
inline float odd_float(double value) {
    const float f = round_float(value, int(Round::Zero));
    if (std::isnan(value) || std::isinf(value) || double(f) == value) return f;
    return bits_to_float(float_to_bits(f) | 1);
}

inline float flush(float f) { return std::fabs(f) < 1.17549435e-38f ? std::copysign(0.0f, f) : f; }

inline float saturate(float f) { return f > 0 ? (f < 1 ? f : 1.0f) : 0.0f; }   // NaN gives 0

template <class T>
inline T min_number(T a, T b, bool nan) {
    if (std::isnan(a) || std::isnan(b)) return nan || (std::isnan(a) && std::isnan(b)) ? T(NAN) : std::isnan(a) ? b : a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
}

template <class T>
inline T max_number(T a, T b, bool nan) {
    if (std::isnan(a) || std::isnan(b)) return nan || (std::isnan(a) && std::isnan(b)) ? T(NAN) : std::isnan(a) ? b : a;
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}

// Canonical NaN of PTX.
inline float canonical(float f) { return f != f ? bits_to_float(0x7FFFFFFFu) : f; }

// Rounds to an integer in the given direction. As in PTX, NaN gives 0 and other values are clamped to the range.
template <class I>
inline I round_integer(double value, int mode) {
    if (std::isnan(value)) return 0;
    switch (Round(mode)) {
        case Round::Zero: value = std::trunc(value); break;
        case Round::Down: value = std::floor(value); break;
        case Round::Up: value = std::ceil(value); break;
        default: value = std::nearbyint(value);
    }
    constexpr double low = double(std::numeric_limits<I>::min());
    const double high = std::ldexp(1.0, int(std::numeric_limits<I>::digits));
    if (value < low) return std::numeric_limits<I>::min();
    if (value >= high) return std::numeric_limits<I>::max();
    return I(value);
}

}  // namespace warpcheck
