// Tile-mode tensor copies: which bytes of global memory meet which bytes of shared memory.
// PTX ISA 5.5 (tensors), 9.7.9.25.5 (cp.async.bulk.tensor, cp.reduce.async.bulk.tensor).
#pragma once

#include "tensormap.hpp"

namespace fa4 {

// `bytes` bytes that are contiguous on both sides. A load writes zeros (or NaN) where `fill` is set;
// a store or a reduction leaves such pieces out.
struct TmaPiece {
    uint64_t global;    // address; meaningless when fill
    uint32_t shared;    // offset in the shared window
    uint32_t bytes;
    bool fill;
};

// Bytes of shared memory that one box occupies: what complete_tx counts for a load, whole even where the box
// leaves the tensor.
uint32_t tma_box_bytes(const TensorMap&);

// Pieces of the box at `coords` (element units, may be negative), in ascending order of box coordinates.
void tma_pieces(const TensorMap&, const int32_t coords[5], uint32_t shared, std::vector<TmaPiece>& out);

// tile::gather4 / tile::scatter4: rank-2 maps, four rows; coords = {column, row0, row1, row2, row3}.
void tma_pieces_gather4(const TensorMap&, const int32_t coords[5], uint32_t shared, std::vector<TmaPiece>& out);

// Shared ranges that the box occupies (one, unless the type pads), for the engine's checks.
void tma_shared_footprint(const TensorMap&, uint32_t shared, bool write, std::vector<SharedRange>& out);

// Executes a load piece: copies or fills. `shared_base` is offset 0 of the destination CTA's window.
void tma_load_piece(const TensorMap&, const TmaPiece&, uint8_t* shared_base);
void tma_store_piece(const TensorMap&, const TmaPiece&, const uint8_t* shared_base);

enum class ReduceOp : uint8_t { Add, Min, Max, Inc, Dec, And, Or, Xor };

// Element-wise global[i] = op(global[i], shared[i]); also for the 1-D cp.reduce.async.bulk.
void reduce_bytes(ReduceOp, TmaType, uint8_t* destination, const uint8_t* source, uint32_t bytes);

}  // namespace fa4
