// tcgen05.ld, st, cp and shift: the data paths of tensor memory.
// PTX ISA 9.7.16.2.3, 9.7.16.8, 9.7.16.9.
#pragma once

#include "footprint.hpp"

namespace fa4 {

enum class TmemShape : uint8_t { S16x64b, S16x128b, S16x256b, S32x32b, S16x32bx2 };

// One warp-wide tcgen05.ld or tcgen05.st.
struct TmemAccess {
    TmemShape shape;
    uint16_t num;           // .x1 .. .x128
    bool pack16;            // .pack::16b / .unpack::16b: each register is the low halves of two adjacent columns
    uint32_t taddr;
    uint32_t split = 0;     // immHalfSplitoff of .16x32bx2, in columns
};

// 32-bit registers per thread.
uint32_t tmem_registers(const TmemAccess&);

// The TMEM cell of (register, thread): with pack16 the first of two adjacent columns.
struct TmemCell { uint16_t lane, column; };
TmemCell tmem_cell(const TmemAccess&, uint32_t reg, uint32_t thread);

// The accessed cells as rectangles (cta = 0).
void tmem_footprint(const TmemAccess&, bool write, std::vector<TmemRect>& out);

// regs[r] points to the 32 threads' values of register r. tmem is [kTmemLanes][kTmemColumns].
void tmem_load(const TmemAccess&, const uint32_t* tmem, uint32_t* const* regs);
void tmem_store(const TmemAccess&, uint32_t* tmem, const uint32_t* const* regs);

enum class TmemCopyShape : uint8_t { S128x256b, S4x256b, S128x128b, S64x128b_02_13, S64x128b_01_23, S32x128b_x4 };
enum class TmemCopyFormat : uint8_t { None, B4x16_p64, B6x16_p32 };   // decompression to b8x16

// tcgen05.cp: shared memory to TMEM. With cta_group 2 each CTA of the pair copies from its own shared memory.
struct TmemCopyOp {
    TmemCopyShape shape;
    TmemCopyFormat format = TmemCopyFormat::None;
    uint8_t cta_group = 1;
    uint32_t taddr = 0;
    uint64_t desc = 0;
};
void tmem_copy_footprint(const TmemCopyOp&, Footprint& out);
void tmem_copy_execute(const TmemCopyOp&, const CtaMemory ctas[2]);

// tcgen05.shift.down: rows move down by one lane, 32 bytes (8 columns) wide, the last row stays.
struct TmemShiftOp { uint8_t cta_group; uint32_t taddr; };
void tmem_shift_footprint(const TmemShiftOp&, Footprint& out);
void tmem_shift_execute(const TmemShiftOp&, const CtaMemory ctas[2]);

}  // namespace fa4
