// Linear layers over float activations: weights become exactly what their format's definition says, then one fma a column,
// in order. The same for every number of tokens, so a token's bits do not depend on it.
#pragma once

#include "linear_int8.inl.hpp"

namespace llmctl::LLMCTL_ISA {

constexpr int64_t kFloatTiles = 2;      // tiles at a time: their sums are independent chains of fma
constexpr int64_t kFloatColumns = 256;  // columns expanded at a time
constexpr int64_t kFloatTokenBlock = 64;

struct LoadF32 {
  static constexpr int64_t kBytes = 64;
  static LLMCTL_INLINE F32 load(const uint8_t* p) { return load_f32((const float*)p); }
};
struct LoadF16 {
  static constexpr int64_t kBytes = 32;
  static LLMCTL_INLINE F32 load(const uint8_t* p) { return load_f16((const uint16_t*)p); }
};
struct LoadBF16 {
  static constexpr int64_t kBytes = 32;
  static LLMCTL_INLINE F32 load(const uint8_t* p) { return load_bf16((const uint16_t*)p); }
};

// One block as float32 [32 columns][16 rows].
template <class L>
LLMCTL_INLINE void block_floats(const uint8_t* unit, int64_t block, const F32* scale, const F32* minimum, I32 zero, float* out) {
  U8 codes[8];
  L::codes(unit, block, codes);
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    int s = L::kScales == 2 ? g / 4 : 0;
    for_4([&](auto c) {
      I32 code = byte_i32<c.value>(codes[g]);
      if constexpr (L::kZero) code = sub(code, zero);
      if constexpr (L::kOffset != 0) code = sub(code, set_i32(L::kOffset));
      F32 value = mul(to_f32(code), scale[s]);
      if (L::kMinimum) value = add(value, minimum[s]);
      store_f32(out + kTileRows * (4 * g + c.value), value);
    });
  }
}

// Columns first .. first + count - 1 (multiples of 32) of a tile as float32 [count][16].
template <class L> void expand(const PackedMatrix& matrix, int64_t tile, int64_t first, int64_t count, float* out) {
  for_blocks<L>(matrix, tile, first / kBlock, count / kBlock,
                [&](const uint8_t* unit, int64_t block, const F32* scale, const F32* minimum) {
                  I32 zero = zero_i32();
                  if constexpr (L::kZero) zero = L::zero(unit);
                  block_floats<L>(unit, block, scale, minimum, zero, out);
                  out += kBlock * kTileRows;
                });
}

template <class Load> void expand_plain(const PackedMatrix& matrix, int64_t tile, int64_t first, int64_t count, float* out) {
  const uint8_t* p = matrix.tile(tile) + first * Load::kBytes;
  for (int64_t c = 0; c < count; ++c) store_f32(out + kTileRows * c, Load::load(p + c * Load::kBytes));
}

// R tiles that are read side by side, `stride` bytes apart. end and next: of all tiles, see ahead_of; a null end: they are copies
// in the cache.
struct SideBySide {
  const uint8_t* weight;
  int64_t stride;
  const uint8_t *end, *next;
};

// Asks for the line that each tile reads kAhead after byte `at`: what follows its end is R tiles further on.
template <int R> LLMCTL_INLINE void ask_ahead(const SideBySide& tiles, int64_t at) {
  const int64_t turn = at + kAhead < tiles.stride ? 0 : (R - 1) * tiles.stride;
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) ask(ahead_of(tiles.weight + r * tiles.stride + at + turn, tiles.end, tiles.next));
}

// T tokens times R tiles over `count` columns. sums [T][kFloatTiles][16].
template <class Load, int R, int T>
void add_columns(const SideBySide& tiles, const float* x, int64_t x_stride, int64_t count, float* sums, bool fresh) {
  constexpr int64_t kStride = kFloatTiles * kTileRows;
  F32 y[T][R];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) y[t][r] = fresh ? zero_f32() : load_f32(sums + t * kStride + r * kTileRows);
  const uint8_t* weight = tiles.weight;
  for (int64_t c = 0; c < count; ++c, weight += Load::kBytes) {
    if (tiles.end && c * Load::kBytes % 64 == 0) ask_ahead<R>(tiles, c * Load::kBytes);
    F32 w[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) w[r] = Load::load(weight + r * tiles.stride);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      F32 value = set_f32(x[t * x_stride + c]);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) y[t][r] = fma(w[r], value, y[t][r]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) store_f32(sums + t * kStride + r * kTileRows, y[t][r]);
}

// Calls f(Index<count>) for a count from 1 to N; for 0 nothing.
template <int N, class F> LLMCTL_INLINE void with_count(int64_t count, F f) {
  if (count == N) return f(Index<N>{});
  if constexpr (N > 1) with_count<N - 1>(count, f);
}

// All tokens in as few groups as there can be: each reads the weights once more.
template <class Load, int R>
void add_columns_to_all(const SideBySide& tiles, const Activations& x, int64_t first, int64_t count, float* sums) {
  for (int64_t token = 0; token < x.tokens; token += kFloatTokens) {
    const int64_t left = x.tokens - token;
    with_count<kFloatTokens>(left < kFloatTokens ? left : kFloatTokens, [&](auto size) {
      add_columns<Load, R, decltype(size)::value>(tiles, x.values + token * x.value_stride + first, x.value_stride, count,
                                                  sums + token * kFloatTiles * kTileRows, first == 0);
    });
  }
}

// R neighbouring tiles, up to kFloatTokenBlock tokens, straight from plain weights.
template <class Load, int R>
void plain_tiles(const TileRange& tiles, int64_t tile, const Activations& x, float*, float* sums) {
  const PackedMatrix& matrix = tiles.matrix;
  add_columns_to_all<Load, R>({matrix.tile(tile), matrix.tile_bytes(), matrix.tile(tiles.last), tiles.next}, x, 0, matrix.columns,
                              sums);
}

using Expand = void (*)(const PackedMatrix&, int64_t tile, int64_t first, int64_t count, float* out);

template <Expand kExpand, int R>
void expanded_tiles(const TileRange& tiles, int64_t tile, const Activations& x, float* weights, float* sums) {
  const PackedMatrix& matrix = tiles.matrix;
  for (int64_t first = 0; first < matrix.columns; first += kFloatColumns) {
    int64_t count = matrix.columns - first < kFloatColumns ? matrix.columns - first : kFloatColumns;
    for (int r = 0; r < R; ++r) kExpand(matrix, tile + r, first, count, weights + r * kFloatColumns * kTileRows);
    const int64_t stride = kFloatColumns * kTileRows * sizeof(float);
    add_columns_to_all<LoadF32, R>({(const uint8_t*)weights, stride, nullptr, nullptr}, x, first, count, sums);
  }
}

using Tiles = void (*)(const TileRange&, int64_t tile, const Activations& x, float* weights, float* sums);

// tiles_1 and tiles_2: the same for one tile and for two.
inline void linear_float(const TileRange& tiles, const Activations& x, float* y, int64_t stride, Tiles tiles_1, Tiles tiles_2) {
  const int64_t weights = kFloatTiles * kFloatColumns * kTileRows, width = kFloatTiles * kTileRows;
  float* scratch = (float*)thread_scratch((weights + kFloatTokenBlock * width) * sizeof(float));
  float* sums = scratch + weights;
  for (int64_t token = 0; token < x.tokens; token += kFloatTokenBlock) {
    int64_t count = x.tokens - token < kFloatTokenBlock ? x.tokens - token : kFloatTokenBlock;
    for (int64_t tile = tiles.first; tile < tiles.last; tile += kFloatTiles) {
      int64_t some = tiles.last - tile < kFloatTiles ? tiles.last - tile : kFloatTiles;
      (some == 1 ? tiles_1 : tiles_2)(tiles, tile, token_range(x, token, count), scratch, sums);
      float* out = y + token * stride + kTileRows * (tile - tiles.first);
      for (int64_t t = 0; t < count; ++t)
        for (int64_t r = 0; r < some; ++r)
          store_rows(out + t * stride + r * kTileRows, load_f32(sums + t * width + r * kTileRows), tiles.matrix.rows_in(tile + r));
    }
  }
}

}  // namespace llmctl::LLMCTL_ISA
