// Execution of floating-point instructions. PTX ISA 9.7.3 - 9.7.5.
#include <cfenv>

#include "engine.hpp"
#include "lanes.hpp"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define WARPCHECK_FMA __attribute__((target("avx2,fma")))
#endif

namespace warpcheck {
namespace {

struct Mode : mod::Float {
    int rounding;       // a rounding mode of numerics.hpp
    explicit Mode(const mod::Float& f) : mod::Float(f), rounding(int(f.rounding)) {}
};

float finish(float r, const Mode& m) {
    if (m.ftz) r = flush(r);
    if (m.sat) return saturate(r);
    if (m.relu) return r != r ? r : r > 0 ? r : 0.0f;
    return r;
}

// Applies .ftz and .sat. PTX flushes by the result with an unbounded exponent: a result below the least normal number
// is flushed even if it rounds up to it.
float finish(float r, double exact, const Mode& m) {
    constexpr float least = std::numeric_limits<float>::min();
    if (m.ftz && std::fabs(r) == least && std::fabs(round_float(exact * 0x1p64, m.rounding)) < least * 0x1p64f) r = std::copysign(0.0f, r);
    return finish(r, m);
}

// Sign of an exact zero sum: -0 when rounding down, unless both terms are +0.
double signed_zero(double sum, double a, double b, int rounding) {
    if (sum != 0 || rounding != int(Round::Down)) return sum;
    return std::signbit(a) || std::signbit(b) ? -0.0 : 0.0;
}

float binary32(Op op, float a, float b, const Mode& m) {
    if (m.ftz) a = flush(a), b = flush(b);
    if (m.rounding == 0) {
        switch (op) {
            case Op::fadd: return finish(canonical(a + b), m);
            case Op::fsub: return finish(canonical(a - b), m);
            case Op::fmul: return finish(canonical(a * b), double(a) * double(b), m);
            case Op::fdiv: return finish(canonical(a / b), m);
            default: break;
        }
    }
    double exact;
    switch (op) {
        case Op::fadd: exact = add_odd(a, b); break;
        case Op::fsub: exact = add_odd(a, -double(b)); break;
        case Op::fmul: exact = double(a) * double(b); break;
        default: {      // an inexact binary64 quotient is never halfway between two binary32 values
            const double q = double(a) / double(b);
            exact = std::isfinite(b) && std::isfinite(q) ? round_to_odd(q, -std::fma(q, double(b), -double(a)) * (b > 0 ? 1 : -1)) : q;
        }
    }
    if (op == Op::fadd || op == Op::fsub) exact = signed_zero(exact, a, op == Op::fsub ? -double(b) : double(b), m.rounding);
    return finish(canonical(round_float(exact, m.rounding)), exact, m);
}

float fused32(float a, float b, float c, const Mode& m) {
    if (m.ftz) a = flush(a), b = flush(b), c = flush(c);
    const double exact = signed_zero(fma_odd(a, b, c), double(a) * double(b), c, m.rounding);
    return finish(canonical(round_float(exact, m.rounding)), exact, m);
}

#ifdef WARPCHECK_FMA
bool has_fma() {
    static const bool yes = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
    return yes;
}

template <int Count>
WARPCHECK_FMA void fma_row(const float* a, const float* b, const float* c, float* r) {
    for (int i = 0; i < Count; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
}
#endif

// Vectorised add, mul and fma on rows of `Count` binary32 numbers. Returns false for modes other than round to nearest
// without flushing.
template <int Count>
bool plain_rows(Exec& x, const Mode& m) {
    if (m.rounding || m.ftz || m.sat || m.relu || x.mask != ~0u) return false;
    float v[3][Count], r[Count];
    for (uint32_t i = 0; i < x.sources(); ++i) std::memcpy(v[i], x.src(i), sizeof r);
    switch (x.in.op) {
        case Op::fadd: for (int i = 0; i < Count; ++i) r[i] = v[0][i] + v[1][i]; break;
        case Op::fsub: for (int i = 0; i < Count; ++i) r[i] = v[0][i] - v[1][i]; break;
        case Op::fmul: for (int i = 0; i < Count; ++i) r[i] = v[0][i] * v[1][i]; break;
#ifdef WARPCHECK_FMA
        case Op::ffma:
            if (!has_fma()) return false;
            fma_row<Count>(v[0], v[1], v[2], r);
            break;
#endif
        default: return false;
    }
    for (int i = 0; i < Count; ++i) r[i] = canonical(r[i]);
    std::memcpy(x.dst(), r, sizeof r);
    return true;
}

// extreme() and canonical() of binary32 numbers, in bits and without branches.
template <bool min, bool nan>
uint32_t extreme_bits(uint32_t a, uint32_t b) {
    const float x = bits_to_float(a), y = bits_to_float(b);
    const bool a_nan = x != x, b_nan = y != y;
    uint32_t r = (min ? x < y : x > y) ? a : b;
    r = x == y ? (min ? a | b : a & b) : r;
    r = b_nan ? a : r;
    r = a_nan ? b : r;
    return (nan ? a_nan | b_nan : a_nan & b_nan) ? 0x7FFFFFFFu : r;
}

// Vectorised min and max of rows of binary32 numbers. Returns false for modes that it does not have.
template <bool min, bool nan>
bool extreme_rows(Exec& x, const Mode& m) {
    if (m.ftz || m.xorsign || x.mask != ~0u) return false;
    uint32_t r[32], v[32];
    std::memcpy(r, x.src(0), sizeof r);
    for (uint32_t i = 1; i < x.sources(); ++i) {
        std::memcpy(v, x.src(i), sizeof v);
        for (int l = 0; l < 32; ++l) r[l] = extreme_bits<min, nan>(r[l], v[l]);
    }
    std::memcpy(x.dst(), r, sizeof r);
    return true;
}

bool extreme_rows(Exec& x, const Mode& m) {
    if (x.in.op == Op::fmin) return m.nan ? extreme_rows<true, true>(x, m) : extreme_rows<true, false>(x, m);
    return m.nan ? extreme_rows<false, true>(x, m) : extreme_rows<false, false>(x, m);
}

// Vectorised add and sub of rows of `Count` binary32 numbers, rounded down. The error of a sum that is rounded to
// nearest is itself such a number. Returns false for other modes, and for sums that are not finite.
template <int Count>
bool sums_down(Exec& x, const Mode& m) {
    const bool plain = m.rounding == int(Round::Down) && !m.ftz && !m.sat && !m.relu && x.mask == ~0u;
    if (!plain || (x.in.op != Op::fadd && x.in.op != Op::fsub)) return false;
    float a[Count], b[Count];
    uint32_t r[Count], outside = 0;
    std::memcpy(a, x.src(0), sizeof a);
    std::memcpy(b, x.src(1), sizeof b);
    for (int i = 0; x.in.op == Op::fsub && i < Count; ++i) b[i] = -b[i];
    for (int i = 0; i < Count; ++i) {
        const float sum = a[i] + b[i], part = sum - a[i], error = (a[i] - (sum - part)) + (b[i] - part);
        const uint32_t bits = float_to_bits(sum), zero = (float_to_bits(a[i]) | float_to_bits(b[i])) & 0x80000000u;
        const uint32_t below = bits + (sum > 0 ? ~0u : 1u);
        outside |= (bits & 0x7F800000u) == 0x7F800000u;
        r[i] = sum == 0 ? zero : error < 0 ? below : bits;
    }
    if (outside) return false;
    std::memcpy(x.dst(), r, sizeof r);
    return true;
}

float unary32(Op op, float a, const Mode& m) {
    if (m.ftz) a = flush(a);
    float r;
    switch (op) {
        case Op::rcp: r = m.rounding ? round_float(1.0 / double(a), m.rounding) : 1.0f / a; break;
        case Op::sqrt: r = m.rounding ? round_float(std::sqrt(double(a)), m.rounding) : std::sqrt(a); break;
        case Op::rsqrt: r = float(1.0 / std::sqrt(double(a))); break;
        case Op::sin: r = std::sin(a); break;
        case Op::cos: r = std::cos(a); break;
        case Op::lg2: r = float(std::log2(double(a))); break;
        case Op::ex2: r = float(std::exp2(double(a))); break;
        case Op::tanh: r = std::tanh(a); break;
        case Op::fabs: r = std::fabs(a); return m.ftz ? flush(r) : r;
        default: return -a;
    }
    return finish(canonical(r), m);
}

template <class T>
T extreme(Op op, T a, T b, const Mode& m) {
    const bool negative = std::signbit(a) != std::signbit(b);
    if (m.xorsign) a = std::fabs(a), b = std::fabs(b);
    T r = op == Op::fmin ? min_number(a, b, m.nan) : max_number(a, b, m.nan);
    return m.xorsign ? std::copysign(r, negative ? T(-1) : T(1)) : r;
}

// 16-bit formats: the operands are exact in binary64, and the result is rounded once.
struct Half {
    bool bf16;
    float decode(uint32_t bits) const { return bf16 ? bf16_to_float(uint16_t(bits)) : f16_to_float(uint16_t(bits)); }
    uint32_t encode(double v, const Mode& m) const {
        float f = odd_float(v);
        if (m.sat) f = saturate(f);
        if (m.relu && f < 0) f = 0;
        uint32_t bits = bf16 ? float_to_bf16(f, Round(m.rounding)) : float_to_f16(f, Round(m.rounding));
        if (m.ftz && !bf16 && (bits & 0x7C00) == 0) bits &= 0x8000;
        return bits;
    }
    uint32_t flushed(uint32_t bits, const Mode& m) const { return m.ftz && !bf16 && (bits & 0x7C00) == 0 ? bits & 0x8000 : bits; }
};

uint32_t half_op(Op op, uint32_t a, uint32_t b, uint32_t c, const Half& h, const Mode& m) {
    a = h.flushed(a & 0xFFFF, m), b = h.flushed(b & 0xFFFF, m), c = h.flushed(c & 0xFFFF, m);
    const float x = h.decode(a), y = h.decode(b), z = h.decode(c);
    const uint32_t nan = 0x7FFF;
    switch (op) {
        case Op::fabs: return a & 0x7FFF;
        case Op::fneg: return a ^ 0x8000;
        case Op::copysign: return (b & 0x7FFF) | (a & 0x8000);
        case Op::fadd: return h.encode(double(x) + y, m);
        case Op::fsub: return h.encode(double(x) - y, m);
        case Op::fmul: return h.encode(double(x) * y, m);
        case Op::ffma: return h.encode(add_odd(double(x) * y, z), m);
        case Op::ex2: return h.encode(std::exp2(double(x)), m);
        case Op::tanh: return h.encode(std::tanh(double(x)), m);
        default: {
            const float r = extreme(op, x, y, m);
            return r != r ? nan : h.encode(r, m);
        }
    }
}

// f64 with directed rounding uses the host's rounding mode. The operands are volatile, so that the compiler does not
// move the arithmetic out of it.
double directed64(Op op, double a, double b, double c, int rounding) {
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    const int old = std::fegetround();
    std::fesetround(modes[rounding & 3]);
    volatile double p = a, q = b, s = c, r = 0;
    switch (op) {
        case Op::fadd: r = p + q; break;
        case Op::fsub: r = p - q; break;
        case Op::fmul: r = p * q; break;
        case Op::fdiv: r = p / q; break;
        case Op::ffma: r = std::fma(p, q, s); break;
        case Op::rcp: r = 1.0 / p; break;
        case Op::sqrt: r = std::sqrt(p); break;
        default: break;
    }
    std::fesetround(old);
    return r;
}

double op64(Op op, double a, double b, double c, const Mode& m) {
    switch (op) {
        case Op::fabs: return std::fabs(a);
        case Op::fneg: return -a;
        case Op::copysign: return std::copysign(b, a);
        case Op::fmin: case Op::fmax: return extreme(op, a, b, m);
        case Op::rsqrt: return 1.0 / std::sqrt(a);
        default: return directed64(op, a, b, c, m.rounding);
    }
}

bool test_property(FloatProperty property, double v, double least_normal) {
    switch (property) {
        case FloatProperty::Finite: return std::isfinite(v);
        case FloatProperty::Infinite: return std::isinf(v);
        case FloatProperty::Number: return !std::isnan(v);
        case FloatProperty::NotANumber: return std::isnan(v);
        case FloatProperty::Normal: return std::isfinite(v) && std::fabs(v) >= least_normal;
        default: return v != 0 && std::fabs(v) < least_normal;
    }
}

}  // namespace

bool Engine::alu_float(Exec& x) {
    const Op op = x.in.op;
    if (op < Op::fadd || op > Op::testp) return false;
    const Type type = x.in.type;
    const uint32_t n = x.sources();
    if (op == Op::testp) {
        uint32_t r = 0;
        for_lanes(x.mask, [&](int l) {
            const bool wide = type == Type::f64;
            const double v = wide ? get<double>(x.src(0), l) : get<float>(x.src(0), l);
            r |= uint32_t(test_property(x.in.as<mod::Test>().property, v, wide ? 2.2250738585072014e-308 : 1.17549435e-38)) << l;
        });
        *x.dst() = (*x.dst() & ~x.mask) | r;
        return true;
    }
    const Mode m(x.in.as<mod::Float>());
    if (type == Type::f32 ? plain_rows<32>(x, m) || sums_down<32>(x, m) : type == Type::f32x2 && (plain_rows<64>(x, m) || sums_down<64>(x, m)))
        return true;
    if (type == Type::f32 && (op == Op::fmin || op == Op::fmax) && extreme_rows(x, m)) return true;
    switch (type) {
        case Type::f32:
            switch (op) {
                case Op::ffma: map3<float>(x, [&](float a, float b, float c) { return fused32(a, b, c, m); }); return true;
                case Op::copysign: map2<float>(x, [](float a, float b) { return std::copysign(b, a); }); return true;
                case Op::fmin: case Op::fmax:
                    if (n == 3)
                        map3<float>(x, [&](float a, float b, float c) {
                            if (m.ftz) a = flush(a), b = flush(b), c = flush(c);
                            return canonical(extreme(op, extreme(op, a, b, m), c, m));
                        });
                    else
                        map2<float>(x, [&](float a, float b) {
                            if (m.ftz) a = flush(a), b = flush(b);
                            return canonical(extreme(op, a, b, m));
                        });
                    return true;
                case Op::fadd: case Op::fsub: case Op::fmul: case Op::fdiv:
                    map2<float>(x, [&](float a, float b) { return binary32(op, a, b, m); });
                    return true;
                default: map1<float>(x, [&](float a) { return unary32(op, a, m); }); return true;
            }
        case Type::f32x2:
            for_lanes(x.mask, [&](int l) {
                for (int h = 0; h < 2; ++h) {
                    float v[3] = {};
                    for (uint32_t i = 0; i < n; ++i) std::memcpy(&v[i], x.src(i) + 2 * l + h, 4);
                    const float r = op == Op::ffma ? fused32(v[0], v[1], v[2], m) : binary32(op, v[0], v[1], m);
                    std::memcpy(x.dst() + 2 * l + h, &r, 4);
                }
            });
            return true;
        case Type::f64:
            for_lanes(x.mask, [&](int l) {
                double v[3] = {};
                for (uint32_t i = 0; i < n; ++i) v[i] = get<double>(x.src(i), l);
                put<double>(x.dst(), l, op64(op, v[0], v[1], v[2], m));
            });
            return true;
        case Type::f16: case Type::bf16: case Type::f16x2: case Type::bf16x2: {
            const Half h{type == Type::bf16 || type == Type::bf16x2};
            const bool packed = type == Type::f16x2 || type == Type::bf16x2;
            for_lanes(x.mask, [&](int l) {
                uint32_t v[3] = {};
                for (uint32_t i = 0; i < n; ++i) v[i] = x.src(i)[l];
                uint32_t r = half_op(op, v[0], v[1], v[2], h, m);
                if (n == 3 && (op == Op::fmin || op == Op::fmax)) r = half_op(op, r, v[2], 0, h, m);
                if (packed) {
                    uint32_t high = half_op(op, v[0] >> 16, v[1] >> 16, v[2] >> 16, h, m);
                    if (n == 3 && (op == Op::fmin || op == Op::fmax)) high = half_op(op, high, v[2] >> 16, 0, h, m);
                    r |= high << 16;
                }
                x.dst()[l] = r;
            });
            return true;
        }
        default: return false;
    }
}

}  // namespace warpcheck
