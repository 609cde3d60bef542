// Execution of mov, pack, unpack and cvt. PTX ISA 9.7.9.3, 9.7.9.4, 9.7.9.21, 9.7.9.22.
#include "engine.hpp"
#include "lanes.hpp"

namespace warpcheck {
namespace {

bool is_float(Type t) { return t == Type::f16 || t == Type::bf16 || t == Type::f32 || t == Type::f64 || t == Type::tf32 || t >= Type::e4m3; }
bool is_signed(Type t) { return t == Type::s8 || t == Type::s16 || t == Type::s32 || t == Type::s64; }

int bits_of(Type t) {
    switch (t) {
        case Type::b8: case Type::u8: case Type::s8: case Type::e4m3: case Type::e5m2: case Type::ue8m0: case Type::e2m3: case Type::e3m2: return 8;
        case Type::b16: case Type::u16: case Type::s16: case Type::f16: case Type::bf16: return 16;
        case Type::b64: case Type::u64: case Type::s64: case Type::f64: case Type::f32x2: return 64;
        case Type::b128: return 128;
        case Type::e2m1: return 4;
        case Type::pred: return 1;
        default: return 32;
    }
}

uint64_t read(const uint32_t* row, int lane, uint8_t bits) { return bits == 64 ? get<uint64_t>(row, lane) : row[lane]; }

void write(uint32_t* row, int lane, uint8_t bits, uint64_t v) {
    if (bits == 64) put<uint64_t>(row, lane, v);
    else if (bits == 16) row[lane] = uint32_t(v & 0xFFFF);
    else row[lane] = uint32_t(v);
}

using Cvt = mod::Convert;

double float_value(Type t, uint64_t bits) {
    switch (t) {
        case Type::f16: return f16_to_float(uint16_t(bits));
        case Type::bf16: return bf16_to_float(uint16_t(bits));
        case Type::f64: return bits_to_double(bits);
        case Type::e4m3: return e4m3_to_float(uint8_t(bits));
        case Type::e5m2: return e5m2_to_float(uint8_t(bits));
        case Type::e2m1: return e2m1_to_float(uint8_t(bits));
        case Type::e2m3: return e2m3_to_float(uint8_t(bits));
        case Type::e3m2: return e3m2_to_float(uint8_t(bits));
        case Type::ue8m0: return ue8m0_to_float(uint8_t(bits));
        default: return bits_to_float(uint32_t(bits));
    }
}

uint64_t encode_value(Type t, double v, const Cvt& c) {
    if (c.relu && !(v > 0) && v == v) v = 0;
    if (c.sat) v = v > 0 ? (v < 1 ? v : 1.0) : 0.0;
    const bool narrow = t != Type::f32 && t != Type::f64;
    const float f = t == Type::f32 ? canonical(round_float(v, int(c.rounding))) : narrow ? odd_float(v) : 0.0f;
    switch (t) {
        case Type::f32: return float_to_bits(c.ftz ? flush(f) : f);
        case Type::f64: return double_to_bits(v);
        case Type::f16: return float_to_f16(f, c.rounding, c.satfinite);
        case Type::bf16: return float_to_bf16(f, c.rounding, c.satfinite);
        case Type::tf32: return float_to_tf32(f, c.rounding, c.satfinite);
        case Type::e4m3: return float_to_e4m3(f);
        case Type::e5m2: return float_to_e5m2(f);
        case Type::e2m1: return float_to_e2m1(f);
        case Type::e2m3: return float_to_e2m3(f);
        case Type::e3m2: return float_to_e3m2(f);
        default: return float_to_ue8m0(f, c.rounding, c.satfinite);
    }
}

// Converts an integer to binary32 or binary64 with correct rounding: long double holds every 64-bit integer exactly.
uint64_t integer_to_float(Type t, uint64_t bits, bool negative, const Cvt& c) {
    const long double v = negative ? -(long double)(0 - bits) : (long double)bits;
    double near = double(v);
    const long double error = v - (long double)near;
    if (t == Type::f64) {
        if (error == 0 || c.rounding == Round::NearestEven) return double_to_bits(near);
        const bool above = error < 0;
        const bool up = c.rounding == Round::Up || (c.rounding == Round::Zero && v < 0);
        if (above && !up) near = std::nextafter(near, -INFINITY);
        if (!above && up) near = std::nextafter(near, INFINITY);
        return double_to_bits(near);
    }
    return encode_value(t, round_to_odd(near, double(error)), c);
}

template <class I>
uint64_t to_integer(double v, const Cvt& c) { return uint64_t(int64_t(round_integer<I>(v, int(c.rounding)))); }

uint64_t float_to_integer(Type t, double v, const Cvt& c) {
    switch (t) {
        case Type::u8: return to_integer<uint8_t>(v, c);
        case Type::s8: return to_integer<int8_t>(v, c);
        case Type::u16: return to_integer<uint16_t>(v, c);
        case Type::s16: return to_integer<int16_t>(v, c);
        case Type::u32: return to_integer<uint32_t>(v, c);
        case Type::s32: return to_integer<int32_t>(v, c);
        case Type::u64: return round_integer<uint64_t>(v, int(c.rounding));
        default: return to_integer<int64_t>(v, c);
    }
}

uint64_t extend(uint64_t v, int bits, bool sign) {
    if (bits >= 64) return v;
    v &= (uint64_t(1) << bits) - 1;
    return sign && (v >> (bits - 1) & 1) ? v | ~((uint64_t(1) << bits) - 1) : v;
}

uint64_t saturate_integer(uint64_t v, bool source_signed, int bits, bool target_signed) {
    const __int128 value = source_signed ? __int128(int64_t(v)) : __int128(v);
    const __int128 low = target_signed ? -(__int128(1) << (bits - 1)) : 0;
    const __int128 high = (__int128(1) << (target_signed ? bits - 1 : bits)) - 1;
    return uint64_t(value < low ? low : value > high ? high : value);
}

uint64_t convert_value(const Instr& in, uint64_t source, const Cvt& c) {
    const Type from = in.type2, to = in.type;
    const int from_bits = bits_of(from), to_bits = bits_of(to);
    if (is_float(from)) {
        double v = float_value(from, source);
        if (c.ftz && from == Type::f32) v = flush(float(v));
        if (!is_float(to)) return float_to_integer(to, v, c);
        if (c.integral) {   // .rni, .rzi and the like round to an integral floating-point value
            switch (c.rounding) {
                case Round::Zero: v = std::trunc(v); break;
                case Round::Down: v = std::floor(v); break;
                case Round::Up: v = std::ceil(v); break;
                default: v = std::nearbyint(v);
            }
            Cvt exact = c;
            exact.rounding = Round::NearestEven;
            return encode_value(to, v, exact);
        }
        return encode_value(to, v, c);
    }
    const uint64_t v = extend(source, from_bits, is_signed(from));
    if (is_float(to)) return integer_to_float(to, v, is_signed(from) && int64_t(v) < 0, c);
    if (c.sat) return saturate_integer(v, is_signed(from), to_bits, is_signed(to));
    return extend(v, to_bits, is_signed(to));
}

void pack(Exec& x) {
    const uint32_t n = x.sources();
    const int part = bits_of(x.in.type) / int(n);
    uint32_t* d = x.dst();
    uint32_t valid = ~0u;
    for (uint32_t i = 0; i < n; ++i) valid &= x.valid(i);
    if (part == 32 && n == 2) {
        const uint32_t *low = x.src(0), *high = x.src(1);
        if (x.mask == ~0u) {
            uint32_t pairs[64];
            for (int l = 0; l < 32; ++l) pairs[2 * l] = low[l], pairs[2 * l + 1] = high[l];
            std::memcpy(d, pairs, sizeof pairs);
        } else for_lanes(x.mask, [&](int l) { put<uint64_t>(d, l, low[l] | uint64_t(high[l]) << 32); });
    } else if (part == 64) {
        for_lanes(x.mask, [&](int l) {
            for (uint32_t i = 0; i < 2; ++i) put<uint64_t>(d + 64 * i, l, get<uint64_t>(x.src(i), l));
        });
    } else if (bits_of(x.in.type) == 128) {
        for_lanes(x.mask, [&](int l) {
            for (uint32_t i = 0; i < 2; ++i) put<uint64_t>(d + 64 * i, l, x.src(2 * i)[l] | uint64_t(x.src(2 * i + 1)[l]) << 32);
        });
    } else {
        const uint64_t low = part == 64 ? ~0ull : (uint64_t(1) << part) - 1;
        for_lanes(x.mask, [&](int l) {
            uint64_t v = 0;
            for (uint32_t i = 0; i < n; ++i) v |= (uint64_t(x.src(i)[l]) & low) << (part * i);
            write(d, l, x.op(0).bits, v);
        });
    }
    x.set_valid(0, valid);
}

void unpack(Exec& x) {
    const int total = bits_of(x.in.type);
    const int part = total / x.in.ndst;
    const uint32_t* s = x.src(0);
    const bool halves = total == 64 && part == 32;
    uint32_t pairs[64];
    if (halves) std::memcpy(pairs, s, sizeof pairs);
    for (uint32_t i = 0; i < x.in.ndst; ++i) {
        if (!x.has_dst(i)) continue;
        uint32_t* d = x.dst(i);
        const uint8_t bits = x.op(i).bits;
        if (halves) {
            for_lanes(x.mask, [&](int l) { d[l] = pairs[2 * l + i]; });
        } else for_lanes(x.mask, [&](int l) {
            if (total == 128) {
                const uint64_t v = get<uint64_t>(s + 64 * (i * part / 64), l);
                write(d, l, bits, part == 64 ? v : v >> (32 * (i & 1)) & 0xFFFFFFFFu);
            } else {
                const uint64_t v = total == 64 ? get<uint64_t>(s, l) : s[l];
                write(d, l, bits, v >> (part * i) & ((uint64_t(1) << part) - 1));
            }
        });
        x.set_valid(i, x.valid(0));
    }
}

// float_to_bf16 with rounding to nearest even, without a branch.
uint32_t nearest_bf16(uint32_t bits) {
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFF : rounded;
}

void pack_converted(Exec& x) {
    // cvt.f16x2.f32 d, a, b puts a into the upper half.
    const Cvt& c = x.in.as<mod::Convert>();
    const int bits = bits_of(x.in.type);
    const uint32_t n = x.sources();
    const Type from = x.in.type2, to = x.in.type;
    if (from == Type::f32 && n == 2 && (to == Type::bf16 || to == Type::f16) && !(c.relu || c.sat || c.ftz || c.satfinite)) {
        const uint32_t *high = x.src(0), *low = x.src(1);
        if (to == Type::bf16 && c.rounding == Round::NearestEven && x.mask == ~0u) {
            uint32_t r[32];
            for (int l = 0; l < 32; ++l) r[l] = nearest_bf16(low[l]) | nearest_bf16(high[l]) << 16;
            std::memcpy(x.dst(), r, sizeof r);
            return;
        }
        const auto narrow = [&](float v) { return uint32_t(to == Type::bf16 ? float_to_bf16(v, c.rounding, false) : float_to_f16(v, c.rounding, false)); };
        for_lanes(x.mask, [&](int l) { x.dst()[l] = narrow(get<float>(low, l)) | narrow(get<float>(high, l)) << 16; });
        return;
    }
    for_lanes(x.mask, [&](int l) {
        uint64_t r = 0;
        for (uint32_t i = 0; i < n; ++i) {
            double v = float_value(from, x.src(i)[l]);
            if (c.ftz) v = flush(float(v));
            r |= (encode_value(x.in.type, v, c) & ((1u << bits) - 1)) << (bits * (n - 1 - i));
        }
        write(x.dst(), l, x.op(0).bits, r);
    });
}

void unpack_converted(Exec& x) {
    const Cvt& c = x.in.as<mod::Convert>();
    const int from = bits_of(x.in.type2), to = bits_of(x.in.type);
    for_lanes(x.mask, [&](int l) {
        uint64_t r = 0;
        for (int i = 0; i < 2; ++i) {
            const double v = float_value(x.in.type2, x.src(0)[l] >> (from * i) & ((uint64_t(1) << from) - 1));
            r |= (encode_value(x.in.type, v, c) & ((uint64_t(1) << to) - 1)) << (to * i);
        }
        write(x.dst(), l, x.op(0).bits, r);
    });
}

void pack_integers(Exec& x) {
    const int bits = x.in.as<mod::PackIntegers>().bits;
    const bool from_signed = is_signed(x.in.type2), to_signed = is_signed(x.in.type);
    for_lanes(x.mask, [&](int l) {
        const uint64_t low = bits == 64 ? ~0ull : (uint64_t(1) << bits) - 1;
        uint64_t r = 0;
        for (int i = 0; i < 2; ++i) {
            const uint64_t v = extend(x.src(1 - i)[l], 32, from_signed);
            r |= (saturate_integer(v, from_signed, bits, to_signed) & low) << (bits * i);
        }
        if (x.sources() == 3) r |= uint64_t(x.src(2)[l]) << (2 * bits);
        x.dst()[l] = uint32_t(r);
    });
}

void move(Exec& x) {
    const int bits = bits_of(x.in.type);
    if (bits == 1) {
        *x.dst() = (*x.dst() & ~x.mask) | (x.pred(0) & x.mask);
    } else if (bits == 128) {
        for_lanes(x.mask, [&](int l) {
            for (int i = 0; i < 2; ++i) put<uint64_t>(x.dst() + 64 * i, l, get<uint64_t>(x.src(0) + 64 * i, l));
        });
    } else {
        const uint8_t from = x.source(0).bits == 64 ? 64 : 32, to = x.op(0).bits;
        if (x.mask == ~0u && from == to) std::memmove(x.dst(), x.src(0), size_t(from) * 4);
        else for_lanes(x.mask, [&](int l) { write(x.dst(), l, to, read(x.src(0), l, from)); });
    }
}

}  // namespace

bool Engine::convert(Exec& x) {
    switch (x.in.op) {
        case Op::mov: move(x); x.set_valid(0, x.valid(0)); return true;
        case Op::pack: pack(x); return true;
        case Op::unpack: unpack(x); return true;
        case Op::cvt: {
            const Cvt& c = x.in.as<mod::Convert>();
            const uint8_t from = x.source(0).bits == 64 ? 64 : 32, to = x.op(0).bits;
            const int type_bits = bits_of(x.in.type);
            const bool keep_sign = is_signed(x.in.type) || is_float(x.in.type);
            for_lanes(x.mask, [&](int l) {
                uint64_t v = convert_value(x.in, read(x.src(0), l, from), c);
                if (!keep_sign && type_bits < 64) v &= (uint64_t(1) << type_bits) - 1;
                write(x.dst(), l, to, v);
            });
            return true;
        }
        case Op::cvt_pack: pack_converted(x); return true;
        case Op::cvt_unpack: unpack_converted(x); return true;
        case Op::cvt_pack_int: pack_integers(x); return true;
        case Op::to_generic: case Op::from_generic: {
            const Space space = x.in.as<mod::Window>().space;
            const uint64_t base = space == Space::Shared ? kSharedBase : space == Space::Local ? kLocalBase : space == Space::Param ? kParamBase : 0;
            const uint8_t from = x.source(0).bits == 64 ? 64 : 32, to = x.op(0).bits;
            for_lanes(x.mask, [&](int l) {
                const uint64_t v = read(x.src(0), l, from);
                write(x.dst(), l, to, x.in.op == Op::to_generic ? v | base : base == kSharedBase ? v & ~kWindowMask : v);
            });
            return true;
        }
        case Op::isspacep: {
            uint32_t r = 0;
            for_lanes(x.mask, [&](int l) {
                const uint64_t a = x.value(0, l), window = a & kWindowMask;
                bool in = false;
                switch (x.in.as<mod::Window>().space) {
                    case Space::Shared: in = window == kSharedBase && (a >> kRankShift & 0xFF) == x.w.cta->rank; break;
                    case Space::SharedCluster: in = window == kSharedBase; break;
                    case Space::Local: in = window == kLocalBase; break;
                    case Space::Param: in = window == kParamBase; break;
                    case Space::Global: in = window == 0; break;
                    default: break;
                }
                r |= uint32_t(in) << l;
            });
            *x.dst() = (*x.dst() & ~x.mask) | r;
            return true;
        }
        default: return false;
    }
}

}  // namespace warpcheck
