// Lane-wise access to register rows: read and write one lane, and map a function over the active lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "engine.hpp"
#include "numerics.hpp"

namespace warpcheck {

template <class T>
inline T get(const uint32_t* row, int lane) {
    T v;
    if constexpr (sizeof(T) == 8) std::memcpy(&v, row + 2 * lane, 8);
    else std::memcpy(&v, row + lane, sizeof(T));
    return v;
}

// Values narrower than 32 bits are stored zero-extended.
template <class T>
inline void put(uint32_t* row, int lane, T v) {
    if constexpr (sizeof(T) == 8) std::memcpy(row + 2 * lane, &v, 8);
    else if constexpr (sizeof(T) == 4) std::memcpy(row + lane, &v, 4);
    else row[lane] = uint32_t(std::make_unsigned_t<T>(v));
}

template <class F>
inline void for_lanes(uint32_t mask, F&& f) {
    if (mask == ~0u) {
        for (int l = 0; l < 32; ++l) f(l);
        return;
    }
    for (uint32_t m = mask; m; m &= m - 1) f(__builtin_ctz(m));
}

// The smaller or larger of two values of 32 bits.
inline uint32_t extreme_bits(Type type, bool min, bool nan, uint32_t a, uint32_t b) {
    if (type == Type::f32) {
        const float x = bits_to_float(a), y = bits_to_float(b);
        return float_to_bits(min ? min_number(x, y, nan) : max_number(x, y, nan));
    }
    if (type == Type::s32) return uint32_t(min ? std::min(int32_t(a), int32_t(b)) : std::max(int32_t(a), int32_t(b)));
    return min ? std::min(a, b) : std::max(a, b);
}

template <class A, class R = A, class F>
inline void map1(Exec& x, F&& f) {
    const uint32_t* a = x.src(0);
    uint32_t* d = x.dst();
    for_lanes(x.mask, [&](int l) { put<R>(d, l, R(f(get<A>(a, l)))); });
}

template <class A, class B = A, class R = A, class F>
inline void map2(Exec& x, F&& f) {
    const uint32_t *a = x.src(0), *b = x.src(1);
    uint32_t* d = x.dst();
    for_lanes(x.mask, [&](int l) { put<R>(d, l, R(f(get<A>(a, l), get<B>(b, l)))); });
}

template <class A, class B = A, class C = A, class R = A, class F>
inline void map3(Exec& x, F&& f) {
    const uint32_t *a = x.src(0), *b = x.src(1), *c = x.src(2);
    uint32_t* d = x.dst();
    for_lanes(x.mask, [&](int l) { put<R>(d, l, R(f(get<A>(a, l), get<B>(b, l), get<C>(c, l)))); });
}

}  // namespace warpcheck
