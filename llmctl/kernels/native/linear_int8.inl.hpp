// Linear layers over int8 activations. Within a block of 32 columns (or each half of it) the sum is an exact integer; the
// float sums run along the columns in one order:
//   y = fma(float(sum), scale_row * scale_x, y), then, for formats with a minimum, y = fma(minimum_row, scale_x * sum_x, y).
// So it does not matter for a token's bits how many tokens a kernel takes at a time, or whether the codes come straight
// from the tile (few tokens: the weights are read once, as fast as memory gives them) or were unpacked before (many).
#pragma once

#include <cstring>

#include "kernels.hpp"
#include "linear_formats.inl.hpp"
#include "scratch.hpp"

namespace llmctl::LLMCTL_ISA {

using Linear = void (*)(const TileRange&, const Activations&, float* y, int64_t stride);

constexpr int64_t kDirectTokens = kDotTokens;       // up to here codes are unpacked in registers
constexpr int64_t kAhead = 8192;                    // bytes asked for ahead: the machine's own prefetcher stops at every page
constexpr int64_t kChunkBlocks = 32 / kTilesAtOnce; // unpacked at a time; with the activations beside it fits the L1 cache
constexpr int64_t kTokenBlock = 128;                // tokens that pass over an unpacked chunk

// What T tokens bring to a block beside their codes: the scale; scale * sum for a minimum; and what the integer sum starts
// from, -kStart * sum, or -sum where a zero point of the row multiplies it.
template <class S, int T> struct BlockScalars {
  static constexpr bool kHasStart = S::kZero || S::kStart != 0;
  float scale[T];
  float sum[S::kMinimum ? S::kScales * T : 1];
  int32_t start[kHasStart ? S::kScales * T : 1];
};

// Tokens token .. token + count - 1; up to T the others stay as they are.
template <class S, int T>
LLMCTL_INLINE void fill_scalars(const Activations& x, int64_t token, int64_t count, BlockScalars<S, T>* out) {
  using Scalars = BlockScalars<S, T>;
  int64_t blocks = x.columns / kBlock;
  for (int64_t t = 0; t < count; ++t) {
    const float* scales = x.scales + (token + t) * (x.columns_padded / 32);
    const int32_t* sums = x.sums + (token + t) * (x.columns_padded / 16);
    for (int64_t b = 0; b < blocks; ++b) {
      int32_t sum[2] = {sums[2 * b], sums[2 * b + 1]};
      if (S::kScales == 1) sum[0] += sum[1];
      out[b].scale[t] = scales[b];
      for (int s = 0; s < S::kScales; ++s) {
        if (S::kMinimum) out[b].sum[s * T + t] = scales[b] * (float)sum[s];
        if (Scalars::kHasStart) out[b].start[s * T + t] = S::kZero ? -sum[s] : -S::kStart * sum[s];
      }
    }
  }
}

// One block of a tile. codes in dot form; scale and minimum: kScales each; zero as of zero_form.
struct Block {
  const U8* codes;
  const F32 *scale, *minimum;
  I32 zero;
};

// Adds one block to the sums y[tile][T] of T tokens. Tiles take turns with a group of columns, so that they share the load of
// its activations.
template <class S, int T, int Tiles>
LLMCTL_INLINE void add_block(const Block* block, const int8_t* x, int64_t stride, const BlockScalars<S, T>& scalars, F32 (*y)[T]) {
  constexpr int kGroups = 8 / S::kScales, kTurn = Tiles > 1 ? 1 : kGroups;
#pragma GCC unroll 2
  for (int s = 0; s < S::kScales; ++s) {
    I32 sums[Tiles][T];
#pragma GCC unroll 2
    for (int i = 0; i < Tiles; ++i) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        sums[i][t] = BlockScalars<S, T>::kHasStart ? set_i32(scalars.start[s * T + t]) : zero_i32();
        if (S::kZero) sums[i][t] = mul_i16(block[i].zero, sums[i][t]);
      }
    }
#pragma GCC unroll 8
    for (int g = s * kGroups; g < (s + 1) * kGroups; g += kTurn) {
#pragma GCC unroll 2
      for (int i = 0; i < Tiles; ++i) dot<S::kMaxCode, kTurn, T>(block[i].codes + g, x + 4 * g, stride, sums[i]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < Tiles; ++i) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        y[i][t] = fma(to_f32(sums[i][t]), mul(block[i].scale[s], set_f32(scalars.scale[t])), y[i][t]);
        if (S::kMinimum) y[i][t] = fma(block[i].minimum[s], set_f32(scalars.sum[s * T + t]), y[i][t]);
      }
    }
  }
}

template <class L> LLMCTL_INLINE void dot_codes(const uint8_t* unit, int64_t block, U8* codes) {
  L::codes(unit, block, codes);
  if (L::kMaxCode > 127)
    for_8([&](auto g) { codes[g.value] = dot_form(codes[g.value]); });
}

// Zero points less what dot_form takes from the codes, as mul_i16 wants them.
template <class L> LLMCTL_INLINE I32 zero_form(const uint8_t* unit) {
  if constexpr (L::kZero) return bit_and(sub(L::zero(unit), set_i32(L::kFormOffset)), set_i32(0xFFFF));
  else return zero_i32();
}

LLMCTL_INLINE void store_rows(float* y, F32 a, int64_t rows) {
  if (rows == kTileRows) store_f32(y, a);
  else store_f32_first(y, a, (int)rows);
}

// The second-level cache is asked: the first would have the core wait for the oldest line (10 to 20 % slower on Sapphire Rapids).
LLMCTL_INLINE void ask(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// What is read kAhead after `at`: further on in the same tiles, or what comes next. `at` itself where nothing does.
LLMCTL_INLINE const uint8_t* ahead_of(const uint8_t* at, const uint8_t* end, const uint8_t* next) {
  const uint8_t* ahead = at + kAhead;
  return ahead < end ? ahead : next ? next + (ahead - end) : at;
}

// T tokens times one tile, codes unpacked on the way; the first `count` results are stored.
template <class L, int T>
void direct_tile(const TileRange& tiles, int64_t tile, const int8_t* x, int64_t x_stride, const BlockScalars<L, T>* scalars,
                 float* y, int64_t stride, int64_t count) {
  const PackedMatrix& matrix = tiles.matrix;
  const int64_t blocks = unit_blocks<L>(matrix), units = matrix.columns / (blocks * kBlock);
  const int64_t unit_bytes = layout_info(matrix.layout, matrix.group_size).tile_bytes;
  const uint8_t *unit = matrix.tile(tile), *end = matrix.tile(tiles.last);
  F32 sums[1][T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) sums[0][t] = zero_f32();
  for (int64_t u = 0; u < units; ++u, unit += unit_bytes) {
    const uint8_t* ahead = ahead_of(unit, end, tiles.next);
    F32 scale[L::kUnitScales], minimum[L::kUnitScales];
    L::scales(unit, scale, minimum);
    I32 zero = zero_form<L>(unit);
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, ++scalars) {
      for (int64_t i = unit_bytes * b / blocks / 64 * 64; i < unit_bytes * (b + 1) / blocks; i += 64) ask(ahead + i);
      U8 codes[8];
      dot_codes<L>(unit, b, codes);
      int64_t first = scale_index<L>(b);
      Block block = {codes, scale + first, minimum + first, zero};
      add_block<L, T, 1>(&block, x, x_stride, *scalars, sums);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
    if (t < count) store_rows(y + t * stride, sums[0][t], matrix.rows_in(tile));
}

// Up to T tokens. Fewer are moved beside tokens of zeros.
template <class L, int T>
void direct(const TileRange& tiles, const Activations& x, float* y, int64_t stride) {
  const int64_t scalar_bytes = x.columns / kBlock * sizeof(BlockScalars<L, T>), missing = T - x.tokens;
  auto* scratch = (int8_t*)thread_scratch(scalar_bytes + (missing ? T * x.columns_padded : 0));
  auto* scalars = (BlockScalars<L, T>*)scratch;
  const int8_t* codes = x.codes;
  if (missing) {
    const int64_t bytes = x.tokens * x.columns_padded;
    codes = scratch + scalar_bytes;
    std::memset(scratch, 0, scalar_bytes);
    std::memcpy(scratch + scalar_bytes, x.codes, bytes);
    std::memset(scratch + scalar_bytes + bytes, 0, missing * x.columns_padded);
  }
  fill_scalars<L, T>(x, 0, x.tokens, scalars);
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile, y += kTileRows)
    direct_tile<L, T>(tiles, tile, codes, x.columns_padded, scalars, y, stride, x.tokens);
}

// Some blocks of a tile, unpacked.
struct Chunk {
  U8 codes[kChunkBlocks][8];
  F32 scale[kChunkBlocks][2];
  F32 minimum[kChunkBlocks][2];
  I32 zero[kChunkBlocks];
};

// Calls f(unit, block within it, scales, minima) for `count` blocks of a tile from block `first` on; scales and minima are the
// block's own, kScales each.
template <class L, class F>
LLMCTL_INLINE void for_blocks(const PackedMatrix& matrix, int64_t tile, int64_t first, int64_t count, F f) {
  const int64_t blocks = unit_blocks<L>(matrix), unit_bytes = layout_info(matrix.layout, matrix.group_size).tile_bytes;
  const uint8_t* unit = matrix.tile(tile) + first / blocks * unit_bytes;
  for (int64_t b = first % blocks; count > 0; b = 0, unit += unit_bytes) {
    F32 scale[L::kUnitScales], minimum[L::kUnitScales];
    L::scales(unit, scale, minimum);
    for (; b < blocks && count > 0; ++b, --count) f(unit, b, scale + scale_index<L>(b), minimum + scale_index<L>(b));
  }
}

template <class L> void unpack_chunk(const PackedMatrix& matrix, int64_t tile, int64_t first, int64_t count, Chunk& chunk) {
  int64_t at = 0;
  for_blocks<L>(matrix, tile, first, count, [&](const uint8_t* unit, int64_t block, const F32* scale, const F32* minimum) {
    dot_codes<L>(unit, block, chunk.codes[at]);
    for (int s = 0; s < L::kScales; ++s) {
      chunk.scale[at][s] = scale[s];
      if (L::kMinimum) chunk.minimum[at][s] = minimum[s];
    }
    if (L::kZero) chunk.zero[at] = zero_form<L>(unit);
    ++at;
  });
}

// T tokens times the same unpacked chunk of some tiles; y [Tiles][T][16] goes on where the chunk before stopped.
template <class S, int T, int Tiles>
void add_chunk(const Chunk* chunks, int64_t count, const int8_t* x, int64_t x_stride, const BlockScalars<S, T>* scalars, float* y,
               bool fresh) {
  F32 sums[Tiles][T];
#pragma GCC unroll 16
  for (int i = 0; i < Tiles * T; ++i) sums[i / T][i % T] = fresh ? zero_f32() : load_f32(y + kTileRows * i);
  for (int64_t b = 0; b < count; ++b, x += kBlock, ++scalars) {
    Block blocks[Tiles];
#pragma GCC unroll 2
    for (int i = 0; i < Tiles; ++i) blocks[i] = {chunks[i].codes[b], chunks[i].scale[b], chunks[i].minimum[b], chunks[i].zero[b]};
    add_block<S, T, Tiles>(blocks, x, x_stride, *scalars, sums);
  }
#pragma GCC unroll 16
  for (int i = 0; i < Tiles * T; ++i) store_f32(y + kTileRows * i, sums[i / T][i % T]);
}

// Calls f(Index<T>, token) for tokens in groups of T, then T / 2 … 1.
template <int T, class F> LLMCTL_INLINE void for_groups(int64_t token, int64_t end, F f) {
  for (; end - token >= T; token += T) f(Index<T>{}, token);
  if constexpr (T > 1) for_groups<T / 2>(token, end, f);
}

// The shape alone decides what is done with unpacked blocks, so formats share this code.
template <class L> struct ShapeOf {
  using Type = Shape<L::kMaxCode, L::kScales, L::kOffset, L::kMinimum, L::kZero>;
};

// scalars and y: group of tokens after group.
template <class S, int Tiles>
void add_chunk_to_all(const Chunk* chunks, int64_t first, int64_t count, const Activations& x, const uint8_t* scalars, float* y) {
  const int64_t blocks = x.columns / kBlock;
  for_groups<kSharedTokens>(0, x.tokens, [&](auto size, int64_t token) {
    constexpr int kSize = decltype(size)::value;
    auto* group = (const BlockScalars<S, kSize>*)scalars;
    add_chunk<S, kSize, Tiles>(chunks, count, x.codes + token * x.columns_padded + first * kBlock, x.columns_padded,
                               group + first, y + Tiles * kTileRows * token, first == 0);
    scalars += blocks * sizeof(BlockScalars<S, kSize>);
  });
}

template <class S> void fill_all_scalars(const Activations& x, uint8_t* scalars) {
  for_groups<kSharedTokens>(0, x.tokens, [&](auto size, int64_t token) {
    constexpr int kSize = decltype(size)::value;
    fill_scalars<S, kSize>(x, token, kSize, (BlockScalars<S, kSize>*)scalars);
    scalars += x.columns / kBlock * sizeof(BlockScalars<S, kSize>);
  });
}

template <int Tiles>
LLMCTL_INLINE void store_sums(const PackedMatrix& matrix, int64_t tile, int64_t tokens, const float* sums, float* y, int64_t stride) {
  for_groups<kSharedTokens>(0, tokens, [&](auto size, int64_t token) {
    constexpr int kSize = decltype(size)::value;
    for (int i = 0; i < Tiles * kSize; ++i, sums += kTileRows)
      store_rows(y + (token + i % kSize) * stride + i / kSize * kTileRows, load_f32(sums), matrix.rows_in(tile + i / kSize));
  });
}

struct UnpackedScratch {
  Chunk* chunks;
  float* sums;
  uint8_t* scalars;
};

// Asks for blocks first .. first + count - 1 of a tile, which are unpacked once the chunk at hand has met all tokens.
template <class L> LLMCTL_INLINE void ask_for_chunk(const PackedMatrix& matrix, int64_t tile, int64_t first, int64_t count) {
  const int64_t blocks = unit_blocks<L>(matrix), unit_bytes = layout_info(matrix.layout, matrix.group_size).tile_bytes;
  const uint8_t* begin = matrix.tile(tile) + first / blocks * unit_bytes;
  const int64_t bytes = (first % blocks + count + blocks - 1) / blocks * unit_bytes;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(begin + i, 0, 2);
}

template <class L, int Tiles>
void unpacked_tiles(const PackedMatrix& matrix, int64_t tile, const Activations& x, const UnpackedScratch& scratch, float* y,
                    int64_t stride) {
  const int64_t blocks = x.columns / kBlock;
  for (int64_t first = 0; first < blocks; first += kChunkBlocks) {
    int64_t count = blocks - first < kChunkBlocks ? blocks - first : kChunkBlocks;
    for (int i = 0; i < Tiles; ++i) unpack_chunk<L>(matrix, tile + i, first, count, scratch.chunks[i]);
    const bool is_last = first + count == blocks;
    for (int i = 0; i < Tiles; ++i) ask_for_chunk<L>(matrix, tile + i + (is_last ? Tiles : 0), is_last ? 0 : first + count, kChunkBlocks);
    add_chunk_to_all<typename ShapeOf<L>::Type, Tiles>(scratch.chunks, first, count, x, scratch.scalars, scratch.sums);
  }
  store_sums<Tiles>(matrix, tile, x.tokens, scratch.sums, y, stride);
}

// Up to kTokenBlock tokens.
template <class L>
void unpacked(const TileRange& tiles, const Activations& x, float* y, int64_t stride) {
  using S = typename ShapeOf<L>::Type;
  const int64_t chunk_bytes = kTilesAtOnce * sizeof(Chunk), sums_bytes = kTilesAtOnce * x.tokens * kTileRows * sizeof(float);
  auto* memory = (uint8_t*)thread_scratch(chunk_bytes + sums_bytes + x.tokens * (x.columns / kBlock) * sizeof(BlockScalars<S, 1>));
  UnpackedScratch scratch = {(Chunk*)memory, (float*)(memory + chunk_bytes), memory + chunk_bytes + sums_bytes};
  fill_all_scalars<S>(x, scratch.scalars);
  int64_t tile = tiles.first;
  for (; tiles.last - tile >= kTilesAtOnce; tile += kTilesAtOnce, y += kTilesAtOnce * kTileRows)
    unpacked_tiles<L, kTilesAtOnce>(tiles.matrix, tile, x, scratch, y, stride);
  for (; tile < tiles.last; ++tile, y += kTileRows) unpacked_tiles<L, 1>(tiles.matrix, tile, x, scratch, y, stride);
}

// Tokens first .. first + count - 1.
LLMCTL_INLINE Activations token_range(const Activations& x, int64_t first, int64_t count) {
  Activations part = x;
  part.tokens = count;
  if (x.values) part.values = x.values + first * x.value_stride;
  if (x.codes) {
    part.codes = x.codes + first * x.columns_padded;
    part.scales = x.scales + first * (x.columns_padded / 32);
    part.sums = x.sums + first * (x.columns_padded / 16);
  }
  return part;
}

// Not every number of tokens has a kernel of its own.
constexpr int direct_size(int tokens) {
  int size = tokens <= 4 ? tokens : tokens <= 6 ? 6 : 8;
  return size <= kDirectTokens ? size : (int)kDirectTokens;
}

template <class L>
void linear_int8(const TileRange& tiles, const Activations& x, float* y, int64_t stride) {
  constexpr Linear kDirect[] = {direct<L, direct_size(1)>, direct<L, direct_size(2)>, direct<L, direct_size(3)>,
                                direct<L, direct_size(4)>, direct<L, direct_size(5)>, direct<L, direct_size(6)>,
                                direct<L, direct_size(7)>, direct<L, direct_size(8)>};
  if (x.tokens <= kDirectTokens) return kDirect[x.tokens - 1](tiles, x, y, stride);
  for (int64_t token = 0; token < x.tokens; token += kTokenBlock) {
    int64_t count = x.tokens - token < kTokenBlock ? x.tokens - token : kTokenBlock;
    unpacked<L>(tiles, token_range(x, token, count), y + token * stride, stride);
  }
}

}  // namespace llmctl::LLMCTL_ISA
