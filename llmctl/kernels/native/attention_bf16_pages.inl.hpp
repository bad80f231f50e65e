// Pages of bf16 keys and values as products of pairs read them (TDPBF16PS, VDPBF16PS), for a head_dim that is a multiple of 32:
//   keys    [head_dim / 2][16 tokens][2]: 16 rows are a tile B, 32 dimensions of 16 keys
//   values  [8 pairs of tokens][head_dim][2]: the pairs of two pages are a tile B, 32 keys in 16 dimensions
// As long as those of the other layout. Latent pages have the keys alone: their values are turned when they are read.
#pragma once

#include "attention_pages.inl.hpp"

namespace llmctl::LLMCTL_ISA {

constexpr int64_t kTileBytes = 1024;   // 16 rows of 64 bytes

inline bool pair_pages(const KvShape& shape) {
  const bool pairs = shape.key_type == KvType::BF16 && shape.value_type == KvType::BF16;
  return pairs && shape.head_dim % 32 == 0 && shape.latent % 32 == 0;
}

inline void store_pair_key(const KvShape& shape, const PageHead& head, int64_t offset, const float* key) {
  Brain row[kMaxHeadDim];
  round_row(key, shape.head_dim, row);
  for (int64_t d = 0; d < shape.head_dim; d += 2) memcpy(head.keys + (d / 2 * kPageTokens + offset) * 4, row + d, 4);
}

inline void store_pair_value(const KvShape& shape, const PageHead& head, int64_t offset, const float* value) {
  Brain row[kMaxHeadDim];
  round_row(value, shape.head_dim, row);
  put_row(row, shape.head_dim, (Brain*)head.values + offset / 2 * 2 * shape.head_dim + offset % 2, 2);
}

inline void load_pair_row(const KvShape& shape, const PageHead& head, int64_t offset, float* key, float* value) {
  for (int64_t d = 0; d < shape.head_dim; ++d) {
    const Brain* keys = (const Brain*)head.keys + (d / 2 * kPageTokens + offset) * 2 + d % 2;
    const Brain* values = (const Brain*)head.values + (offset / 2 * shape.head_dim + d) * 2 + offset % 2;
    if (shape.latent) values = keys;
    uint32_t words[2] = {uint32_t(keys->bits) << 16, uint32_t(values->bits) << 16};
    memcpy(key + d, words, 4);
    if (d < kv_value_dim(shape)) memcpy(value + d, words + 1, 4);
  }
}

inline void move_pair_row(const KvShape& shape, const PageHead& source, int64_t from, const PageHead& target, int64_t to) {
  for (int64_t d = 0; d < shape.head_dim; d += 2) {
    memmove(target.keys + (d / 2 * kPageTokens + to) * 4, source.keys + (d / 2 * kPageTokens + from) * 4, 4);
  }
  if (shape.latent) return;
  const Brain* read = (const Brain*)source.values + from / 2 * 2 * shape.head_dim + from % 2;
  Brain* written = (Brain*)target.values + to / 2 * 2 * shape.head_dim + to % 2;
  for (int64_t d = 0; d < shape.head_dim; ++d) written[2 * d] = read[2 * d];
}

// As load_keys.
inline void unfold_pair_keys(const KvShape& shape, const PageHead& head, float* out) {
  for (int64_t d = 0; d < shape.head_dim; d += 2) {
    const __m512i pairs = _mm512_loadu_si512(head.keys + d / 2 * kPageTokens * 4);
    _mm512_storeu_si512(out + d * kKeyTile, _mm512_slli_epi32(pairs, 16));
    _mm512_storeu_si512(out + (d + 1) * kKeyTile, _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xFFFF0000u))));
  }
}

// Which halves of the lanes of a pair of keys are seen by someone who sees keys [low, high); the first key of it is `key`.
inline __m512i pair_mask(int64_t key, int64_t low, int64_t high) {
  uint32_t first = key >= low && key < high ? 0xFFFFu : 0, second = key + 1 >= low && key + 1 < high ? 0xFFFF0000u : 0;
  return _mm512_set1_epi32(int(first | second));
}

// A page's 8 pairs of 16 dimensions into half a tile. `key`: its first key. Keys outside [low, high) become 0: what stands
// in their slots may be a NaN, which a weight of 0 does not take away. `values` is not read where no key is inside.
inline void copy_values(const uint8_t* values, int64_t row_bytes, int64_t key, int64_t low, int64_t high, uint8_t* half_tile) {
  if (key >= low && key + kPageTokens <= high) {
#pragma GCC unroll 8
    for (int64_t pair = 0; pair < 8; ++pair) {
      _mm512_storeu_si512(half_tile + 64 * pair, _mm512_loadu_si512(values + pair * row_bytes));
    }
    return;
  }
  for (int64_t pair = 0; pair < 8; ++pair) {
    bool none = key + 2 * pair + 1 < low || key + 2 * pair >= high;
    __m512i row = none ? _mm512_setzero_si512() : _mm512_loadu_si512(values + pair * row_bytes);
    _mm512_storeu_si512(half_tile + 64 * pair, _mm512_and_si512(row, pair_mask(key + 2 * pair, low, high)));
  }
}

// rows[i] quarter j to rows[j] quarter i, of 4 vectors; written to every second vector from `out` on.
inline void transpose_quarters(__m512i a, __m512i b, __m512i c, __m512i d, __m512i* out) {
  __m512i low[2] = {_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(c, d, 0x44)};
  __m512i high[2] = {_mm512_shuffle_i64x2(a, b, 0xEE), _mm512_shuffle_i64x2(c, d, 0xEE)};
  out[0] = _mm512_shuffle_i64x2(low[0], low[1], 0x88);
  out[2] = _mm512_shuffle_i64x2(low[0], low[1], 0xDD);
  out[4] = _mm512_shuffle_i64x2(high[0], high[1], 0x88);
  out[6] = _mm512_shuffle_i64x2(high[0], high[1], 0xDD);
}

// As copy_values, for 16 dimensions of latent pages, which lie as those of keys: 8 vectors of pairs of dimensions, a token a lane.
inline void turn_values(const uint8_t* keys, int64_t key, int64_t low, int64_t high, uint8_t* half_tile) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0));
  __m512i rows[8], even[4], odd[4], pairs[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) rows[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(keys + 64 * i), order);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    even[i] = _mm512_unpacklo_epi64(rows[2 * i], rows[2 * i + 1]);
    odd[i] = _mm512_unpackhi_epi64(rows[2 * i], rows[2 * i + 1]);
  }
  transpose_quarters(even[0], even[1], even[2], even[3], pairs);
  transpose_quarters(odd[0], odd[1], odd[2], odd[3], pairs + 1);
  const bool whole = key >= low && key + kPageTokens <= high;
#pragma GCC unroll 8
  for (int64_t i = 0; i < 8; ++i) {
    if (!whole) pairs[i] = _mm512_and_si512(pairs[i], pair_mask(key + 2 * i, low, high));
    _mm512_storeu_si512(half_tile + 64 * i, pairs[i]);
  }
}

// Whether an infinity or a NaN is among the first `latent` dimensions of a page's tokens first .. last - 1.
inline bool any_key_not_finite(const uint8_t* keys, int64_t latent, int64_t first, int64_t last) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  const uint32_t seen = (1u << last) - (1u << first);
  uint32_t found = 0;
  for (int64_t byte = 0; byte < latent * 32; byte += 64) {
    __m512i row = _mm512_maskz_loadu_epi32((__mmask16)seen, keys + byte);
    found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(row, exponent), exponent);
  }
  return found != 0;
}

// Whether an infinity or a NaN is among the values of a page's pairs first .. last - 1.
inline bool any_not_finite(const uint8_t* values, int64_t row_bytes, int64_t first, int64_t last) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  __mmask32 found = 0;
  for (int64_t byte = first * row_bytes; byte < last * row_bytes; byte += 64) {
    __m512i row = _mm512_loadu_si512(values + byte);
    found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(row, exponent), exponent);
  }
  return found != 0;
}

}  // namespace llmctl::LLMCTL_ISA
