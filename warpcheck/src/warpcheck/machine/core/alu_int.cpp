// Execution of integer, logic and bit instructions, comparisons and selections. PTX ISA 9.7.1, 9.7.2, 9.7.6, 9.7.8.
#include <type_traits>

#include "engine.hpp"
#include "lanes.hpp"

namespace warpcheck {
namespace {

template <class T> struct Wider { using type = T; };
template <> struct Wider<uint16_t> { using type = uint32_t; };
template <> struct Wider<int16_t> { using type = int32_t; };
template <> struct Wider<uint32_t> { using type = uint64_t; };
template <> struct Wider<int32_t> { using type = int64_t; };
template <> struct Wider<uint64_t> { using type = unsigned __int128; };
template <> struct Wider<int64_t> { using type = __int128; };
template <class T> using Wide = typename Wider<T>::type;
template <class T> using Un = std::make_unsigned_t<T>;

template <class T>
T clamp_add(Wide<T> v, bool sat) {
    if (!sat) return T(v);
    constexpr Wide<T> low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
    return T(v < low ? low : v > high ? high : v);
}

template <class T>
bool integer(Exec& x) {
    using U = Un<T>;
    constexpr int bits = sizeof(T) * 8;
    const mod::Integer& m = x.in.as<mod::Integer>();
    switch (x.in.op) {
        case Op::add:
            if (m.sat) map2<T>(x, [](T a, T b) { return clamp_add<T>(Wide<T>(a) + b, true); });
            else map2<T>(x, [](T a, T b) { return T(U(a) + U(b)); });
            return true;
        case Op::sub:
            if (m.sat) map2<T>(x, [](T a, T b) { return clamp_add<T>(Wide<T>(a) - b, true); });
            else map2<T>(x, [](T a, T b) { return T(U(a) - U(b)); });
            return true;
        case Op::mul_lo: map2<T>(x, [](T a, T b) { return T(Wide<T>(a) * Wide<T>(b)); }); return true;
        case Op::mul_hi: map2<T>(x, [](T a, T b) { return T((Wide<T>(a) * Wide<T>(b)) >> bits); }); return true;
        case Op::mad_lo: map3<T>(x, [](T a, T b, T c) { return T(Wide<T>(a) * Wide<T>(b) + Wide<T>(c)); }); return true;
        case Op::mad_hi:
            map3<T>(x, [&m](T a, T b, T c) { return clamp_add<T>(Wide<T>(T((Wide<T>(a) * Wide<T>(b)) >> bits)) + c, m.sat); });
            return true;
        case Op::sad: map3<T>(x, [](T a, T b, T c) { return T(U(c) + (a < b ? U(b) - U(a) : U(a) - U(b))); }); return true;
        case Op::div: map2<T>(x, [](T a, T b) { return b == 0 ? T(-1) : b == T(-1) && std::is_signed<T>::value ? T(U(0) - U(a)) : T(a / b); }); return true;
        case Op::rem: map2<T>(x, [](T a, T b) { return b == 0 ? a : b == T(-1) && std::is_signed<T>::value ? T(0) : T(a % b); }); return true;
        case Op::abs: map1<T>(x, [](T a) { return a < 0 ? T(U(0) - U(a)) : a; }); return true;
        case Op::neg: map1<T>(x, [](T a) { return T(U(0) - U(a)); }); return true;
        case Op::min: map2<T>(x, [&m](T a, T b) { T r = a < b ? a : b; return m.relu && r < 0 ? T(0) : r; }); return true;
        case Op::max: map2<T>(x, [&m](T a, T b) { T r = a < b ? b : a; return m.relu && r < 0 ? T(0) : r; }); return true;
        case Op::and_: map2<T>(x, [](T a, T b) { return T(a & b); }); return true;
        case Op::or_: map2<T>(x, [](T a, T b) { return T(a | b); }); return true;
        case Op::xor_: map2<T>(x, [](T a, T b) { return T(a ^ b); }); return true;
        case Op::not_: map1<T>(x, [](T a) { return T(~a); }); return true;
        case Op::cnot: map1<T>(x, [](T a) { return T(a == 0); }); return true;
        case Op::shl: map2<T, uint32_t>(x, [](T a, uint32_t b) { return b >= bits ? T(0) : T(U(a) << b); }); return true;
        case Op::shr:
            map2<T, uint32_t>(x, [](T a, uint32_t b) { return b >= bits ? T(a < 0 ? -1 : 0) : T(a >> b); });
            return true;
        case Op::popc: map1<T, uint32_t>(x, [](T a) { return uint32_t(__builtin_popcountll(U(a))); }); return true;
        case Op::clz:
            map1<T, uint32_t>(x, [](T a) { return a == 0 ? uint32_t(bits) : uint32_t(__builtin_clzll(U(a)) - (64 - bits)); });
            return true;
        case Op::bfind:
            map1<T, uint32_t>(x, [&m](T a) {
                const U v = std::is_signed<T>::value && a < 0 ? U(~a) : U(a);
                if (v == 0) return ~0u;
                const uint32_t msb = 63 - __builtin_clzll(v);
                return m.shiftamt ? uint32_t(bits - 1) - msb : msb;
            });
            return true;
        case Op::brev:
            map1<T>(x, [](T a) { U r = 0; for (int i = 0; i < bits; ++i) r |= U((U(a) >> i) & 1) << (bits - 1 - i); return T(r); });
            return true;
        case Op::bfe:
            map3<T, uint32_t, uint32_t, T>(x, [](T a, uint32_t p, uint32_t l) {
                const uint32_t pos = p & 0xFF, len = l & 0xFF;
                const int top = int(std::min<uint32_t>(pos + len - 1, bits - 1));
                const U sign = !std::is_signed<T>::value || len == 0 ? U(0) : U((U(a) >> top) & 1);
                U r = 0;
                for (uint32_t i = 0; i < uint32_t(bits); ++i) r |= (i < len && pos + i < uint32_t(bits) ? U((U(a) >> (pos + i)) & 1) : sign) << i;
                return T(r);
            });
            return true;
        case Op::bfi:
            for_lanes(x.mask, [&](int l) {
                const U a = get<U>(x.src(0), l);
                U r = get<U>(x.src(1), l);
                const uint32_t pos = get<uint32_t>(x.src(2), l) & 0xFF, len = get<uint32_t>(x.src(3), l) & 0xFF;
                for (uint32_t i = 0; i < len && pos + i < uint32_t(bits); ++i)
                    r = (r & ~(U(1) << (pos + i))) | (U((a >> i) & 1) << (pos + i));
                put<U>(x.dst(), l, r);
            });
            return true;
        case Op::szext:
            map2<T, uint32_t>(x, [&m](T a, uint32_t n) {
                if (m.wrap) n &= 31;
                if (n >= uint32_t(bits)) return a;
                if (n == 0) return T(0);
                const U low = U(a) & ((U(1) << n) - 1);
                return std::is_signed<T>::value && ((low >> (n - 1)) & 1) ? T(low | ~((U(1) << n) - 1)) : T(low);
            });
            return true;
        default: return false;
    }
}

template <class T>
bool widening(Exec& x) {
    using W = Wide<T>;
    switch (x.in.op) {
        case Op::mul_wide: map2<T, T, W>(x, [](T a, T b) { return W(W(a) * W(b)); }); return true;
        case Op::mad_wide: map3<T, T, W, W>(x, [](T a, T b, W c) { return W(Un<W>(W(a) * W(b)) + Un<W>(c)); }); return true;
        case Op::mul24_lo:
        case Op::mul24_hi: {
            const bool high = x.in.op == Op::mul24_hi;
            map2<T>(x, [high](T a, T b) {
                const T a24 = T(T(Un<T>(a) << 8) >> 8), b24 = T(T(Un<T>(b) << 8) >> 8);
                const W product = W(a24) * W(b24);
                return T(high ? product >> 16 : product);
            });
            return true;
        }
        default: return false;
    }
}

// add.cc, addc and the like. The carry is a predicate register.
template <class T>
void with_carry(Exec& x) {
    using U = Un<T>;
    using W = Wide<U>;
    const bool madd = x.in.op == Op::madc_lo || x.in.op == Op::madc_hi;
    const mod::Carry& m = x.in.as<mod::Carry>();
    const uint32_t carry_in = m.reads ? x.pred(madd ? 3 : 2) : 0;
    uint32_t carry_out = 0;
    constexpr int bits = sizeof(T) * 8;
    for_lanes(x.mask, [&](int l) {
        const U a = get<U>(x.src(0), l), b = get<U>(x.src(1), l);
        const W c = (carry_in >> l) & 1;
        W r;
        if (madd) {
            const W product = std::is_signed<T>::value && x.in.op == Op::madc_hi ? W(Wide<T>(T(a)) * Wide<T>(T(b))) : W(a) * W(b);
            const U part = x.in.op == Op::madc_lo ? U(product) : U(product >> bits);
            r = W(part) + get<U>(x.src(2), l) + c;
        } else {
            r = x.in.op == Op::addc ? W(a) + b + c : W(a) - b - c;
        }
        carry_out |= uint32_t((r >> bits) & 1) << l;
        put<U>(x.dst(), l, U(r));
    });
    if (m.writes) {
        uint32_t* carry = x.w.regs.data() + x.ops[1].offset;
        *carry = (*carry & ~x.mask) | carry_out;
    }
}

template <class T>
bool ordered(Comparison comparison, T a, T b) {
    switch (comparison) {
        case Comparison::Eq: case Comparison::Equ: return a == b;
        case Comparison::Ne: case Comparison::Neu: return a != b;
        case Comparison::Lt: case Comparison::Ltu: return a < b;
        case Comparison::Le: case Comparison::Leu: return a <= b;
        case Comparison::Gt: case Comparison::Gtu: return a > b;
        default: return a >= b;
    }
}

template <class T>
bool compare_float(Comparison comparison, T a, T b) {
    const bool nan = std::isnan(a) || std::isnan(b);
    if (comparison == Comparison::Num) return !nan;
    if (comparison == Comparison::Nan) return nan;
    if (nan) return comparison >= Comparison::Equ;
    return ordered(comparison, a, b);
}

template <class F>
uint32_t lanes_where(uint32_t mask, F&& f) {
    uint32_t result = 0;
    for_lanes(mask, [&](int l) { result |= uint32_t(f(l)) << l; });
    return result;
}

template <class T>
uint32_t compare_rows(const Exec& x) {
    const uint32_t *a = x.src(0), *b = x.src(1);
    const Comparison c = x.in.as<mod::Compare>().comparison;
    return lanes_where(x.mask, [&](int l) { return ordered(c, get<T>(a, l), get<T>(b, l)); });
}

float half_value(Type type, uint32_t bits) {
    return type == Type::f16 || type == Type::f16x2 ? f16_to_float(uint16_t(bits)) : bf16_to_float(uint16_t(bits));
}

uint32_t compare(const Exec& x, Type type, int half = 0) {
    const uint32_t *a = x.src(0), *b = x.src(1);
    const Comparison c = x.in.as<mod::Compare>().comparison;
    const bool ftz = x.in.as<mod::Compare>().ftz;
    switch (type) {
        case Type::u16: return compare_rows<uint16_t>(x);
        case Type::s16: return compare_rows<int16_t>(x);
        case Type::u32: return compare_rows<uint32_t>(x);
        case Type::s32: return compare_rows<int32_t>(x);
        case Type::u64: return compare_rows<uint64_t>(x);
        case Type::s64: return compare_rows<int64_t>(x);
        case Type::f32:
            return lanes_where(x.mask, [&](int l) {
                float p = get<float>(a, l), q = get<float>(b, l);
                if (ftz) p = flush(p), q = flush(q);
                return compare_float(c, p, q);
            });
        case Type::f64: return lanes_where(x.mask, [&](int l) { return compare_float(c, get<double>(a, l), get<double>(b, l)); });
        default:
            return lanes_where(x.mask, [&](int l) {
                return compare_float(c, half_value(type, a[l] >> (16 * half)), half_value(type, b[l] >> (16 * half)));
            });
    }
}

uint32_t combine(Boolean boolean, uint32_t a, uint32_t b) { return boolean == Boolean::And ? a & b : boolean == Boolean::Or ? a | b : a ^ b; }

void set_predicate(Exec& x) {
    const Boolean boolean = x.in.as<mod::Compare>().boolean;
    const bool packed = x.in.type == Type::f16x2 || x.in.type == Type::bf16x2;
    const uint32_t r = compare(x, x.in.type);
    uint32_t p = r, q = ~r;
    if (packed) q = compare(x, x.in.type, 1);
    if (boolean != Boolean::None) {
        const uint32_t c = x.pred(2);
        p = combine(boolean, p, c);
        q = combine(boolean, q, c);
    }
    if (x.has_dst(0)) *x.dst(0) = (*x.dst(0) & ~x.mask) | (p & x.mask);
    if (x.has_dst(1)) *x.dst(1) = (*x.dst(1) & ~x.mask) | (q & x.mask);
}

void set_value(Exec& x) {
    const bool packed = x.in.type2 == Type::f16x2 || x.in.type2 == Type::bf16x2;
    uint32_t r[2] = {compare(x, x.in.type2), packed ? compare(x, x.in.type2, 1) : 0};
    const Boolean boolean = x.in.as<mod::Compare>().boolean;
    if (boolean != Boolean::None)
        for (uint32_t& v : r) v = combine(boolean, v, x.pred(2));
    for_lanes(x.mask, [&](int l) {
        const bool t = (r[0] >> l) & 1, t1 = (r[1] >> l) & 1;
        uint32_t v;
        if (x.in.type == Type::f32) v = t ? 0x3F800000u : 0;
        else if (x.in.type == Type::f16x2) v = (t ? 0x3C00u : 0) | (t1 ? 0x3C000000u : 0);
        else if (x.in.type == Type::bf16x2) v = (t ? 0x3F80u : 0) | (t1 ? 0x3F800000u : 0);
        else if (x.in.type == Type::f16) v = t ? 0x3C00u : 0;
        else if (x.in.type == Type::bf16) v = t ? 0x3F80u : 0;
        else if (x.in.type == Type::u16 || x.in.type == Type::s16) v = t ? 0xFFFFu : 0;
        else if (packed) v = (t ? 0xFFFFu : 0) | (t1 ? 0xFFFF0000u : 0);
        else v = t ? ~0u : 0;
        x.dst()[l] = v;
    });
}

template <class T>
void select(Exec& x) {
    const uint32_t p = x.pred(2);
    const uint32_t *a = x.src(0), *b = x.src(1);
    uint32_t* d = x.dst();
    for_lanes(x.mask, [&](int l) { put<T>(d, l, (p >> l) & 1 ? get<T>(a, l) : get<T>(b, l)); });
    const uint32_t pv = x.valid(2);
    x.set_valid(0, pv & ((p & x.valid(0)) | (~p & x.valid(1))));
}

uint32_t permute(uint32_t a, uint32_t b, uint32_t c, Permutation mode) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    auto byte = [&](uint32_t i) { return uint32_t(bytes >> (8 * (i & 7))) & 0xFF; };
    uint32_t r = 0;
    for (uint32_t i = 0; i < 4; ++i) {
        uint32_t v = 0;
        const uint32_t s = c & 3;
        switch (mode) {
            case Permutation::Index: {
                const uint32_t selector = c >> (4 * i);
                v = byte(selector & 7);
                if (selector & 8) v = v & 0x80 ? 0xFF : 0;
                break;
            }
            case Permutation::F4e: v = byte(s + i); break;
            case Permutation::B4e: v = byte((s + 8 - i) & 7); break;
            case Permutation::Rc8: v = byte(s); break;
            case Permutation::Ecl: v = byte(std::max(i, s)); break;
            case Permutation::Ecr: v = byte(std::min(i, s)); break;
            case Permutation::Rc16: v = byte((s & 1) * 2 + (i & 1)); break;
        }
        r |= v << (8 * i);
    }
    return r;
}

void logic3(Exec& x) {
    const mod::Logic& m = x.in.as<mod::Logic>();
    const uint32_t table = uint32_t(m.table);
    uint32_t nonzero = 0;
    for_lanes(x.mask, [&](int l) {
        const uint32_t a = x.src(0)[l], b = x.src(1)[l], c = x.src(2)[l];
        uint32_t r = 0;
        for (int i = 0; i < 8; ++i)
            if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
        if (x.has_dst(0)) x.dst()[l] = r;
        nonzero |= uint32_t(r != 0) << l;
    });
    if (m.boolean != Boolean::None && x.has_dst(1)) *x.dst(1) = (*x.dst(1) & ~x.mask) | (combine(m.boolean, nonzero, x.pred(3)) & x.mask);
}

uint32_t dot(const Exec& x, uint32_t a, uint32_t b, uint32_t c) {
    const bool sa = x.in.type == Type::s32, sb = x.in.type2 == Type::s32;
    if (x.in.op == Op::dp4a) {
        for (int i = 0; i < 4; ++i) {
            const int p = sa ? int8_t(a >> (8 * i)) : uint8_t(a >> (8 * i)), q = sb ? int8_t(b >> (8 * i)) : uint8_t(b >> (8 * i));
            c += uint32_t(p * q);
        }
        return c;
    }
    for (int i = 0; i < 2; ++i) {
        const int p = sa ? int16_t(a >> (16 * i)) : uint16_t(a >> (16 * i));
        const int shift = 8 * i + (x.in.as<mod::Dot>().high ? 16 : 0);
        const int q = sb ? int8_t(b >> shift) : uint8_t(b >> shift);
        c += uint32_t(p * q);
    }
    return c;
}

void find_nth_set(Exec& x) {
    for_lanes(x.mask, [&](int l) {
        const uint32_t bits = x.src(0)[l], base = x.src(1)[l];
        const int32_t offset = int32_t(x.src(2)[l]);
        uint32_t result = ~0u;
        if (offset == 0) {
            if (base < 32 && (bits >> base & 1)) result = base;
        } else {
            int found = 0;
            const int step = offset > 0 ? 1 : -1;
            for (int pos = int(base); pos >= 0 && pos < 32 && result == ~0u; pos += step)
                if ((bits >> pos & 1) && ++found == std::abs(offset)) result = uint32_t(pos);
        }
        x.dst()[l] = result;
    });
}

}  // namespace

bool Engine::alu_int(Exec& x) {
    const Instr& in = x.in;
    switch (in.op) {
        case Op::setp: set_predicate(x); return true;
        case Op::set: set_value(x); return true;
        case Op::selp:
            in.type == Type::b64 || in.type == Type::u64 || in.type == Type::s64 || in.type == Type::f64 ? select<uint64_t>(x) : select<uint32_t>(x);
            return true;
        case Op::slct: {
            const bool wide = x.op(0).bits == 64;
            for_lanes(x.mask, [&](int l) {
                const float f = get<float>(x.src(2), l);
                const bool first = in.type2 == Type::f32 ? (in.as<mod::Select>().ftz ? flush(f) : f) >= 0 : int32_t(x.src(2)[l]) >= 0;
                if (wide) put<uint64_t>(x.dst(), l, get<uint64_t>(x.src(first ? 0 : 1), l));
                else x.dst()[l] = x.src(first ? 0 : 1)[l];
            });
            return true;
        }
        case Op::prmt: map3<uint32_t>(x, [&](uint32_t a, uint32_t b, uint32_t c) { return permute(a, b, c, in.as<mod::Permute>().mode); }); return true;
        case Op::lop3: logic3(x); return true;
        case Op::fns: find_nth_set(x); return true;
        case Op::dp4a: case Op::dp2a: map3<uint32_t>(x, [&](uint32_t a, uint32_t b, uint32_t c) { return dot(x, a, b, c); }); return true;
        case Op::bmsk:
            map2<uint32_t>(x, [&](uint32_t a, uint32_t b) {
                if (in.as<mod::Integer>().wrap) a &= 31, b &= 31;
                if (a >= 32 || b == 0) return 0u;
                return uint32_t(((b >= 32 ? ~0ull : (1ull << b) - 1)) << a);
            });
            return true;
        case Op::shf_l: case Op::shf_r:
            map3<uint32_t>(x, [&](uint32_t a, uint32_t b, uint32_t c) {
                const uint32_t n = in.as<mod::Integer>().wrap ? c & 31 : std::min(c, 32u);
                const uint64_t both = uint64_t(b) << 32 | a;
                return in.op == Op::shf_l ? uint32_t((both << n) >> 32) : uint32_t(both >> n);
            });
            return true;
        case Op::addc: case Op::subc: case Op::madc_lo: case Op::madc_hi:
            switch (in.type) {
                case Type::s64: with_carry<int64_t>(x); return true;
                case Type::u64: with_carry<uint64_t>(x); return true;
                case Type::s32: with_carry<int32_t>(x); return true;
                default: with_carry<uint32_t>(x); return true;
            }
        default: break;
    }
    if (in.type == Type::pred) {
        uint32_t r;
        switch (in.op) {
            case Op::and_: r = x.pred(0) & x.pred(1); break;
            case Op::or_: r = x.pred(0) | x.pred(1); break;
            case Op::xor_: r = x.pred(0) ^ x.pred(1); break;
            case Op::not_: r = ~x.pred(0); break;
            default: return false;
        }
        *x.dst() = (*x.dst() & ~x.mask) | (r & x.mask);
        return true;
    }
    switch (in.type) {
        case Type::u16: return integer<uint16_t>(x) || widening<uint16_t>(x);
        case Type::b16: return integer<uint16_t>(x);
        case Type::s16: return integer<int16_t>(x) || widening<int16_t>(x);
        case Type::u32: return integer<uint32_t>(x) || widening<uint32_t>(x);
        case Type::b32: return integer<uint32_t>(x);
        case Type::s32: return integer<int32_t>(x) || widening<int32_t>(x);
        case Type::b64: case Type::u64: return integer<uint64_t>(x);
        case Type::s64: return integer<int64_t>(x);
        default: return false;
    }
}

}  // namespace warpcheck
