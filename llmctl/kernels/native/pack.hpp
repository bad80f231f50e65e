// Between the rows a checkpoint stores and the tiles of layouts.hpp, both ways, at the speed of memory.
#pragma once

#include <cstdint>

#include "layouts.hpp"

namespace llmctl {

// Stored rows of one matrix: GGUF blocks, plain numbers, or packed integers (codes low nibble first, their scales and zero
// points apart). Any alignment. `order[r]` is the stored row that becomes row r; null: as they are.
struct StoredRows {
  const uint8_t* data;
  int64_t stride;                    // bytes from row to row
  const int64_t* order = nullptr;
  const float* scales = nullptr;     // I4 and I8: [rows][columns / group_size]
  const uint8_t* zeros = nullptr;    // likewise; null: the middle, 2^(bits - 1)
};

// Where unpack_rows puts them: rows of `stride` bytes, in the packed order.
struct RestoredRows {
  uint8_t* data;
  int64_t stride;
  float* scales = nullptr;
  uint8_t* zeros = nullptr;
};

// Bytes of one stored row (I4 and I8: of its codes).
int64_t stored_row_bytes(Layout layout, int64_t columns);

// Fills tiles first_tile .. last_tile - 1 of `target`; `destination` is target.data, writable. Rows beyond target.rows become
// rows of zero bytes. target.columns must be a multiple of the layout's.
void pack_tiles(const PackedMatrix& target, const StoredRows& source, int64_t first_tile, int64_t last_tile,
                uint8_t* destination);

// The inverse, bit for bit: the rows of tiles first_tile .. last_tile - 1.
void unpack_rows(const PackedMatrix& source, const RestoredRows& target, int64_t first_tile, int64_t last_tile);

}  // namespace llmctl
