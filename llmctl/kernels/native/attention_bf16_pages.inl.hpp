// Pages of bf16 keys and values as products of pairs read them (TDPBF16PS, VDPBF16PS), for a head_dim that is a multiple of 32:
//   keys    [head_dim / 2][16 tokens][2]: 16 rows are a tile B, 32 dimensions of 16 keys
//   values  [8 pairs of tokens][head_dim][2]: the pairs of two pages are a tile B, 32 keys in 16 dimensions
// As long as those of the other layout.
#pragma once

#include "attention_pages.inl.hpp"

namespace llmctl::LLMCTL_ISA {

constexpr int64_t kTileBytes = 1024;   // 16 rows of 64 bytes

inline bool pair_pages(const KvShape& shape) { return shape.type == KvType::BF16 && shape.head_dim % 32 == 0 && !shape.latent; }

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
    uint32_t words[2] = {uint32_t(keys->bits) << 16, uint32_t(values->bits) << 16};
    memcpy(key + d, words, 4);
    memcpy(value + d, words + 1, 4);
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
