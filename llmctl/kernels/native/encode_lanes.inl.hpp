// Vectors of kLanes numbers (GCC's and Clang's own), a row a lane, and what reads and writes rows through them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "encode.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace llmctl::LLMCTL_ENCODE {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using F32 = float __attribute__((vector_size(4 * kLanes)));
using I32 = int32_t __attribute__((vector_size(4 * kLanes)));   // also masks: -1 where a comparison holds

using U16 = uint16_t __attribute__((vector_size(2 * kLanes)));

inline I32 bits(F32 a) { return (I32)a; }
inline F32 from_bits(I32 a) { return (F32)a; }
inline F32 splat(float x) { return x - F32{}; }
inline I32 splat(int32_t x) { return x - I32{}; }
inline F32 select(I32 mask, F32 a, F32 b) { return mask ? a : b; }
inline I32 select(I32 mask, I32 a, I32 b) { return mask ? a : b; }
inline F32 to_f32(I32 a) { return __builtin_convertvector(a, F32); }
inline I32 truncate(F32 a) { return __builtin_convertvector(a, I32); }
inline F32 abs(F32 a) { return from_bits(bits(a) & 0x7fffffff); }

// a < b ? a : b and a > b ? a : b, so b where either is NaN. Compilers do not find these instructions by themselves.
#if defined(__AVX512F__)
inline F32 min(F32 a, F32 b) { return (F32)_mm512_min_ps((__m512)a, (__m512)b); }
inline F32 max(F32 a, F32 b) { return (F32)_mm512_max_ps((__m512)a, (__m512)b); }
inline I32 min(I32 a, I32 b) { return (I32)_mm512_min_epi32((__m512i)a, (__m512i)b); }
inline I32 max(I32 a, I32 b) { return (I32)_mm512_max_epi32((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
inline F32 min(F32 a, F32 b) { return (F32)_mm256_min_ps((__m256)a, (__m256)b); }
inline F32 max(F32 a, F32 b) { return (F32)_mm256_max_ps((__m256)a, (__m256)b); }
inline I32 min(I32 a, I32 b) { return (I32)_mm256_min_epi32((__m256i)a, (__m256i)b); }
inline I32 max(I32 a, I32 b) { return (I32)_mm256_max_epi32((__m256i)a, (__m256i)b); }
#else
inline F32 min(F32 a, F32 b) { return select(a < b, a, b); }
inline F32 max(F32 a, F32 b) { return select(a > b, a, b); }
inline I32 min(I32 a, I32 b) { return select(a < b, a, b); }
inline I32 max(I32 a, I32 b) { return select(a > b, a, b); }
#endif
inline I32 min(I32 a, int32_t b) { return min(a, splat(b)); }
inline I32 max(I32 a, int32_t b) { return max(a, splat(b)); }
inline I32 clamp(I32 a, int32_t low, int32_t high) { return max(min(a, high), low); }

inline bool any(I32 mask) {
  int32_t all = 0;
  for (int i = 0; i < kLanes; i++) all |= mask[i];
  return all != 0;
}

inline F32 square_root(F32 a) {
  float lanes[kLanes];
  std::memcpy(lanes, &a, sizeof a);
  for (float& lane : lanes) lane = std::sqrt(lane);
  std::memcpy(&a, lanes, sizeof a);
  return a;
}

// Half to even: what the sum with 1.5 * 2^23 leaves in its mantissa. Beyond 2^22 and for NaN it is another number, but always
// the same one.
inline I32 nearest(F32 a) { return (bits(a + 12582912.f) & 0x7fffff) - 0x400000; }

// The same as float32 within low .. high, for numbers up to 2^22. NaN becomes `high`.
inline F32 rounded(F32 a, float low, float high) {
  return max(min((a + 12582912.f) - 12582912.f, splat(high)), splat(low));
}

// float16, half to even; infinity for all that is too large, NaN included.
inline I32 to_half(F32 a) {
  const I32 magnitude = bits(a) & 0x7fffffff, sign = (bits(a) >> 16) & 0x8000;
  const I32 normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const I32 tiny = bits(from_bits(magnitude) + 0.5f) - bits(splat(0.5f));   // multiples of 2^-24
  const I32 rounded = select(magnitude < (113 << 23), tiny, min(normal, 0x7c00));
  return sign | select(magnitude < 0x7f800000, rounded, splat(0x7c00));
}

inline F32 from_half(I32 half) {
  const I32 magnitude = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
  const F32 tiny = from_bits(magnitude + (113 << 23)) - from_bits(splat(113 << 23));
  const I32 normal = magnitude + select(magnitude < (0x7c00 << 13), splat(112 << 23), splat(224 << 23));
  return from_bits(sign | select(magnitude < (1 << 23), bits(tiny), normal));
}

// Rows become lanes: at each step, row i and the one half the rows further are laid into each other.
inline void transpose(I32 (&rows)[kLanes]) {
#if defined(__clang__)
  int32_t words[kLanes][kLanes];
  std::memcpy(words, rows, sizeof words);
  for (int i = 0; i < kLanes; i++)
    for (int k = 0; k < kLanes; k++) rows[i][k] = words[k][i];
#else
  I32 low, high;
  for (int k = 0; k < kLanes; k++) {
    low[k] = k / 2 + k % 2 * kLanes;
    high[k] = low[k] + kLanes / 2;
  }
  for (int step = 1; step < kLanes; step *= 2) {
    I32 next[kLanes];
    for (int i = 0; i < kLanes / 2; i++) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], high);
    }
    std::memcpy(rows, next, sizeof next);
  }
#endif
}

constexpr int32_t kHuge = 0x4e6e6b28;     // 1e9f: what no block reaches with scales in float16
constexpr int32_t kFinite = 0x7f7fffff;   // all but infinity and NaN

// kLanes rows being encoded. Beyond the last row of the matrix, lanes read that row again and write to `unused`.
class Panel {
 public:
  Panel(const EncodeTask& task, int64_t first, int64_t last) : type_(task.type) {
    for (int i = 0; i < kLanes; i++) {
      const int64_t row = first + i < last ? first + i : last - 1;
      source_[i] = task.values + row * task.stride;
      target_[i] = first + i < last ? task.blocks + row * task.row_bytes : unused_;
      step_[i] = first + i < last;
    }
  }

  // Columns first .. first + N - 1 of all rows. kLimit: the bits of the largest value that can be encoded.
  template <int N, int32_t kLimit = kHuge>
  void load(int64_t first, F32* x) {
    if (type_ == PlainType::F32) {
      load_as<N, I32>(first, x, [](I32 a) { return from_bits(a); });
    } else if (type_ == PlainType::F16) {
      load_as<N, U16>(first, x, [](I32 a) { return from_half(a); });
    } else {
      load_as<N, U16>(first, x, [](I32 a) { return from_bits(a << 16); });
    }
    for (int e = 0; e < N; e++) bad_ |= (bits(x[e]) & 0x7fffffff) > kLimit;
  }

  // Bytes from `offset` of the current block of every row.
  void put32(int64_t offset, I32 words) { put<uint32_t>(offset, words); }
  void put16(int64_t offset, I32 halves) { put<uint16_t>(offset, halves); }
  void put8(int64_t offset, I32 bytes) { put<uint8_t>(offset, bytes); }
  // A scale, which must be finite in float16; returns its bits.
  I32 put_scale(int64_t offset, F32 scale) {
    const I32 half = to_half(scale);
    bad_ |= (half & 0x7c00) == 0x7c00;
    put16(offset, half);
    return half;
  }
  void next_block(int64_t bytes) {
    for (int i = 0; i < kLanes; i++) target_[i] += step_[i] * bytes;
  }

  // The first lane that cannot be encoded, or kLanes.
  int first_bad() const {
    for (int i = 0; i < kLanes; i++)
      if (bad_[i]) return i;
    return kLanes;
  }

 private:
  // Squares of kLanes rows by kLanes columns are read along the rows and turned.
  template <int N, class Stored, class Widen>
  void load_as(int64_t first, F32* x, Widen widen) {
    static_assert(N % kLanes == 0);
    for (int e = 0; e < N; e += kLanes) {
      I32 square[kLanes];
      for (int i = 0; i < kLanes; i++) {
        Stored row;
        std::memcpy(&row, source_[i] + (first + e) * (sizeof row / kLanes), sizeof row);
        square[i] = __builtin_convertvector(row, I32);
      }
      transpose(square);
      for (int k = 0; k < kLanes; k++) x[e + k] = widen(square[k]);
    }
  }

  template <class Stored>
  void put(int64_t offset, I32 values) {
    for (int i = 0; i < kLanes; i++) {
      const Stored value = static_cast<Stored>(values[i]);
      std::memcpy(target_[i] + offset, &value, sizeof value);
    }
  }

  PlainType type_;
  I32 bad_ = {};
  const uint8_t* source_[kLanes];
  uint8_t* target_[kLanes];
  int64_t step_[kLanes];
  uint8_t unused_[256];
};

}  // namespace llmctl::LLMCTL_ENCODE
