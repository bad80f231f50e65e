// The moves that packing is made of: transposes of 16-byte vectors, exchanges of bits, and `Unit`, which moves one piece of a
// stored block between 16 rows and a tile. Each is its own inverse (or names it), so one description of a layout serves both
// directions. Vector extensions of GCC and Clang: they become SSE2 or NEON.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "layouts.hpp"

namespace llmctl::moves {

typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));
typedef uint32_t U32x4 __attribute__((vector_size(16)));
typedef uint64_t U64x2 __attribute__((vector_size(16)));

#ifdef __clang__
#define LLMCTL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LLMCTL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a){__VA_ARGS__})
#endif
inline U8x16 zip_low(U8x16 a, U8x16 b) {
  return LLMCTL_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline U8x16 zip_high(U8x16 a, U8x16 b) {
  return LLMCTL_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
inline U8x16 even_bytes(U8x16 a, U8x16 b) {
  return LLMCTL_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline U16x8 zip_low(U16x8 a, U16x8 b) { return LLMCTL_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline U16x8 zip_high(U16x8 a, U16x8 b) { return LLMCTL_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
inline U32x4 zip_low(U32x4 a, U32x4 b) { return LLMCTL_SHUFFLE(a, b, 0, 4, 1, 5); }
inline U32x4 zip_high(U32x4 a, U32x4 b) { return LLMCTL_SHUFFLE(a, b, 2, 6, 3, 7); }
#undef LLMCTL_SHUFFLE

template <class Vector>
inline Vector load(const void* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class Vector>
inline void store(void* p, Vector v) { std::memcpy(p, &v, sizeof v); }

// N vectors of N lanes, in place.
template <int N, class Vector>
inline void transpose(Vector (&rows)[N]) {
  static_assert(N * sizeof(rows[0][0]) == sizeof(Vector));
  for (int stage = N; stage > 1; stage /= 2) {
    Vector next[N];
    for (int i = 0; i < N / 2; ++i) {
      next[2 * i] = zip_low(rows[i], rows[i + N / 2]);
      next[2 * i + 1] = zip_high(rows[i], rows[i + N / 2]);
    }
    std::memcpy(rows, next, sizeof next);
  }
}

// Swaps the bits `mask << kShift` of a with the bits `mask` of b.
template <int kShift>
inline void exchange(U32x4& a, U32x4& b, uint32_t mask) {
  U32x4 changed = ((a >> kShift) ^ b) & mask;
  b ^= changed;
  a ^= changed << kShift;
}

// Byte by byte: the high nibbles of words 0 to 3 against the low nibbles of words 4 to 7.
struct SwapNibbles {
  void operator()(U32x4 (&w)[8]) const {
    for (int v = 0; v < 4; ++v) exchange<4>(w[v], w[v + 4], 0x0f0f0f0f);
  }
};

// Byte by byte: bit j of word i becomes bit i of word j.
struct TransposeBits {
  void operator()(U32x4 (&w)[8]) const {
    for (int i = 0; i < 4; ++i) exchange<4>(w[i], w[i + 4], 0x0f0f0f0f);
    for (int i : {0, 1, 4, 5}) exchange<2>(w[i], w[i + 2], 0x33333333);
    for (int i = 0; i < 8; i += 2) exchange<1>(w[i], w[i + 1], 0x55555555);
  }
};

// Byte by byte, words 0 to 3 and 4 to 7 apart: the two bits at 2j of word i become those at 2i of word j.
struct TransposeBitPairs {
  void operator()(U32x4 (&w)[8]) const {
    for (int i : {0, 1, 4, 5}) exchange<4>(w[i], w[i + 2], 0x0f0f0f0f);
    for (int i = 0; i < 8; i += 2) exchange<2>(w[i], w[i + 1], 0x33333333);
  }
};

// Swaps bits kHigh and kLow of the position of every bit in a word.
template <int kHigh, int kLow>
inline void swap_positions(U32x4& w) {
  constexpr uint32_t select[] = {0x55555555, 0x33333333, 0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};   // position bit k is 0
  constexpr uint32_t mask = select[kHigh] & ~select[kLow];
  constexpr int shift = (1 << kHigh) - (1 << kLow);
  U32x4 changed = ((w >> shift) ^ w) & mask;
  w ^= changed ^ (changed << shift);
}

// A word of 32 bits, one a column (4g + c), to four bytes: bit g of byte c. And back.
struct GatherBits {
  void operator()(U32x4 (&w)[1]) const {
    swap_positions<4, 1>(w[0]);
    swap_positions<3, 0>(w[0]);
    swap_positions<2, 0>(w[0]);
    swap_positions<2, 1>(w[0]);
  }
};
struct SpreadBits {
  void operator()(U32x4 (&w)[1]) const {
    swap_positions<2, 1>(w[0]);
    swap_positions<2, 0>(w[0]);
    swap_positions<3, 0>(w[0]);
    swap_positions<4, 1>(w[0]);
  }
};

struct Keep {
  template <int N>
  void operator()(U32x4 (&)[N]) const {}
};

// int8 to code + 128.
struct FlipSigns {
  template <int N>
  void operator()(U32x4 (&w)[N]) const {
    for (U32x4& word : w) word ^= 0x80808080u;
  }
};

// 16 stored blocks and the part of a tile that holds them. kPack: from the rows to the tile, else back.
template <bool kPack>
struct Unit {
  using Stored = std::conditional_t<kPack, const uint8_t, uint8_t>;
  using Tile = std::conditional_t<kPack, uint8_t, const uint8_t>;
  static constexpr bool kPacks = kPack;

  Stored* rows[kTileRows];
  Tile* tile;

  static void move(Stored* stored, Tile* packed, int64_t bytes) {
    if constexpr (kPack) {
      std::memcpy(packed, stored, bytes);
    } else {
      std::memcpy(stored, packed, bytes);
    }
  }

  // One number of each row, side by side.
  template <class Number>
  void numbers(int64_t row_at, int64_t tile_at) const {
    for (int r = 0; r < kTileRows; ++r) move(rows[r] + row_at, tile + tile_at + r * sizeof(Number), sizeof(Number));
  }

  // kWords words of each row, mixed across words; word i goes to the 64 bytes at place(i).
  template <int kWords, class Mix, class Place>
  void place_words(int64_t row_at, Mix mix, Place place) const {
    for (int quad = 0; quad < 4; ++quad) {
      Stored* const* stored = rows + 4 * quad;
      U32x4 w[kWords];
      if constexpr (kPack) {
        load_words<kWords>(stored, row_at, w);
        mix(w);
        for (int i = 0; i < kWords; ++i) store(tile + place(i) + 16 * quad, w[i]);
      } else {
        for (int i = 0; i < kWords; ++i) w[i] = load<U32x4>(tile + place(i) + 16 * quad);
        mix(w);
        store_words<kWords>(stored, row_at, w);
      }
    }
  }
  template <int kWords, class Mix = Keep>
  void words(int64_t row_at, int64_t tile_at, Mix mix = {}) const {
    place_words<kWords>(row_at, mix, [=](int i) { return tile_at + 64 * i; });
  }

  // 32 stored bytes a row, each the codes of one column in two blocks of 32 columns.
  void nibbles(int64_t row_at, int64_t low_block_at, int64_t high_block_at) const {
    place_words<8>(row_at, SwapNibbles{}, [=](int i) { return (i < 4 ? low_block_at : high_block_at) + 64 * (i & 3); });
  }
  // 32 stored bytes a row, bit j of each belonging to a column of block j; one plane a block, `apart` bytes apart.
  void bit_planes(int64_t row_at, int64_t plane_at, int64_t apart) const {
    place_words<8>(row_at, TransposeBits{}, [=](int j) { return plane_at + j * apart; });
  }
  // 32 stored bytes a row, bits 2j and 2j + 1 of each belonging to a column of block j.
  void bit_pair_planes(int64_t row_at, int64_t plane_at, int64_t apart) const {
    place_words<8>(row_at, TransposeBitPairs{}, [=](int i) { return plane_at + (i & 3) * apart + 64 * (i >> 2); });
  }
  // 4 stored bytes a row, one bit a column.
  void column_bits(int64_t row_at, int64_t tile_at) const {
    words<1>(row_at, tile_at, std::conditional_t<kPack, GatherBits, SpreadBits>{});
  }

  // kCount bytes of each row, which `Code` makes of the stored bytes and back; byte i of all rows side by side.
  template <int kCount, class Code>
  void bytes(int64_t row_at, int64_t tile_at, Code code) const {
    U8x16 v[16] = {};
    if constexpr (kPack) {
      for (int r = 0; r < kTileRows; ++r) v[r] = code.expand(rows[r] + row_at);
      transpose(v);
      for (int i = 0; i < kCount; ++i) store(tile + tile_at + 16 * i, v[i]);
    } else {
      for (int i = 0; i < kCount; ++i) v[i] = load<U8x16>(tile + tile_at + 16 * i);
      transpose(v);
      for (int r = 0; r < kTileRows; ++r) code.compress(v[r], rows[r] + row_at);
    }
  }

  // 8 halves of each row, column after column.
  void halves(int64_t row_at, int64_t tile_at) const {
    for (int half = 0; half < 2; ++half) {
      U16x8 v[8];
      for (int i = 0; i < 8; ++i) {
        v[i] = kPack ? load<U16x8>(rows[8 * half + i] + row_at) : load<U16x8>(tile + tile_at + 32 * i + 16 * half);
      }
      transpose(v);
      for (int i = 0; i < 8; ++i) {
        if constexpr (kPack) {
          store(tile + tile_at + 32 * i + 16 * half, v[i]);
        } else {
          store(rows[8 * half + i] + row_at, v[i]);
        }
      }
    }
  }

 private:
  template <int kWords>
  static void load_words(Stored* const* stored, int64_t at, U32x4 (&w)[kWords]) {
    for (int first = 0; first + 4 <= kWords; first += 4) {
      U32x4 v[4];
      for (int r = 0; r < 4; ++r) v[r] = load<U32x4>(stored[r] + at + 4 * first);
      transpose(v);
      for (int i = 0; i < 4; ++i) w[first + i] = v[i];
    }
    for (int i = kWords & ~3; i < kWords; ++i) {
      int64_t word = at + 4 * i;
      w[i] = U32x4{load<uint32_t>(stored[0] + word), load<uint32_t>(stored[1] + word), load<uint32_t>(stored[2] + word),
                   load<uint32_t>(stored[3] + word)};
    }
  }
  template <int kWords>
  static void store_words(Stored* const* stored, int64_t at, const U32x4 (&w)[kWords]) {
    for (int first = 0; first + 4 <= kWords; first += 4) {
      U32x4 v[4] = {w[first], w[first + 1], w[first + 2], w[first + 3]};
      transpose(v);
      for (int r = 0; r < 4; ++r) store(stored[r] + at + 4 * first, v[r]);
    }
    for (int i = kWords & ~3; i < kWords; ++i) {
      for (int r = 0; r < 4; ++r) store<uint32_t>(stored[r] + at + 4 * i, w[i][r]);
    }
  }
};

}  // namespace llmctl::moves
