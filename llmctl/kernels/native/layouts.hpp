// How a weight lies in memory once it is prepared: rows interleaved by 16, so that one 512-bit lane (two 256-bit, four
// 128-bit ones) is one output row.
//
// A *tile* is 16 consecutive rows (the last one padded with zero rows); tiles follow each other. Inside a tile the columns
// go in blocks of 32 (or super-blocks of 256 = 8 blocks). The 32 columns of a block are 8 *groups* of 4 columns; a group is 64
// bytes: byte 4 * row + column. That is what one dot-product instruction eats, and also AMX's B tile.
//
//   4-bit codes, 256 bytes a block: vector v (0 to 3) holds group v in the low and group v + 4 in the high nibbles.
//   1-bit plane, 64 bytes a block: bit g of byte i is the bit of byte i of group g.
//   2-bit plane, 128 bytes a block: vector v (0, 1) holds group 4v + j at bits 2j and 2j + 1.
//   8-bit codes, 512 bytes a block: group after group, stored as code + 128 (unsigned).
//
// f16[16] below is one half-precision number a row. Sizes are of one block or super-block of a tile:
//
//   Q4_0    d f16[16] | codes4 256                                                                 288
//   Q4_1    d f16[16] | m f16[16] | codes4 256                                                     320
//   Q5_0    d f16[16] | high bit plane 64 | codes4 256                                             352
//   Q5_1    d f16[16] | m f16[16] | high bit plane 64 | codes4 256                                 384
//   Q8_0    d f16[16] | codes8 512                                                                 544
//   IQ4_NL  d f16[16] | codes4 256 (indices into the table of values)                              288
//   MXFP4   e u8[16] | codes4 256 (indices into the table of values)                               272
//   Q4_K    d f16[16] | dmin f16[16] | packed scales 192 | 8 x codes4 256                          2304
//   Q5_K    d f16[16] | dmin f16[16] | packed scales 192 | 8 x (high bit plane 64 | codes4 256)    2816
//           packed scales: three vectors of 16 little-endian words, word r of vector v = bytes 4v..4v+3 of row r's 12 bytes
//   Q6_K    d f16[16] | scale i8[16 sub-blocks of 16 columns][16 rows] | 8 x (high plane2 128 | codes4 256)   3360
//   Q3_K    d f16[16] | scale i8[16][16] (32 already subtracted) | 8 x (low plane2 128 | high bit plane 64)   1824
//   Q2_K    d f16[16] | dmin f16[16] | u8[16][16] (scale low, minimum high nibble) | 8 x low plane2 128       1344
//   IQ4_XS  d f16[16] | scale i8[8 blocks][16 rows] (32 already subtracted) | 8 x codes4 256       2208
//   I4      one group of group_size columns: d f32[16] | zero u8[16] | group_size/32 x codes4 256
//   I8      one group of group_size columns: d f32[16] | zero u8[16] | group_size/32 x codes8 512 (plain unsigned code)
//           packed integers: value = d * (code - zero)
//   F32, F16, BF16   column after column: 16 numbers; any number of columns
#pragma once

#include <cstdint>

namespace llmctl {

enum class Layout : int32_t {
  F32, F16, BF16,
  Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4,
  Q4_K, Q5_K, Q6_K, Q3_K, Q2_K, IQ4_XS,
  I4, I8,
  Count
};

constexpr int64_t kTileRows = 16;
constexpr int64_t kBlock = 32;        // columns that share one activation scale
constexpr int64_t kSuperBlock = 256;

// Columns of one unit, and its bytes in a tile. I4 and I8: of one group of `group_size` columns.
struct LayoutInfo {
  const char* name;
  int64_t columns;
  int64_t tile_bytes;
};

// Internal linkage, here and below: a copy compiled for one instruction set must not serve the others.
static inline LayoutInfo layout_info(Layout layout, int64_t group_size = 0) {
  switch (layout) {
    case Layout::F32: return {"F32", 1, 64};
    case Layout::F16: return {"F16", 1, 32};
    case Layout::BF16: return {"BF16", 1, 32};
    case Layout::Q4_0: return {"Q4_0", 32, 288};
    case Layout::Q4_1: return {"Q4_1", 32, 320};
    case Layout::Q5_0: return {"Q5_0", 32, 352};
    case Layout::Q5_1: return {"Q5_1", 32, 384};
    case Layout::Q8_0: return {"Q8_0", 32, 544};
    case Layout::IQ4_NL: return {"IQ4_NL", 32, 288};
    case Layout::MXFP4: return {"MXFP4", 32, 272};
    case Layout::Q4_K: return {"Q4_K", 256, 2304};
    case Layout::Q5_K: return {"Q5_K", 256, 2816};
    case Layout::Q6_K: return {"Q6_K", 256, 3360};
    case Layout::Q3_K: return {"Q3_K", 256, 1824};
    case Layout::Q2_K: return {"Q2_K", 256, 1344};
    case Layout::IQ4_XS: return {"IQ4_XS", 256, 2208};
    case Layout::I4: return {"I4", group_size, 80 + group_size / 32 * 256};
    case Layout::I8: return {"I8", group_size, 80 + group_size / 32 * 512};
    case Layout::Count: break;
  }
  return {"?", 1, 0};
}

// A prepared matrix (rows = out_features, columns = in_features). `data` is 64-byte aligned and owned elsewhere.
struct PackedMatrix {
  Layout layout;
  int64_t rows;
  int64_t columns;
  int64_t group_size;   // I4 and I8 only, a multiple of 32; else 0
  const uint8_t* data;

  [[gnu::always_inline]] int64_t tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  [[gnu::always_inline]] int64_t tile_bytes() const {
    LayoutInfo info = layout_info(layout, group_size);
    return columns / info.columns * info.tile_bytes;
  }
  [[gnu::always_inline]] const uint8_t* tile(int64_t index) const { return data + index * tile_bytes(); }
  [[gnu::always_inline]] int64_t rows_in(int64_t tile) const {
    int64_t left = rows - tile * kTileRows;
    return left < kTileRows ? left : kTileRows;
  }
};

// Tiles first .. last - 1 of a matrix. next: the weights that are read after them, which memory is asked for in time; may be null.
struct TileRange {
  const PackedMatrix& matrix;
  int64_t first;
  int64_t last;
  const uint8_t* next = nullptr;
};

}  // namespace llmctl
