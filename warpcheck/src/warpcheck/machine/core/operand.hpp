// Matrix operands in shared memory, tensor memory or registers, and their unpacking to float or int32.
#pragma once

#include <cstring>
#include <type_traits>

#include "enumerations.hpp"
#include "float_formats.hpp"
#include "smem_desc.hpp"

namespace warpcheck {

// Storage of an element type narrower than 8 bits.
enum class Packing : uint8_t {
    Dense,          // no gaps
    Padded16,       // shared memory, f8f6f4 kinds: 16 elements, padded to 16 bytes
    Container8,     // registers and TMEM, f8f6f4 kinds: one element per byte; 4 bits in bits 2-5, 6 bits in bits 0-5
};

constexpr uint32_t element_bits(MmaType type) {
    switch (type) {
        case MmaType::F64: return 64;
        case MmaType::TF32: case MmaType::F32: case MmaType::S32: return 32;
        case MmaType::F16: case MmaType::BF16: return 16;
        case MmaType::E4M3: case MmaType::E5M2: case MmaType::S8: case MmaType::U8: return 8;
        case MmaType::E2M3: case MmaType::E3M2: return 6;
        case MmaType::E2M1: case MmaType::S4: case MmaType::U4: return 4;
        default: return 1;
    }
}

// Exponent of the least normal number.
constexpr int least_exponent(MmaType type) {
    switch (type) {
        case MmaType::F16: case MmaType::E5M2: return -14;
        case MmaType::E4M3: return -6;
        case MmaType::E3M2: return -2;
        case MmaType::E2M3: case MmaType::E2M1: return 0;
        default: return -126;
    }
}

constexpr bool is_integer(MmaType type) {
    return type == MmaType::S8 || type == MmaType::U8 || type == MmaType::S4 || type == MmaType::U4 || type == MmaType::B1;
}

// Number of elements in a chunk of 16 bytes.
constexpr uint32_t chunk_elements(MmaType type, Packing packing) {
    return packing == Packing::Dense ? 128 / element_bits(type) : 16;
}

// Number of bytes of a chunk that hold elements.
constexpr uint32_t chunk_bytes(MmaType type, Packing packing) {
    return packing == Packing::Padded16 ? 2 * element_bits(type) : 16;
}

namespace detail {

// The `bits` bits at bit position `position` of little-endian data.
inline uint32_t bit_field(const uint8_t* data, uint32_t position, uint32_t bits) {
    uint32_t value = data[position / 8];
    if (position % 8 + bits > 8) value |= uint32_t(data[position / 8 + 1]) << 8;
    return value >> position % 8 & ((1u << bits) - 1);
}

inline float narrow_to_float(MmaType type, uint32_t code) {
    switch (type) {
        case MmaType::E4M3: return e4m3_to_float(uint8_t(code));
        case MmaType::E5M2: return e5m2_to_float(uint8_t(code));
        case MmaType::E2M3: return e2m3_to_float(uint8_t(code));
        case MmaType::E3M2: return e3m2_to_float(uint8_t(code));
        case MmaType::E2M1: return e2m1_to_float(uint8_t(code));
        default: throw UnitError(Fault::Unsupported, "matrix operand: not a floating-point type of 8 bits or less");
    }
}

// Table of the 256 codes of an 8-bit container.
struct NarrowTable {
    float value[256];
    NarrowTable(MmaType type, bool container) {
        for (uint32_t code = 0; code < 256; ++code)
            value[code] = narrow_to_float(type, container && type == MmaType::E2M1 ? code >> 2 : code);
    }
};

template <MmaType Type, bool Container>
inline const float* narrow_table() {
    static const NarrowTable table(Type, Container);
    return table.value;
}

template <bool Container>
inline const float* narrow_table(MmaType type) {
    switch (type) {
        case MmaType::E4M3: return narrow_table<MmaType::E4M3, Container>();
        case MmaType::E5M2: return narrow_table<MmaType::E5M2, Container>();
        case MmaType::E2M3: return narrow_table<MmaType::E2M3, Container>();
        case MmaType::E3M2: return narrow_table<MmaType::E3M2, Container>();
        default: return narrow_table<MmaType::E2M1, Container>();
    }
}

}  // namespace detail

// Decodes `count` consecutive elements that start at a chunk (or word) boundary.
inline void unpack_elements(MmaType type, Packing packing, const uint8_t* data, uint32_t count, float* out) {
    switch (type) {
        case MmaType::F16: case MmaType::BF16: {
            constexpr uint32_t kPiece = 8;      // a chunk; a constant count, so that compilers vectorise
            uint16_t halves[kPiece];
            for (; count >= kPiece; count -= kPiece, data += 2 * kPiece, out += kPiece) {
                std::memcpy(halves, data, sizeof halves);
                type == MmaType::F16 ? f16_to_float(halves, out, kPiece) : bf16_to_float(halves, out, kPiece);
            }
            std::memcpy(halves, data, 2 * count);
            type == MmaType::F16 ? f16_to_float(halves, out, count) : bf16_to_float(halves, out, count);
            return;
        }
        case MmaType::TF32:
            for (uint32_t i = 0; i < count; ++i) {
                uint32_t bits;
                std::memcpy(&bits, data + 4 * i, 4);
                out[i] = tf32_to_float(bits);
            }
            return;
        default: break;
    }
    const uint32_t bits = element_bits(type);
    if (bits == 8 || packing == Packing::Container8) {
        const float* table = packing == Packing::Container8 ? detail::narrow_table<true>(type) : detail::narrow_table<false>(type);
        for (uint32_t i = 0; i < count; ++i) out[i] = table[data[i]];
        return;
    }
    const float* table = detail::narrow_table<false>(type);
    for (uint32_t i = 0; i < count; ++i) {
        const uint8_t* group = packing == Packing::Padded16 ? data + i / 16 * 16 : data;
        out[i] = table[detail::bit_field(group, (packing == Packing::Padded16 ? i % 16 : i) * bits, bits)];
    }
}

inline void unpack_elements(MmaType type, Packing, const uint8_t* data, uint32_t count, int32_t* out) {
    for (uint32_t i = 0; i < count; ++i) {
        switch (type) {
            case MmaType::S8: out[i] = int8_t(data[i]); break;
            case MmaType::U8: out[i] = data[i]; break;
            case MmaType::S4: out[i] = int32_t(detail::bit_field(data, 4 * i, 4) << 28) >> 28; break;
            case MmaType::U4: out[i] = int32_t(detail::bit_field(data, 4 * i, 4)); break;
            case MmaType::B1: out[i] = int32_t(detail::bit_field(data, i, 1)); break;
            default: throw UnitError(Fault::Unsupported, "matrix operand: not an integer type");
        }
    }
}

// Operand of (mn x k) in shared memory.
struct SharedOperand {
    OperandLayout layout;
    MmaType type;
    Packing packing;
    bool mn_major;
    uint32_t mn, k;

    // Calls f(line, chunk, offset in the shared window) for every 16-byte chunk.
    template <class F>
    void each_chunk(F&& f) const {
        const uint32_t per_chunk = chunk_elements(type, packing);
        const uint32_t lines = mn_major ? k : mn;
        const uint32_t length = mn_major ? mn : k;
        if (length % per_chunk) throw UnitError(Fault::BadDescriptor, "matrix operand: " + std::to_string(length) +
                                               " elements along the major dimension are no multiple of 16 bytes");
        for (uint32_t line = 0; line < lines; ++line)
            for (uint32_t chunk = 0; chunk < length / per_chunk; ++chunk) f(line, chunk, layout.chunk_offset(line, chunk));
    }

    // Appends the byte ranges that are read; adjacent chunks are merged.
    void footprint(uint8_t cta, std::vector<SharedRange>& out) const {
        const uint32_t bytes = chunk_bytes(type, packing);
        const size_t first = out.size();
        each_chunk([&](uint32_t, uint32_t, uint32_t offset) {
            if (out.size() > first) {
                SharedRange& last = out.back();
                if (last.offset + last.bytes == offset) { last.bytes += bytes; return; }
                if (offset + bytes == last.offset) { last.offset = offset; last.bytes += bytes; return; }
            }
            out.push_back({offset, bytes, cta, false});
        });
    }

    // Unpacks to out[mn * mn_stride + k * k_stride], negated if `negate` is set.
    template <class T>
    void unpack(const uint8_t* shared, uint32_t shared_bytes, bool negate, T* out, size_t mn_stride, size_t k_stride) const {
        const uint32_t per_chunk = chunk_elements(type, packing);
        const size_t line_stride = mn_major ? k_stride : mn_stride;
        const size_t element_stride = mn_major ? mn_stride : k_stride;
        T values[128];
        each_chunk([&](uint32_t line, uint32_t chunk, uint32_t offset) {
            if (offset + 16 > shared_bytes)
                throw UnitError(Fault::OutOfBounds, "matrix operand: bytes " + std::to_string(offset) + ".." +
                                std::to_string(offset + 15) + " leave shared memory of " + std::to_string(shared_bytes) + " bytes");
            unpack_elements(type, packing, shared + offset, per_chunk, values);
            T* target = out + line * line_stride + chunk * per_chunk * element_stride;
            for (uint32_t i = 0; i < per_chunk; ++i) target[i * element_stride] = negate ? -values[i] : values[i];
        });
    }
};

}  // namespace warpcheck
