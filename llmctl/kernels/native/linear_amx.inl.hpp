// Linear layers over int8 activations with AMX, for twelve tokens and more of formats with one scale a block. The integer
// sums of a block come out of the tile unit exactly as they come out of a dot-product instruction, and the float steps after
// it are those of linear_int8.inl.hpp, so a token's bits are the same in both.
//
// Tile A: 16 tokens (or what is left of them) x the 32 columns of a block; tile B: their codes, four columns a row of B, 16
// rows of the matrix wide; tile C: the sums, one row a token. Codes are made signed while they are unpacked, which spares the
// correction for offsets (I8 with zero points keeps it: its differences do not fit a byte).
#pragma once

#include <cstring>

#include "linear_int8.inl.hpp"
#include "transpose.inl.hpp"

namespace llmctl::LLMCTL_ISA {

constexpr int64_t kAmxTokens = 12;       // from here on it pays
constexpr int kWide = 16, kNarrow = 8;   // tokens of a group
constexpr int64_t kAmxChunkBlocks = 32;  // blocks unpacked at a time
constexpr int64_t kAmxTokenBlock = 256;  // tokens that pass over an unpacked chunk

// What is left of a Shape here. Start: a correction of the integer sum by a row's zero point.
template <bool Minimum, bool Start> struct AmxShape { static constexpr bool kMinimum = Minimum, kStart = Start; };
template <class L> using AmxShapeOf = AmxShape<L::kMinimum, L::kZero && (L::kMaxCode > 127)>;

// What T tokens bring to a block beside their codes. Tokens that are missing are zero.
template <class S, int T> struct Panel {
  float scale[T];
  float sum[S::kMinimum ? T : 1];     // scale * sum of codes
  int32_t start[S::kStart ? T : 1];   // -sum of codes
};

// One token's scales and sums of 16 blocks, `left` of which exist.
struct TokenScalars {
  const float* scales;
  const int32_t* sums;   // of halves of blocks
  int64_t left;

  LLMCTL_INLINE F32 scale() const { return load_f32_first(scales, (int)left); }
  LLMCTL_INLINE I32 sum() const {
    __m512i low = _mm512_maskz_loadu_epi32(mask(2 * left), sums), high = _mm512_maskz_loadu_epi32(mask(2 * left - 16), sums + 16);
    __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return {_mm512_add_epi32(_mm512_permutex2var_epi32(low, even, high), _mm512_permutex2var_epi32(low, odd, high))};
  }
  static LLMCTL_INLINE __mmask16 mask(int64_t n) { return (__mmask16)(n <= 0 ? 0 : n >= 16 ? 0xFFFF : (1u << n) - 1); }
};

// row(token) has 16 blocks in its lanes; out[block * stride + token].
template <int T, class F> LLMCTL_INLINE void fill_transposed(int64_t count, int64_t left, float* out, int64_t stride, F row) {
  F32 rows[16];
#pragma GCC unroll 16
  for (int t = 0; t < 16; ++t) rows[t] = t < count ? row(t) : zero_f32();
  transpose(rows);
#pragma GCC unroll 16
  for (int b = 0; b < 16; ++b)
    if (b < left) _mm512_mask_storeu_ps(out + b * stride, TokenScalars::mask(T), rows[b].v);
}

template <class S, int T> void fill_panels(const Activations& x, int64_t token, int64_t count, Panel<S, T>* panels) {
  const int64_t blocks = x.columns / kBlock, stride = sizeof(Panel<S, T>) / sizeof(float);
  for (int64_t b = 0; b < blocks; b += 16, panels += 16) {
    const int64_t left = blocks - b < 16 ? blocks - b : 16;
    auto scalars = [&](int t) LLMCTL_LAMBDA_INLINE {
      int64_t block = (token + t) * (x.columns_padded / kBlock) + b;
      return TokenScalars{x.scales + block, x.sums + 2 * block, left};
    };
    fill_transposed<T>(count, left, panels->scale, stride, [&](int t) LLMCTL_LAMBDA_INLINE { return scalars(t).scale(); });
    if constexpr (S::kMinimum)
      fill_transposed<T>(count, left, panels->sum, stride, [&](int t) LLMCTL_LAMBDA_INLINE {
        return mul(scalars(t).scale(), to_f32(scalars(t).sum()));
      });
    if constexpr (S::kStart)
      fill_transposed<T>(count, left, (float*)panels->start, stride, [&](int t) LLMCTL_LAMBDA_INLINE {
        return from_bits(sub(zero_i32(), scalars(t).sum()));
      });
  }
}

struct AmxChunk {
  U8 codes[kAmxChunkBlocks][8];   // signed
  F32 scale[kAmxChunkBlocks];
  F32 minimum[kAmxChunkBlocks];
  I32 zero[kAmxChunkBlocks];
};

template <class L> LLMCTL_INLINE void signed_codes(const uint8_t* unit, int64_t block, U8* codes) {
  L::codes(unit, block, codes);
  __m512i offset = _mm512_set1_epi8((char)(L::kMaxCode > 127 ? 128 : L::kOffset));
  if constexpr (L::kZero && L::kMaxCode <= 127) offset = mul(L::zero(unit), set_i32(0x01010101)).v;
  for_8([&](auto g) { codes[g.value].v = _mm512_sub_epi8(codes[g.value].v, offset); });
}

template <class L> LLMCTL_INLINE I32 amx_zero(const uint8_t* unit) {   // as mul_i16 wants it
  if constexpr (AmxShapeOf<L>::kStart) return bit_and(sub(L::zero(unit), set_i32(128)), set_i32(0xFFFF));
  else return zero_i32();
}

template <class L>
void unpack_signed(const PackedMatrix& matrix, int64_t tile, int64_t first, int64_t count, AmxChunk& chunk) {
  int64_t at = 0;
  for_blocks<L>(matrix, tile, first, count, [&](const uint8_t* unit, int64_t block, const F32* scale, const F32* minimum) {
    signed_codes<L>(unit, block, chunk.codes[at]);
    chunk.scale[at] = *scale;
    if (L::kMinimum) chunk.minimum[at] = *minimum;
    if (AmxShapeOf<L>::kStart) chunk.zero[at] = amx_zero<L>(unit);
    ++at;
  });
}

// Tile registers: 0 is B; 1 is A and 2, 3 its C in turns for 16 tokens; 4, 5, 6 the same for what is left of them.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows, int64_t bytes) {
    rows[tile] = (uint8_t)tile_rows;
    row_bytes[tile] = (uint16_t)bytes;
  }
};

LLMCTL_INLINE void configure_tiles(int64_t left) {
  TileConfig config;
  config.set(0, 8, 64);
  for (int set = 0; set < (left ? 2 : 1); ++set) {
    int64_t tokens = set ? left : kWide;
    config.set(1 + 3 * set, tokens, kBlock);
    config.set(2 + 3 * set, tokens, 64);
    config.set(3 + 3 * set, tokens, 64);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));   // GCC's own says that it reads the first 8 bytes only
}

// The tile loads of GCC do not say that they read memory.
LLMCTL_INLINE void memory_is_written() { asm volatile("" ::: "memory"); }

#define LLMCTL_MULTIPLY(a, c)                            \
  _tile_zero(c);                                         \
  _tile_loadd(0, codes, 64);                             \
  _tile_loadd(a, x, stride);                             \
  _tile_dpbssd(c, a, 0);                                 \
  _tile_stored(c, sums, kTileRows * sizeof(int32_t))

template <bool Rest, int Turn> LLMCTL_INLINE void multiply(const U8* codes, const int8_t* x, int64_t stride, int32_t* sums) {
  if constexpr (!Rest && Turn == 0) { LLMCTL_MULTIPLY(1, 2); }
  if constexpr (!Rest && Turn == 1) { LLMCTL_MULTIPLY(1, 3); }
  if constexpr (Rest && Turn == 0) { LLMCTL_MULTIPLY(4, 5); }
  if constexpr (Rest && Turn == 1) { LLMCTL_MULTIPLY(4, 6); }
}
#undef LLMCTL_MULTIPLY

template <class S, int T>
LLMCTL_INLINE void add_sums(const int32_t* sums, F32 scale, F32 minimum, I32 zero, const Panel<S, T>& panel, F32* y) {
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    I32 sum = load_i32(sums + t * kTileRows);
    if (S::kStart) sum = add(sum, mul_i16(zero, set_i32(panel.start[t])));
    y[t] = fma(to_f32(sum), mul(scale, set_f32(panel.scale[t])), y[t]);
    if (S::kMinimum) y[t] = fma(minimum, set_f32(panel.sum[t]), y[t]);
  }
}

// A group of T tokens, or (Rest) the `tokens` that are left of one, times an unpacked chunk; y goes on where the chunk before
// stopped, its rows `y_stride` apart. Integer sums of tokens that are missing are anything; their scales are zero. The tile
// unit works two blocks ahead of the float steps: both want the same ports, and turns of two were the quickest.
template <class S, int T, bool Rest>
void amx_chunk(const AmxChunk& chunk, int64_t count, const int8_t* x, int64_t stride, const Panel<S, T>* panels,
               int64_t tokens, float* y, int64_t y_stride, bool fresh) {
  alignas(64) int32_t sums[4][T * kTileRows];
  F32 total[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) total[t] = fresh || (Rest && t >= tokens) ? zero_f32() : load_f32(y + y_stride * t);
  auto multiply_block = [&](int64_t b, auto turn) LLMCTL_LAMBDA_INLINE {
    if (b < count) multiply<Rest, turn.value % 2>(chunk.codes[b], x + b * kBlock, stride, sums[turn.value]);
  };
  auto add_block = [&](int64_t b, auto turn) LLMCTL_LAMBDA_INLINE {
    if (b < count) add_sums<S, T>(sums[turn.value], chunk.scale[b], chunk.minimum[b], chunk.zero[b], panels[b], total);
  };
  memory_is_written();
  multiply_block(0, Index<0>{}), multiply_block(1, Index<1>{});
  for (int64_t b = 0; b < count; b += 4) {
    multiply_block(b + 2, Index<2>{}), multiply_block(b + 3, Index<3>{});
    add_block(b, Index<0>{}), add_block(b + 1, Index<1>{});
    multiply_block(b + 4, Index<0>{}), multiply_block(b + 5, Index<1>{});
    add_block(b + 2, Index<2>{}), add_block(b + 3, Index<3>{});
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
    if (!Rest || t < tokens) store_f32(y + y_stride * t, total[t]);
}

// Calls f(Index<T>, Index<Rest>, token, tokens of the group that exist).
template <class F> LLMCTL_INLINE void for_amx_groups(int64_t tokens, F f) {
  int64_t token = 0;
  for (; tokens - token >= kWide; token += kWide) f(Index<kWide>{}, Index<false>{}, token, (int64_t)kWide);
  if (tokens - token > kNarrow) f(Index<kWide>{}, Index<true>{}, token, tokens - token);
  else if (tokens > token) f(Index<kNarrow>{}, Index<true>{}, token, tokens - token);
}

template <class S> int64_t panel_bytes(int64_t tokens, int64_t blocks) {
  int64_t bytes = 0;
  for_amx_groups(tokens, [&](auto size, auto, int64_t, int64_t) { bytes += blocks * sizeof(Panel<S, size.value>); });
  return bytes;
}

template <class S> void fill_all_panels(const Activations& x, uint8_t* panels) {
  for_amx_groups(x.tokens, [&](auto size, auto, int64_t token, int64_t count) {
    fill_panels<S, size.value>(x, token, count, (Panel<S, size.value>*)panels);
    panels += x.columns / kBlock * sizeof(Panel<S, size.value>);
  });
}

template <class S>
void amx_chunk_to_all(const AmxChunk& chunk, int64_t first, int64_t count, const Activations& x, const uint8_t* panels, float* y,
                      int64_t stride) {
  for_amx_groups(x.tokens, [&](auto size, auto rest, int64_t token, int64_t tokens) {
    using Group = Panel<S, size.value>;
    amx_chunk<S, size.value, rest.value>(chunk, count, x.codes + token * x.columns_padded + first * kBlock, x.columns_padded,
                                         (const Group*)panels + first, tokens, y + token * stride, stride, first == 0);
    panels += x.columns / kBlock * sizeof(Group);
  });
}

// Up to kAmxTokenBlock tokens. A tile with padding is summed beside y, which has no place for it.
template <class L>
void amx_tiles(const TileRange& tiles, const Activations& x, float* y, int64_t stride) {
  using S = AmxShapeOf<L>;
  const int64_t blocks = x.columns / kBlock, beside_bytes = x.tokens * kTileRows * sizeof(float);
  auto* scratch = (uint8_t*)thread_scratch(sizeof(AmxChunk) + beside_bytes + panel_bytes<S>(x.tokens, blocks));
  AmxChunk& chunk = *(AmxChunk*)scratch;
  float* beside = (float*)(scratch + sizeof(AmxChunk));
  uint8_t* panels = scratch + sizeof(AmxChunk) + beside_bytes;
  fill_all_panels<S>(x, panels);
  for (int64_t tile = tiles.first; tile < tiles.last; ++tile, y += kTileRows) {
    const int64_t rows = tiles.matrix.rows_in(tile);
    for (int64_t first = 0; first < blocks; first += kAmxChunkBlocks) {
      int64_t count = blocks - first < kAmxChunkBlocks ? blocks - first : kAmxChunkBlocks;
      unpack_signed<L>(tiles.matrix, tile, first, count, chunk);
      if (rows == kTileRows) amx_chunk_to_all<S>(chunk, first, count, x, panels, y, stride);
      else amx_chunk_to_all<S>(chunk, first, count, x, panels, beside, kTileRows);
    }
    for (int64_t t = 0; rows < kTileRows && t < x.tokens; ++t) store_rows(y + t * stride, load_f32(beside + kTileRows * t), rows);
  }
}

template <class L>
void linear_amx(const TileRange& tiles, const Activations& x, float* y, int64_t stride) {
  configure_tiles(x.tokens % kWide);
  for (int64_t token = 0; token < x.tokens; token += kAmxTokenBlock) {
    int64_t count = x.tokens - token < kAmxTokenBlock ? x.tokens - token : kAmxTokenBlock;
    amx_tiles<L>(tiles, token_range(x, token, count), y + token * stride, stride);
  }
  _tile_release();
}

}  // namespace llmctl::LLMCTL_ISA
