// mma.sync (one warp), ldmatrix, stmatrix, movmatrix. PTX ISA 9.7.14.5. See matmul.hpp for the arithmetic.
#pragma once

#include "wgmma.hpp"

namespace fa4 {

struct MmaSyncOp {
    uint8_t m, n, k;                // elements
    MmaType d_type, a_type, b_type, c_type;
    bool saturate = false;          // .satfinite
    bool a_row = true, b_col = true;  // layouts; only m8n8k4 allows others
};

uint32_t mma_sync_registers_a(const MmaSyncOp&);    // 32-bit registers per thread (f64: two per element)
uint32_t mma_sync_registers_b(const MmaSyncOp&);
uint32_t mma_sync_registers_c(const MmaSyncOp&);
uint32_t mma_sync_registers_d(const MmaSyncOp&);

// a[r], b[r], c[r], d[r] point to the 32 threads' values of register r; d may alias c.
void mma_sync_execute(const MmaSyncOp&, const uint32_t* const* a, const uint32_t* const* b,
                      const uint32_t* const* c, uint32_t* const* d);

// ldmatrix / stmatrix. Threads 8 i .. 8 i + 7 give the row addresses of matrix i (m8n16 and m16n16: 16 rows).
enum class MatrixShape : uint8_t { M8N8B16, M16N8B8, M16N16B8, M8N16B8x16_B6, M8N16B8x16_B4 };

struct LdMatrixOp { MatrixShape shape; uint8_t num; bool trans; };

uint32_t ldmatrix_registers(const LdMatrixOp&);
uint32_t ldmatrix_rows(const LdMatrixOp&);          // threads whose address is used, from thread 0
constexpr uint32_t kMatrixRowBytes = 16;            // bytes read or written at each address

// rows[t] points to the 16 bytes at thread t's address.
void ldmatrix_execute(const LdMatrixOp&, const uint8_t* const* rows, uint32_t* const* regs);
void stmatrix_execute(const LdMatrixOp&, uint8_t* const* rows, const uint32_t* const* regs);
// movmatrix.sync.aligned.m8n8.trans.b16
void movmatrix_execute(const uint32_t* source, uint32_t* destination);

}  // namespace fa4
