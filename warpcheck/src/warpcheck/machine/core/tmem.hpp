// Data paths of tensor memory: tcgen05.ld, st, cp and shift. PTX ISA 9.7.16.2.3 (shapes), 9.7.16.8 (ld, st), 9.7.16.9
// (cp, shift).
#pragma once

#include <cstring>

#include "enumerations.hpp"
#include "footprint.hpp"
#include "smem_desc.hpp"

namespace warpcheck {

// One warp-wide tcgen05.ld or tcgen05.st.
struct TmemAccess {
    TmemShape shape;
    uint16_t num;           // .x1 .. .x128
    bool pack16;            // .pack::16b / .unpack::16b: a register holds the low halves of two adjacent columns
    uint32_t taddr;
    uint32_t split = 0;     // immHalfSplitoff of .16x32bx2, in columns
};

// 32-bit registers per thread.
inline uint32_t tmem_registers(const TmemAccess& a) {
    const uint32_t per_repeat = a.shape == TmemShape::S16x256b ? 4 : a.shape == TmemShape::S16x128b ? 2 : 1;
    return per_repeat * a.num;
}

struct TmemCell { uint16_t lane, column; };

// Cell of register `reg` of thread `thread`, relative to the base address. With pack16 it is the first of two adjacent
// cells.
inline TmemCell tmem_cell_offset(const TmemAccess& a, uint32_t reg, uint32_t thread) {
    const uint32_t width = a.pack16 ? 2 : 1;    // columns per 32 bits of register
    uint32_t lane = 0, word = 0, split = 0;
    switch (a.shape) {
        case TmemShape::S32x32b:
            lane = thread;
            word = reg;
            break;
        case TmemShape::S16x64b:
            lane = thread / 4 + 8 * (thread & 1);
            word = 2 * reg + (thread >> 1 & 1);
            break;
        case TmemShape::S16x128b:
            lane = thread / 4 + 8 * (reg & 1);
            word = 4 * (reg >> 1) + (thread & 3);
            break;
        case TmemShape::S16x256b:
            lane = thread / 4 + 8 * (reg >> 1 & 1);
            word = 8 * (reg >> 2) + 2 * (thread & 3) + (reg & 1);
            break;
        case TmemShape::S16x32bx2:
            lane = thread & 15;
            word = reg;
            split = thread < 16 ? 0 : a.split;
            break;
    }
    return {uint16_t(lane), uint16_t(width * word + split)};
}

inline TmemCell tmem_cell(const TmemAccess& a, uint32_t reg, uint32_t thread) {
    const TmemAddress base(a.taddr);
    const TmemCell cell = tmem_cell_offset(a, reg, thread);
    return {uint16_t(base.lane + cell.lane), uint16_t(base.column + cell.column)};
}

namespace detail {
inline void check_tmem_rect(const TmemRect& r, const char* what) {
    if (r.lane + r.lanes > kTmemLanes || r.column + r.columns > kTmemColumns)
        throw UnitError(Fault::OutOfBounds, std::string(what) + ": lanes " + std::to_string(r.lane) + ".." +
                        std::to_string(r.lane + r.lanes - 1) + ", columns " + std::to_string(r.column) + ".." +
                        std::to_string(r.column + r.columns - 1) + " leave tensor memory (128 x 512)");
}
}  // namespace detail

// Appends the accessed cells as one or two rectangles (cta = 0).
inline void tmem_footprint(const TmemAccess& a, bool write, std::vector<TmemRect>& out) {
    const TmemAddress base(a.taddr);
    const char* what = write ? "tcgen05.st" : "tcgen05.ld";
    const uint32_t words = a.shape == TmemShape::S16x256b ? 8 : a.shape == TmemShape::S16x128b ? 4 : a.shape == TmemShape::S16x64b ? 2 : 1;
    const uint32_t lanes = a.shape == TmemShape::S32x32b ? 32 : 16;
    TmemRect rect{uint16_t(base.lane), uint16_t(lanes), uint16_t(base.column),
                  uint16_t(words * a.num * (a.pack16 ? 2 : 1)), 0, write};
    detail::check_tmem_rect(rect, what);
    out.push_back(rect);
    if (a.shape == TmemShape::S16x32bx2) {
        rect.column = uint16_t(rect.column + a.split);
        detail::check_tmem_rect(rect, what);
        out.push_back(rect);
    }
}

// regs[r] points to the values of register r in the 32 threads; tmem is [kTmemLanes][kTmemColumns].
inline void tmem_load(const TmemAccess& a, const uint32_t* tmem, uint32_t* const* regs) {
    const uint32_t count = tmem_registers(a);
    for (uint32_t thread = 0; thread < 32; ++thread) {
        for (uint32_t r = 0; r < count; ++r) {
            const TmemCell cell = tmem_cell(a, r, thread);
            const uint32_t* p = tmem + cell.lane * kTmemColumns + cell.column;
            regs[r][thread] = a.pack16 ? (p[0] & 0xFFFF) | p[1] << 16 : p[0];
        }
    }
}

inline void tmem_store(const TmemAccess& a, uint32_t* tmem, const uint32_t* const* regs) {
    const uint32_t count = tmem_registers(a);
    for (uint32_t thread = 0; thread < 32; ++thread) {
        for (uint32_t r = 0; r < count; ++r) {
            const TmemCell cell = tmem_cell(a, r, thread);
            uint32_t* p = tmem + cell.lane * kTmemColumns + cell.column;
            const uint32_t value = regs[r][thread];
            p[0] = a.pack16 ? value & 0xFFFF : value;
            if (a.pack16) p[1] = value >> 16;
        }
    }
}

// tcgen05.cp: copy from shared memory to TMEM. With cta_group 2 each CTA of the pair copies from its own shared memory.
// The source is K-major: a line of the descriptor's layout is a row, and a chunk is 128 bits of it. Shape 64x128b needs
// the warp pairs that share a half: .warpx2::02_13 or .warpx2::01_23.
struct TmemCopyOp {
    TmemCopyShape shape;
    TmemCopyFormat format = TmemCopyFormat::None;
    uint8_t cta_group = 1;
    uint32_t taddr = 0;
    uint64_t desc = 0;
};

namespace detail {

struct TmemCopyPlan { uint32_t rows, chunks; };

inline TmemCopyPlan tmem_copy_plan(TmemCopyShape shape) {
    switch (shape) {
        case TmemCopyShape::S128x256b: return {128, 2};
        case TmemCopyShape::S4x256b: return {4, 2};
        case TmemCopyShape::S128x128b: return {128, 1};
        case TmemCopyShape::S32x128b_x4: return {32, 1};
        default: return {64, 1};
    }
}

// Lanes that row `row` of the source is copied to, relative to the base address. Returns their number.
inline uint32_t tmem_copy_lanes(TmemCopyShape shape, uint32_t row, uint32_t lanes[4]) {
    switch (shape) {
        case TmemCopyShape::S4x256b: lanes[0] = 32 * row; return 1;     // one lane in the part of each warp
        case TmemCopyShape::S64x128b_02_13: lanes[0] = row; lanes[1] = row + 64; return 2;
        case TmemCopyShape::S64x128b_01_23:
            lanes[0] = row % 32 + 64 * (row / 32);
            lanes[1] = lanes[0] + 32;
            return 2;
        case TmemCopyShape::S32x128b_x4:
            for (uint32_t i = 0; i < 4; ++i) lanes[i] = row + 32 * i;
            return 4;
        default: lanes[0] = row; return 1;
    }
}

// Expands 16 packed 4- or 6-bit floats to 8-bit containers: 4 bits to bits 2-5, 6 bits to bits 0-5.
inline void decompress_chunk(TmemCopyFormat format, const uint8_t* source, uint8_t target[16]) {
    for (uint32_t i = 0; i < 16; ++i) {
        if (format == TmemCopyFormat::B4x16Pad64) {
            target[i] = uint8_t((source[i / 2] >> 4 * (i & 1) & 0xF) << 2);
        } else {
            const uint32_t bit = 6 * i;
            const uint32_t pair = source[bit / 8] | (bit / 8 < 11 ? uint32_t(source[bit / 8 + 1]) << 8 : 0);
            target[i] = uint8_t(pair >> bit % 8 & 0x3F);
        }
    }
}

inline uint32_t packed_chunk_bytes(TmemCopyFormat format) {
    return format == TmemCopyFormat::None ? 16 : format == TmemCopyFormat::B4x16Pad64 ? 8 : 12;
}

inline void check_shared_chunk(uint32_t offset, uint32_t bytes, uint32_t shared_bytes, const char* what) {
    if (offset + bytes > shared_bytes)
        throw UnitError(Fault::OutOfBounds, std::string(what) + ": bytes " + std::to_string(offset) + ".." +
                        std::to_string(offset + bytes - 1) + " leave shared memory of " + std::to_string(shared_bytes) + " bytes");
}

}  // namespace detail

inline void tmem_copy_footprint(const TmemCopyOp& op, Footprint& out) {
    const OperandLayout layout(decode_smem_desc_sm100(op.desc), false);
    const TmemAddress base(op.taddr);
    const auto plan = detail::tmem_copy_plan(op.shape);
    const uint32_t bytes = detail::packed_chunk_bytes(op.format);
    const auto columns = uint16_t(4 * plan.chunks);
    for (uint8_t cta = 0; cta < op.cta_group; ++cta) {
        for (uint32_t row = 0; row < plan.rows; ++row)
            for (uint32_t chunk = 0; chunk < plan.chunks; ++chunk)
                out.shared.push_back({layout.chunk_offset(row, chunk), bytes, cta, false});
        if (op.shape == TmemCopyShape::S4x256b) {
            for (uint32_t row = 0; row < 4; ++row)
                out.tmem.push_back({uint16_t(base.lane + 32 * row), 1, uint16_t(base.column), columns, cta, true});
        } else {
            out.tmem.push_back({uint16_t(base.lane), 128, uint16_t(base.column), columns, cta, true});
        }
    }
    for (const TmemRect& rect : out.tmem) detail::check_tmem_rect(rect, "tcgen05.cp");
}

inline void tmem_copy_execute(const TmemCopyOp& op, const CtaMemory ctas[2]) {
    const OperandLayout layout(decode_smem_desc_sm100(op.desc), false);
    const TmemAddress base(op.taddr);
    const auto plan = detail::tmem_copy_plan(op.shape);
    for (uint32_t cta = 0; cta < op.cta_group; ++cta) {
        const CtaMemory& memory = ctas[cta];
        for (uint32_t row = 0; row < plan.rows; ++row) {
            uint32_t lanes[4];
            const uint32_t copies = detail::tmem_copy_lanes(op.shape, row, lanes);
            for (uint32_t chunk = 0; chunk < plan.chunks; ++chunk) {
                const uint32_t offset = layout.chunk_offset(row, chunk);
                detail::check_shared_chunk(offset, 16, memory.shared_bytes, "tcgen05.cp");
                uint8_t data[16];
                if (op.format == TmemCopyFormat::None) std::memcpy(data, memory.shared + offset, 16);
                else detail::decompress_chunk(op.format, memory.shared + offset, data);
                for (uint32_t i = 0; i < copies; ++i)
                    std::memcpy(memory.tmem + (base.lane + lanes[i]) * kTmemColumns + base.column + 4 * chunk, data, 16);
            }
        }
    }
}

// tcgen05.shift.down: in the 32 lanes at taddr and 8 columns (32 bytes), lane i takes the row of lane i + 1; the last
// lane keeps its row. The ISA says "shift down by one row, except the last". The direction follows from the
// accompanying .4x256b copy, which refreshes one lane of each warp's part.
struct TmemShiftOp { uint8_t cta_group; uint32_t taddr; };

inline void tmem_shift_footprint(const TmemShiftOp& op, Footprint& out) {
    const TmemAddress base(op.taddr);
    if (base.lane % 32)
        throw UnitError(Fault::Misaligned, "tcgen05.shift: lane " + std::to_string(base.lane) + " is no multiple of 32");
    for (uint8_t cta = 0; cta < op.cta_group; ++cta) {
        out.tmem.push_back({uint16_t(base.lane + 1), 31, uint16_t(base.column), 8, cta, false});
        out.tmem.push_back({uint16_t(base.lane), 31, uint16_t(base.column), 8, cta, true});
    }
    for (const TmemRect& rect : out.tmem) detail::check_tmem_rect(rect, "tcgen05.shift");
}

inline void tmem_shift_execute(const TmemShiftOp& op, const CtaMemory ctas[2]) {
    const TmemAddress base(op.taddr);
    for (uint32_t cta = 0; cta < op.cta_group; ++cta) {
        uint32_t* cell = ctas[cta].tmem + base.lane * kTmemColumns + base.column;
        for (uint32_t row = 0; row < 31; ++row, cell += kTmemColumns) std::memcpy(cell, cell + kTmemColumns, 32);
    }
}

}  // namespace warpcheck
