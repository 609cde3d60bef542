// Tensor copies in tile mode: the mapping between bytes of global and of shared memory. PTX ISA 5.5 (tensors),
// 9.7.9.25.5 (cp.async.bulk.tensor, cp.reduce.async.bulk.tensor).
#pragma once

#include <algorithm>
#include <cmath>

#include "enumerations.hpp"
#include "float_formats.hpp"
#include "tensormap.hpp"

namespace warpcheck {

// Piece of a copy: bytes that are contiguous on both sides. If `fill` is set, a load writes zeros (or NaN), and a store
// or a reduction skips the piece.
struct TmaPiece {
    uint64_t global;    // address; 0 if fill is set
    uint32_t shared;    // offset in the shared window
    uint32_t bytes;
    bool fill;
};

namespace detail {

// Layout of 16 (or fewer) bytes of a row of the box in global and in shared memory.
struct TmaUnits {
    uint32_t elements;      // per unit
    uint32_t global_bytes;
    uint32_t shared_bytes;
};

constexpr TmaUnits tma_units(TmaType type) {
    switch (type) {
        case TmaType::B4x16: return {16, 8, 8};
        case TmaType::B4x16Pad64: return {16, 8, 16};
        case TmaType::B6x16Pad32: return {16, 12, 16};
        default: return {1, tma_element_bits(type) / 8, tma_element_bits(type) / 8};
    }
}

// Swizzle of shared addresses, and the largest power-of-two run of bytes that it keeps contiguous.
struct TmaSwizzler {
    uint32_t line_mask = 0;     // bits of the 128-byte line's index that take part
    uint32_t chunk_shift = 4;   // log2 of the atom
    bool flip8 = false;

    explicit TmaSwizzler(const TensorMap& map) {
        const bool plain = map.atomicity == TmaAtomicity::B16;
        switch (map.swizzle) {
            case TmaSwizzle::None: return;
            case TmaSwizzle::B32: case TmaSwizzle::B96: line_mask = 1; break;
            case TmaSwizzle::B64: line_mask = 3; break;
            case TmaSwizzle::B128:
                chunk_shift = map.atomicity == TmaAtomicity::B64 ? 6 : plain ? 4 : 5;
                line_mask = map.atomicity == TmaAtomicity::B64 ? 1 : plain ? 7 : 3;
                flip8 = map.atomicity == TmaAtomicity::B32Flip8;
                break;
        }
        if (!plain && map.swizzle != TmaSwizzle::B128)
            throw UnitError(Fault::BadDescriptor, "tensor map: a swizzle atom above 16 bytes needs the 128-byte swizzle");
    }
    uint32_t atom_bytes() const { return line_mask == 0 ? ~0u : flip8 ? 8 : 1u << chunk_shift; }
    uint32_t operator()(uint32_t address) const {
        const uint32_t line = address >> 7;
        address ^= (line & line_mask) << chunk_shift;
        if (flip8) address ^= (line & 1) << 3;
        return address;
    }
};

inline void check_tile_mode(const TensorMap& map) {
    if (map.interleave != TmaInterleave::None)
        throw UnitError(Fault::Unsupported, "tensor map: interleaved layouts are not modelled");
}

// Elements of the box along a dimension, divided by the traversal stride. Dimension 0 has no traversal stride without
// interleave.
inline uint32_t box_count(const TensorMap& map, uint32_t dim) {
    return dim == 0 ? map.box[0] : (map.box[dim] + map.element_stride[dim] - 1) / map.element_stride[dim];
}

inline uint32_t box_row_bytes(const TensorMap& map) {
    const TmaUnits units = tma_units(map.type);
    return (map.box[0] + units.elements - 1) / units.elements * units.shared_bytes;
}

// Appends a run of bytes. Splits it at the boundaries of swizzle atoms, and merges it with the last piece if it
// continues that piece on both sides.
inline void emit_run(const TmaSwizzler& swizzle, uint64_t global, uint32_t shared, uint32_t bytes, bool fill,
                     std::vector<TmaPiece>& out) {
    const uint32_t atom = swizzle.atom_bytes();
    while (bytes) {
        const uint32_t take = atom == ~0u ? bytes : std::min(bytes, atom - shared % atom);
        const uint32_t target = swizzle(shared);
        TmaPiece* last = out.empty() ? nullptr : &out.back();
        if (last && last->fill == fill && last->shared + last->bytes == target && (fill || last->global + last->bytes == global))
            last->bytes += take;
        else
            out.push_back({fill ? 0 : global, target, take, fill});
        shared += take;
        bytes -= take;
        if (!fill) global += take;
    }
}

// Appends one row of the box (dimension 0). `row_in_bounds`: all other coordinates are inside the tensor.
inline void emit_row(const TensorMap& map, const TmaSwizzler& swizzle, int64_t column, uint64_t row_address,
                     bool row_in_bounds, uint32_t shared, std::vector<TmaPiece>& out) {
    const TmaUnits units = tma_units(map.type);
    const int64_t count = map.box[0];
    const int64_t extent = int64_t(map.extent[0]);
    const int64_t first = row_in_bounds ? std::clamp<int64_t>(-column, 0, count) : count;
    const int64_t last = row_in_bounds ? std::clamp<int64_t>(extent - column, first, count) : count;
    if (units.elements == 1) {
        const uint32_t size = units.global_bytes;
        emit_run(swizzle, 0, shared, uint32_t(first) * size, true, out);
        emit_run(swizzle, row_address + uint64_t(column + first) * size, shared + uint32_t(first) * size,
                 uint32_t(last - first) * size, false, out);
        emit_run(swizzle, 0, shared + uint32_t(last) * size, uint32_t(count - last) * size, true, out);
        return;
    }
    // Packed types: groups of 16 elements; extents and coordinates are multiples of a group.
    for (int64_t i = 0; i < count; i += units.elements, shared += units.shared_bytes) {
        const bool inside = i >= first && i + units.elements <= last;
        const uint64_t global = row_address + uint64_t((column + i) / units.elements * units.global_bytes);
        emit_run(swizzle, inside ? global : 0, shared, units.global_bytes, !inside, out);  // padding is not written
    }
}

// Calls visit(address, inside) for each row (dimension 0) of the box at `coords`, in ascending order of box coordinates.
// address: of the row's element 0 in global memory. inside: whether the row lies inside the other dimensions.
template <typename Visit>
inline void for_each_row(const TensorMap& map, const int32_t coords[5], Visit visit) {
    uint32_t count[5] = {1, 1, 1, 1, 1}, index[5] = {};
    for (uint32_t d = 1; d < map.rank; ++d) count[d] = box_count(map, d);
    for (;;) {
        uint64_t address = map.base;
        bool inside = true;
        for (uint32_t d = 1; d < map.rank; ++d) {
            const int64_t c = int64_t(coords[d]) + int64_t(index[d]) * map.element_stride[d];
            inside &= c >= 0 && c < int64_t(map.extent[d]);
            address += uint64_t(c) * map.stride[d];
        }
        visit(address, inside);
        uint32_t d = 1;
        while (d < map.rank && ++index[d] == count[d]) index[d++] = 0;
        if (d >= map.rank) return;
    }
}

}  // namespace detail

// Bytes of a whole box in shared memory, including elements outside the tensor.
inline uint32_t tma_box_bytes(const TensorMap& map) {
    uint32_t bytes = detail::box_row_bytes(map);
    for (uint32_t d = 1; d < map.rank; ++d) bytes *= detail::box_count(map, d);
    return bytes;
}

// Pieces of the box at `coords` (in elements, may be negative), in ascending order of box coordinates. `shared` is the
// offset of the box in the shared window.
inline void tma_pieces(const TensorMap& map, const int32_t coords[5], uint32_t shared, std::vector<TmaPiece>& out) {
    detail::check_tile_mode(map);
    const detail::TmaSwizzler swizzle(map);
    const uint32_t row_bytes = detail::box_row_bytes(map);
    detail::for_each_row(map, coords, [&](uint64_t address, bool inside) {
        detail::emit_row(map, swizzle, coords[0], address, inside, shared, out);
        shared += row_bytes;
    });
}

// tile::gather4 and tile::scatter4: a rank-2 map with a box of one row; coords = {column, row 0, row 1, row 2, row 3}.
inline void tma_pieces_gather4(const TensorMap& map, const int32_t coords[5], uint32_t shared, std::vector<TmaPiece>& out) {
    detail::check_tile_mode(map);
    if (map.rank != 2 || map.box[1] != 1)
        throw UnitError(Fault::BadDescriptor, "tile::gather4 needs a tensor map of rank 2 whose box has one row; rank is " +
                        std::to_string(map.rank) + ", box[1] is " + std::to_string(map.box[1]));
    const detail::TmaSwizzler swizzle(map);
    for (uint32_t i = 0; i < 4; ++i) {
        const int64_t row = coords[1 + i];
        const bool inside = row >= 0 && row < int64_t(map.extent[1]);
        detail::emit_row(map, swizzle, coords[0], map.base + uint64_t(row) * map.stride[1], inside, shared, out);
        shared += detail::box_row_bytes(map);
    }
}

// Rows (dimension 0) of a box in global memory, for the clock. rows: all of the box. cut: those that are partly outside
// the tensor; cut_sectors: of these, those whose part inside ends within a sector of 32 bytes. sectors: that the rows
// inside the other dimensions touch, with what is outside dimension 0. bytes: inside the tensor. partial: sectors of
// which a store writes a part.
struct TmaRows { int64_t rows = 0, cut = 0, cut_sectors = 0, sectors = 0, bytes = 0, partial = 0; };

namespace detail {

inline void add_row(const TensorMap& map, int64_t column, uint64_t row_address, bool row_in_bounds, TmaRows& out) {
    constexpr uint64_t kSector = 32;
    const int64_t count = map.box[0], first = std::clamp<int64_t>(-column, 0, count);
    const int64_t last = std::clamp<int64_t>(int64_t(map.extent[0]) - column, first, count);
    const TmaUnits units = tma_units(map.type);
    const auto bytes = [&](int64_t elements) { return elements * int64_t(units.global_bytes) / units.elements; };
    ++out.rows;
    if (!row_in_bounds || first == last) return;
    const uint64_t begin = row_address + uint64_t(bytes(column));
    out.sectors += int64_t((begin + uint64_t(bytes(count)) - 1) / kSector - begin / kSector + 1);
    out.bytes += bytes(last - first);
    const uint64_t from = row_address + uint64_t(bytes(column + first)), to = row_address + uint64_t(bytes(column + last));
    const bool is_one = from / kSector == (to - 1) / kSector;
    out.partial += is_one ? to - from < kSector : (from % kSector != 0) + (to % kSector != 0);
    if (last - first == count) return;
    ++out.cut;
    out.cut_sectors += bytes(last - first) % int64_t(kSector) != 0;
}

}  // namespace detail

// As `tma_pieces`.
inline TmaRows tma_rows(const TensorMap& map, const int32_t coords[5]) {
    TmaRows out;
    detail::for_each_row(map, coords, [&](uint64_t address, bool inside) {
        detail::add_row(map, coords[0], address, inside, out);
    });
    return out;
}

// As `tma_pieces_gather4`.
inline TmaRows tma_rows_gather4(const TensorMap& map, const int32_t coords[5]) {
    TmaRows out;
    for (uint32_t i = 0; i < 4; ++i) {
        const int64_t row = coords[1 + i];
        const bool inside = row >= 0 && row < int64_t(map.extent[1]);
        detail::add_row(map, coords[0], map.base + uint64_t(row) * map.stride[1], inside, out);
    }
    return out;
}

// Bytes that complete_tx counts for a load of the box. As CUTLASS expects, padded elements count as 4 or 6 bits.
inline uint32_t tma_delivered_bytes(const TensorMap& map) {
    const detail::TmaUnits units = detail::tma_units(map.type);
    return tma_box_bytes(map) / units.shared_bytes * units.global_bytes;
}

// Bytes of shared memory that the box covers. The swizzle only permutes them, so they are one range. Padding of a
// padded element type is included, although a load does not write it.
inline SharedRange tma_shared_range(const TensorMap& map, uint32_t shared, bool write) {
    return {shared, tma_box_bytes(map), 0, write};
}

// Value of out-of-bounds elements, as a repeated pattern whose length is a multiple of every element size.
inline uint64_t tma_fill_pattern(const TensorMap& map) {
    if (!map.nan_fill) return 0;
    switch (map.type) {
        case TmaType::F16: case TmaType::BF16: return 0x7FFF7FFF7FFF7FFFull;
        case TmaType::F32: case TmaType::F32Ftz: return 0x7FFFFFFF7FFFFFFFull;
        case TmaType::F64: return 0x7FFFFFFFFFFFFFFFull;
        default: throw UnitError(Fault::BadDescriptor, "tensor map: NaN fill needs a floating-point element type");
    }
}

// Executes a piece of a load. source: its bytes of global memory on the host. Maps of f32 may round to tf32 and flush subnormals. The rounding is to nearest even,
// which the ISA leaves open.
inline void tma_load_piece(const TensorMap& map, const TmaPiece& piece, const uint8_t* source, uint8_t* shared_base) {
    uint8_t* target = shared_base + piece.shared;
    if (piece.fill) {
        const uint64_t pattern = tma_fill_pattern(map);
        for (uint32_t i = 0; i < piece.bytes; ++i) target[i] = uint8_t(pattern >> 8 * (i & 7));
        return;
    }
    if (!map.tf32 && map.type != TmaType::F32Ftz) {
        std::memcpy(target, source, piece.bytes);
        return;
    }
    for (uint32_t i = 0; i < piece.bytes; i += 4) {
        uint32_t bits;
        std::memcpy(&bits, source + i, 4);
        if (map.type == TmaType::F32Ftz && !(bits & 0x7F800000u)) bits &= 0x80000000u;
        if (map.tf32) bits = float_to_tf32(bits_to_float(bits));
        std::memcpy(target + i, &bits, 4);
    }
}

inline void tma_store_piece(const TensorMap& map, const TmaPiece& piece, const uint8_t* shared_base, uint8_t* target) {
    if (map.type == TmaType::B6x16Pad32)
        throw UnitError(Fault::Unsupported, "tensor store of 6-bit elements (b6p2x16) is not modelled");
    if (!piece.fill) std::memcpy(target, shared_base + piece.shared, piece.bytes);
}

namespace detail {

template <class T>
inline T reduce_integer(ReduceOp op, T old, T value) {
    using U = std::make_unsigned_t<T>;
    switch (op) {
        case ReduceOp::Add: return T(U(old) + U(value));
        case ReduceOp::Min: return std::min(old, value);
        case ReduceOp::Max: return std::max(old, value);
        case ReduceOp::Inc: return old >= value ? T(0) : T(old + 1);
        case ReduceOp::Dec: return old == 0 || old > value ? value : T(old - 1);
        case ReduceOp::And: return T(old & value);
        case ReduceOp::Or: return T(old | value);
        default: return T(old ^ value);
    }
}

template <class T, class F>
inline void reduce_each(uint8_t* destination, const uint8_t* source, uint32_t bytes, F&& combine) {
    for (uint32_t i = 0; i < bytes; i += sizeof(T)) {
        T old, value;
        std::memcpy(&old, destination + i, sizeof(T));
        std::memcpy(&value, source + i, sizeof(T));
        old = combine(old, value);
        std::memcpy(destination + i, &old, sizeof(T));
    }
}

inline float reduce_float(ReduceOp op, float old, float value) {
    switch (op) {
        case ReduceOp::Add: return old + value;
        case ReduceOp::Min: return std::fmin(old, value);
        case ReduceOp::Max: return std::fmax(old, value);
        default: throw UnitError(Fault::BadDescriptor, "reduction: this operation needs an integer type");
    }
}

inline float flush_subnormal(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }

}  // namespace detail

// Reduction of a piece, destination[i] = op(destination[i], source[i]); also for the 1-D cp.reduce.async.bulk. Sums
// round to nearest even. f32 sums flush subnormal inputs and results; f16 and bf16 sums keep them (.noftz).
inline void reduce_bytes(ReduceOp op, TmaType type, uint8_t* destination, const uint8_t* source, uint32_t bytes) {
    using namespace detail;
    const auto integer = [op](auto old, auto value) { return reduce_integer(op, old, value); };
    switch (type) {
        case TmaType::U8: return reduce_each<uint8_t>(destination, source, bytes, integer);
        case TmaType::U16: return reduce_each<uint16_t>(destination, source, bytes, integer);
        case TmaType::U32: return reduce_each<uint32_t>(destination, source, bytes, integer);
        case TmaType::S32: return reduce_each<int32_t>(destination, source, bytes, integer);
        case TmaType::U64: return reduce_each<uint64_t>(destination, source, bytes, integer);
        case TmaType::S64: return reduce_each<int64_t>(destination, source, bytes, integer);
        case TmaType::F16:
            return reduce_each<uint16_t>(destination, source, bytes, [op](uint16_t old, uint16_t value) {
                return float_to_f16(reduce_float(op, f16_to_float(old), f16_to_float(value)));
            });
        case TmaType::BF16:
            return reduce_each<uint16_t>(destination, source, bytes, [op](uint16_t old, uint16_t value) {
                return float_to_bf16(reduce_float(op, bf16_to_float(old), bf16_to_float(value)));
            });
        case TmaType::F32: case TmaType::F32Ftz:
            return reduce_each<float>(destination, source, bytes, [op](float old, float value) {
                return op == ReduceOp::Add ? flush_subnormal(flush_subnormal(old) + flush_subnormal(value)) : reduce_float(op, old, value);
            });
        case TmaType::F64:
            return reduce_each<double>(destination, source, bytes, [op](double old, double value) {
                if (op != ReduceOp::Add) throw UnitError(Fault::BadDescriptor, "reduction: f64 knows only add");
                return old + value;
            });
        default: throw UnitError(Fault::BadDescriptor, "reduction: the element type has no reduction");
    }
}

}  // namespace warpcheck
