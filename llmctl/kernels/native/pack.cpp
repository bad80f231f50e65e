#include "pack.hpp"

#include <cstddef>

#include "pack_moves.hpp"

namespace llmctl {
namespace {

using namespace moves;

// How much of a row one step takes: stored bytes, and bytes of the tile.
struct Step {
  int64_t stored;
  int64_t tile;
};

// --- Each layout in terms of moves: offsets in the stored block, offsets in the unit of the tile. ---

template <bool kPack>
void move_q4_0(const Unit<kPack>& unit) {   // and IQ4_NL
  unit.template numbers<uint16_t>(0, 0);
  unit.template words<4>(2, 32);
}

template <bool kPack>
void move_q4_1(const Unit<kPack>& unit) {
  unit.template numbers<uint16_t>(0, 0);
  unit.template numbers<uint16_t>(2, 32);
  unit.template words<4>(4, 64);
}

template <bool kPack>
void move_q5_0(const Unit<kPack>& unit) {
  unit.template numbers<uint16_t>(0, 0);
  unit.column_bits(2, 32);
  unit.template words<4>(6, 96);
}

template <bool kPack>
void move_q5_1(const Unit<kPack>& unit) {
  unit.template numbers<uint16_t>(0, 0);
  unit.template numbers<uint16_t>(2, 32);
  unit.column_bits(4, 64);
  unit.template words<4>(8, 128);
}

template <bool kPack>
void move_q8_0(const Unit<kPack>& unit) {
  unit.template numbers<uint16_t>(0, 0);
  unit.template words<8>(2, 32, FlipSigns{});
}

template <bool kPack>
void move_mxfp4(const Unit<kPack>& unit) {
  unit.template numbers<uint8_t>(0, 0);
  unit.template words<4>(1, 16);
}

template <bool kPack>
void move_q4_k(const Unit<kPack>& unit) {
  unit.template numbers<uint16_t>(0, 0);
  unit.template numbers<uint16_t>(2, 32);
  unit.template words<3>(4, 64);
  for (int pair = 0; pair < 4; ++pair) unit.nibbles(16 + 32 * pair, 256 + 512 * pair, 512 + 512 * pair);
}

template <bool kPack>
void move_q5_k(const Unit<kPack>& unit) {
  unit.template numbers<uint16_t>(0, 0);
  unit.template numbers<uint16_t>(2, 32);
  unit.template words<3>(4, 64);
  unit.bit_planes(16, 256, 320);
  for (int pair = 0; pair < 4; ++pair) unit.nibbles(48 + 32 * pair, 320 + 640 * pair, 640 + 640 * pair);
}

// Sixteen bytes of scales, stored as they are used.
struct PlainScales {
  static U8x16 expand(const uint8_t* stored) { return load<U8x16>(stored); }
  static void compress(U8x16 scales, uint8_t* stored) { store(stored, scales); }
};

template <bool kPack>
void move_q6_k(const Unit<kPack>& unit) {
  constexpr int64_t planes = 288, block = 384;
  unit.template numbers<uint16_t>(208, 0);
  unit.template bytes<16>(192, 32, PlainScales{});
  for (int half = 0; half < 2; ++half) {
    int64_t first = planes + 4 * half * block;
    unit.bit_pair_planes(128 + 32 * half, first, block);
    for (int i = 0; i < 2; ++i) {
      unit.nibbles(64 * half + 32 * i, first + i * block + 128, first + (i + 2) * block + 128);
    }
  }
}

// Q3_K: 16 scales of 6 bits in 12 bytes. Low nibbles in bytes 0 to 7 (scale i, then i + 8), bit pairs in bytes 8 to 11 (scale
// i at bits 0, i + 4 at 2, i + 8 at 4, i + 12 at 6). In the tile they are signed, 32 less.
struct Q3Scales {
  static U8x16 expand(const uint8_t* stored) {
    uint32_t a = load<uint32_t>(stored), b = load<uint32_t>(stored + 4), high = load<uint32_t>(stored + 8);
    U32x4 low = {a, b, a >> 4, b >> 4}, top = {high, high >> 2, high >> 4, high >> 6};
    U32x4 scales = (low & 0x0f0f0f0fu) | ((top & 0x03030303u) << 4);
    return (U8x16)scales - 32;
  }
  static void compress(U8x16 scales, uint8_t* stored) {
    U32x4 codes = (U32x4)(scales + 32);
    U32x4 low = codes & 0x0f0f0f0fu, top = (codes >> 4) & 0x03030303u;
    store(stored, low[0] | low[2] << 4);
    store(stored + 4, low[1] | low[3] << 4);
    store(stored + 8, top[0] | top[1] << 2 | top[2] << 4 | top[3] << 6);
  }
};

template <bool kPack>
void move_q3_k(const Unit<kPack>& unit) {
  constexpr int64_t planes = 288, block = 192;
  unit.template numbers<uint16_t>(108, 0);
  unit.template bytes<16>(96, 32, Q3Scales{});
  unit.bit_planes(0, planes + 128, block);
  for (int half = 0; half < 2; ++half) unit.bit_pair_planes(32 + 32 * half, planes + 4 * half * block, block);
}

template <bool kPack>
void move_q2_k(const Unit<kPack>& unit) {
  constexpr int64_t planes = 320, block = 128;
  unit.template numbers<uint16_t>(80, 0);
  unit.template numbers<uint16_t>(82, 32);
  unit.template bytes<16>(0, 64, PlainScales{});
  for (int half = 0; half < 2; ++half) unit.bit_pair_planes(16 + 32 * half, planes + 4 * half * block, block);
}

// IQ4_XS: 8 scales of 6 bits. Bit pairs in a 16-bit word, then nibbles in 4 bytes (scale 2i low, 2i + 1 high). In the tile
// they are signed, 32 less.
struct Iq4XsScales {
  static U8x16 expand(const uint8_t* stored) {
    uint64_t low = load<uint32_t>(stored + 2), top = load<uint16_t>(stored);
    low = (low | low << 16) & 0x0000ffff0000ffff;
    low = (low | low << 8) & 0x00ff00ff00ff00ff;
    low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
    top = (top | top << 24) & 0x000000ff000000ff;
    top = (top | top << 12) & 0x000f000f000f000f;
    top = (top | top << 6) & 0x0303030303030303;
    U64x2 scales = {low | top << 4, 0};
    return (U8x16)scales - 32;
  }
  static void compress(U8x16 scales, uint8_t* stored) {
    uint64_t codes = ((U64x2)(scales + 32))[0], low = codes & 0x0f0f0f0f0f0f0f0f, top = (codes >> 4) & 0x0303030303030303;
    low = (low | low >> 4) & 0x00ff00ff00ff00ff;
    low = (low | low >> 8) & 0x0000ffff0000ffff;
    low |= low >> 16;
    top = (top | top >> 6) & 0x000f000f000f000f;
    top = (top | top >> 12) & 0x000000ff000000ff;
    top |= top >> 24;
    store(stored, (uint16_t)top);
    store(stored + 2, (uint32_t)low);
  }
};

template <bool kPack>
void move_iq4_xs(const Unit<kPack>& unit) {
  unit.template numbers<uint16_t>(0, 0);
  unit.template bytes<8>(2, 32, Iq4XsScales{});
  for (int block = 0; block < 8; ++block) unit.template words<4>(8 + 16 * block, 160 + 256 * block);
}

template <bool kPack>
void move_words(const Unit<kPack>& unit) { unit.template words<16>(0, 0); }   // 16 columns of F32
template <bool kPack>
void move_word(const Unit<kPack>& unit) { unit.template numbers<uint32_t>(0, 0); }

template <bool kPack>
void move_halves(const Unit<kPack>& unit) {   // 32 columns of F16 or BF16
  for (int i = 0; i < 4; ++i) unit.halves(16 * i, 256 * i);
}
template <bool kPack>
void move_half(const Unit<kPack>& unit) { unit.template numbers<uint16_t>(0, 0); }

template <bool kPack>
void move_codes8(const Unit<kPack>& unit) { unit.template words<8>(0, 0); }   // 32 columns of I8

// 32 columns of I4: two neighbours share a stored byte; in the tile, as in Q4_0, columns 16 apart do.
struct NeighbourNibbles {
  static U8x16 expand(const uint8_t* stored) {
    U8x16 pairs = load<U8x16>(stored), even = pairs & 15, odd = pairs >> 4;
    return zip_low(even, odd) | (zip_high(even, odd) << 4);
  }
  static void compress(U8x16 halves, uint8_t* stored) {
    U8x16 low = halves & 15, high = halves >> 4;   // columns 0 to 15 and 16 to 31
    U8x16 even = even_bytes(low, high);
    U8x16 odd = even_bytes((U8x16)((U16x8)low >> 8), (U8x16)((U16x8)high >> 8));
    store(stored, even | (odd << 4));
  }
};

template <bool kPack>
void move_codes4(const Unit<kPack>& unit) {
  for (int quad = 0; quad < 4; ++quad) {
    U32x4 v[4];
    for (int i = 0; i < 4; ++i) {
      v[i] = kPack ? (U32x4)NeighbourNibbles::expand(unit.rows[4 * quad + i]) : load<U32x4>(unit.tile + 64 * i + 16 * quad);
    }
    transpose(v);
    for (int i = 0; i < 4; ++i) {
      if constexpr (kPack) {
        store(unit.tile + 64 * i + 16 * quad, v[i]);
      } else {
        NeighbourNibbles::compress((U8x16)v[i], unit.rows[4 * quad + i]);
      }
    }
  }
}

// --- Walking: 16 rows of a matrix and the tile that holds them. ---

// Rows beyond the last of the matrix are read here, and written to a spare place.
constexpr int64_t kLargestStep = 256;
alignas(64) const uint8_t kZeros[kLargestStep] = {};

template <bool kPack>
struct Walk {
  Unit<kPack> unit;
  int64_t rows;   // of the matrix, in this tile

  template <void (*kMove)(const Unit<kPack>&)>
  void run(Step step, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      kMove(unit);
      for (int64_t r = 0; r < rows; ++r) unit.rows[r] += step.stored;
      unit.tile += step.tile;
    }
  }
};

template <bool kPack>
using Source = std::conditional_t<kPack, StoredRows, RestoredRows>;

// The scales and zero points of one group; those of rows beyond the last are 0.
template <bool kPack>
void move_group_head(const PackedMatrix& matrix, const Source<kPack>& stored, const int64_t (&index)[kTileRows],
                     int64_t group, int64_t rows, typename Unit<kPack>::Tile* head) {
  int64_t groups = matrix.columns / matrix.group_size;
  if constexpr (kPack) std::memset(head, 0, 80);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t at = index[r] * groups + group;
    if constexpr (kPack) {
      std::memcpy(head + 4 * r, stored.scales + at, 4);
      head[64 + r] = stored.zeros ? stored.zeros[at] : (matrix.layout == Layout::I4 ? 8 : 128);
    } else {
      std::memcpy(stored.scales + at, head + 4 * r, 4);
      stored.zeros[at] = head[64 + r];
    }
  }
}

template <bool kPack>
void walk_groups(const PackedMatrix& matrix, const Source<kPack>& stored, const int64_t (&index)[kTileRows],
                 Walk<kPack>& walk) {
  for (int64_t group = 0; group < matrix.columns / matrix.group_size; ++group) {
    move_group_head<kPack>(matrix, stored, index, group, walk.rows, walk.unit.tile);
    walk.unit.tile += 80;
    int64_t blocks = matrix.group_size / kBlock;
    if (matrix.layout == Layout::I4) {
      walk.template run<move_codes4<kPack>>({16, 256}, blocks);
    } else {
      walk.template run<move_codes8<kPack>>({32, 512}, blocks);
    }
  }
}

template <bool kPack>
void walk_tile(const PackedMatrix& matrix, const Source<kPack>& stored, const int64_t (&index)[kTileRows],
               Walk<kPack>& walk) {
  int64_t columns = matrix.columns, blocks = columns / kBlock, supers = columns / kSuperBlock;
  switch (matrix.layout) {
    case Layout::F32:
      walk.template run<move_words<kPack>>({64, 1024}, columns / 16);
      return walk.template run<move_word<kPack>>({4, 64}, columns % 16);
    case Layout::F16:
    case Layout::BF16:
      walk.template run<move_halves<kPack>>({64, 1024}, columns / 32);
      return walk.template run<move_half<kPack>>({2, 32}, columns % 32);
    case Layout::Q4_0:
    case Layout::IQ4_NL: return walk.template run<move_q4_0<kPack>>({18, 288}, blocks);
    case Layout::Q4_1: return walk.template run<move_q4_1<kPack>>({20, 320}, blocks);
    case Layout::Q5_0: return walk.template run<move_q5_0<kPack>>({22, 352}, blocks);
    case Layout::Q5_1: return walk.template run<move_q5_1<kPack>>({24, 384}, blocks);
    case Layout::Q8_0: return walk.template run<move_q8_0<kPack>>({34, 544}, blocks);
    case Layout::MXFP4: return walk.template run<move_mxfp4<kPack>>({17, 272}, blocks);
    case Layout::Q4_K: return walk.template run<move_q4_k<kPack>>({144, 2304}, supers);
    case Layout::Q5_K: return walk.template run<move_q5_k<kPack>>({176, 2816}, supers);
    case Layout::Q6_K: return walk.template run<move_q6_k<kPack>>({210, 3360}, supers);
    case Layout::Q3_K: return walk.template run<move_q3_k<kPack>>({110, 1824}, supers);
    case Layout::Q2_K: return walk.template run<move_q2_k<kPack>>({84, 1344}, supers);
    case Layout::IQ4_XS: return walk.template run<move_iq4_xs<kPack>>({136, 2208}, supers);
    case Layout::I4:
    case Layout::I8: return walk_groups<kPack>(matrix, stored, index, walk);
    case Layout::Count: break;
  }
}

int64_t stored_row(const StoredRows& stored, int64_t row) { return stored.order ? stored.order[row] : row; }
int64_t stored_row(const RestoredRows&, int64_t row) { return row; }

template <bool kPack>
void walk_tiles(const PackedMatrix& matrix, const Source<kPack>& stored, int64_t first_tile, int64_t last_tile,
                typename Unit<kPack>::Tile* tiles) {
  uint8_t spare[kLargestStep];
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    Walk<kPack> walk{{{}, tiles + tile * matrix.tile_bytes()}, matrix.rows_in(tile)};
    int64_t index[kTileRows] = {};
    for (int64_t r = 0; r < kTileRows; ++r) {
      if (r < walk.rows) {
        index[r] = stored_row(stored, tile * kTileRows + r);
        walk.unit.rows[r] = stored.data + index[r] * stored.stride;
      } else if constexpr (kPack) {
        walk.unit.rows[r] = kZeros;
      } else {
        walk.unit.rows[r] = spare;
      }
    }
    walk_tile<kPack>(matrix, stored, index, walk);
  }
}

}  // namespace

int64_t stored_row_bytes(Layout layout, int64_t columns) {
  switch (layout) {
    case Layout::F32: return 4 * columns;
    case Layout::F16:
    case Layout::BF16: return 2 * columns;
    case Layout::Q4_0:
    case Layout::IQ4_NL: return columns / 32 * 18;
    case Layout::Q4_1: return columns / 32 * 20;
    case Layout::Q5_0: return columns / 32 * 22;
    case Layout::Q5_1: return columns / 32 * 24;
    case Layout::Q8_0: return columns / 32 * 34;
    case Layout::MXFP4: return columns / 32 * 17;
    case Layout::Q4_K: return columns / 256 * 144;
    case Layout::Q5_K: return columns / 256 * 176;
    case Layout::Q6_K: return columns / 256 * 210;
    case Layout::Q3_K: return columns / 256 * 110;
    case Layout::Q2_K: return columns / 256 * 84;
    case Layout::IQ4_XS: return columns / 256 * 136;
    case Layout::I4: return columns / 2;
    case Layout::I8: return columns;
    case Layout::Count: break;
  }
  return 0;
}

void pack_tiles(const PackedMatrix& target, const StoredRows& source, int64_t first_tile, int64_t last_tile,
                uint8_t* destination) {
  walk_tiles<true>(target, source, first_tile, last_tile, destination);
}

void unpack_rows(const PackedMatrix& source, const RestoredRows& target, int64_t first_tile, int64_t last_tile) {
  walk_tiles<false>(source, target, first_tile, last_tile, source.data);
}

}  // namespace llmctl
