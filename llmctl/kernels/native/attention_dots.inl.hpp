// Attention over pages of bf16 by VDPBF16PS: a sum takes pairs of columns one after the other, so it is one chain from the first
// dimension, or from the first key of the partition, to the last.
#pragma once

#include "attention_bf16.inl.hpp"

namespace llmctl {
namespace LLMCTL_ISA {

constexpr int kDotRows = 6;   // of sums in four vectors each: what the registers hold

inline __m512bh broadcast_pair(const uint8_t* pair) {
  int32_t word;
  memcpy(&word, pair, 4);
  return (__m512bh)_mm512_set1_epi32(word);
}

// c [R][16 N] = a [R][2 * count * steps] times the pairs of `count` pages: those of step s lie at b(page, vector) + s * step_bytes.
// Strides in bytes.
template <int R, int N, class Vectors>
inline void multiply_pairs(const uint8_t* a, int64_t a_stride, int64_t count, int64_t steps, int64_t step_bytes, Vectors b, float* c,
                           int64_t c_stride) {
  __m512 sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) sums[r][v] = _mm512_setzero_ps();
  }
  for (int64_t page = 0; page < count; ++page) {
    const uint8_t* vectors[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) vectors[v] = b(page, v);
    for (int64_t step = 0; step < steps; ++step, a += 4) {
      __m512bh row[N];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) row[v] = (__m512bh)_mm512_loadu_si512(vectors[v] + step * step_bytes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        __m512bh factor = broadcast_pair(a + r * a_stride);
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], factor, row[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) _mm512_storeu_ps((uint8_t*)c + r * c_stride + 64 * v, sums[r][v]);
  }
}

// The same for `rows` rows, 1 to R.
template <int R, int N, class... Rest>
inline void multiply_pairs_of(int64_t rows, Rest... rest) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_pairs_of<R - 1, N>(rows, rest...);
  }
  multiply_pairs<R, N>(rest...);
}

class DotRun : public BlockRun<DotRun> {
 public:
  using BlockRun::BlockRun;

  static bool serves(const KvShape& shape) { return pair_pages(shape) && !shape.latent; }

  void begin_values() {}
  void begin_block(int64_t) {}
  Range values_read(Range all) const { return all; }

  void score(int64_t row, int64_t rows, Range all) {
    for (int64_t key = tiles(all).low; key < tiles(all).high; key += kKeyTile) {
      const uint8_t* const* pages = key_pages_ + key / kPageTokens;
      if (rows <= kDotRows) {
        bool more = key + kKeyTile < all.high;
        ask_for(more ? key_pages_ : value_pages_, more ? key + kKeyTile : tiles(all).low, all.high);
      }
      in_blocks(rows, [&](int64_t first, int64_t count) {
        multiply_pairs_of<kDotRows, 4>(count, queries_ + (row + first) * dim_ * 2, dim_ * 2, 1, dim_ / 2, 64,
                                       [pages](int64_t, int v) { return pages[v]; },
                                       (float*)score_row(scores_, first) + key, kScoreBytes);
      });
    }
  }

  void add_values(int64_t, int64_t rows, Range all, const Softmax& to) { add_rows(0, rows, all, to); }

  void add_values_alone(int64_t row, int64_t rows, const Softmax& to) {
    for (int64_t r = 0; r < rows; ++r) add_rows(r, 1, seen(row + r), to);
  }

 private:
  // Calls f(first, count) for blocks of up to kDotRows rows, as even as can be.
  template <class F>
  static void in_blocks(int64_t rows, F f) {
    for (int64_t first = 0, count; first < rows; first += count) {
      int64_t left = rows - first;
      count = left <= kDotRows ? left : left < 2 * kDotRows ? (left + 1) / 2 : kDotRows;
      f(first, count);
    }
  }

  void add_rows(int64_t first_row, int64_t rows, Range keys, const Softmax& to) {
    if (keys.low >= keys.high) keys = {0, 0};
    const uint8_t* pages[kPartitionPages];
    const int64_t first = keys.low / kPageTokens, count = (keys.high + kPageTokens - 1) / kPageTokens - first;
    for (int64_t page = 0; page < count; ++page) pages[page] = value_pages_[first + page];
    if (keys.low % kPageTokens) pages[0] = only_seen(first, keys, 0);
    if (keys.high % kPageTokens) pages[count - 1] = only_seen(first + count - 1, keys, 1);
    const uint8_t* weights = score_row(scores_, first_row) + first * kPageTokens * 2;
    float* out = to.rows + first_row * to.stride;
    for (int64_t column = 0; column < dim_; column += 64) {
      if (column + 64 <= dim_) add_columns<4>(rows, weights, pages, count, column, out, to.stride);
      else add_columns<2>(rows, weights, pages, count, column, out, to.stride);
    }
  }

  // A copy of a page's values in which those of other keys are 0: what stands there may be a NaN.
  const uint8_t* only_seen(int64_t page, Range keys, int64_t place) {
    uint8_t* copy = values_ + place * kPageTokens * dim_ * 2;
    for (int64_t byte = 0; byte < dim_ * 4; byte += 64) {
      uint8_t half_tile[512];
      copy_values(value_pages_[page] + byte, dim_ * 4, page * kPageTokens, keys.low, keys.high, half_tile);
      for (int64_t pair = 0; pair < 8; ++pair) memcpy(copy + pair * dim_ * 4 + byte, half_tile + 64 * pair, 64);
    }
    return copy;
  }

  template <int N>
  void add_columns(int64_t rows, const uint8_t* weights, const uint8_t* const* pages, int64_t count, int64_t column, float* out,
                   int64_t stride) {
    in_blocks(rows, [&](int64_t first, int64_t some) {
      multiply_pairs_of<kDotRows, N>(some, weights + first * kScoreBytes, kScoreBytes, count, kPageTokens / 2, dim_ * 4,
                                     [pages, column](int64_t page, int v) { return pages[page] + column * 4 + 64 * v; },
                                     out + first * stride + column, stride * 4);
    });
  }
};

extern const AttentionKernels dot_attention;   // not inline: cpu.cpp asks for it
const AttentionKernels dot_attention = {store_pairs<DotRun>, load_pairs<DotRun>,     run_pairs<DotRun>, merge_pairs,
                                        move_pairs<DotRun>,  load_pair_keys<DotRun>, vote_pairs};

}  // namespace LLMCTL_ISA
}  // namespace llmctl
