// What the softmax of a row is made of where keys are divided: how two become one, and what is written in the end.
#pragma once

#include <math.h>

#include "attention.hpp"
#include "attention_rotation.inl.hpp"
#include "vector_math.inl.hpp"

namespace llmctl::LLMCTL_ISA {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t between(int64_t x, int64_t low, int64_t high) { return smaller(larger(x, low), high); }

// Lanes of "x - maximum" stay numbers where nothing has been seen yet.
inline F32 finite_or_zero(F32 maximum) { return select_less(set_f32(-INFINITY), maximum, maximum, zero_f32()); }

// Two softmaxes over different keys become one: what each is multiplied by, and the common maximum.
struct MergeWeights { F32 maximum, first, second; };
inline MergeWeights merge_weights(F32 first, F32 second) {
  F32 maximum = max(first, second), base = finite_or_zero(maximum);
  return {maximum, exp2_negative(sub(first, base)), exp2_negative(sub(second, base))};
}
inline F32 merge_lanes(F32 x, F32 first, F32 y, F32 second) { return fma(x, first, mul(y, second)); }

inline void merge_row(float* x, float first, const float* y, float second, int64_t width) {
  for (int64_t d = 0; d < width; d += 16) {
    store_f32(x + d, merge_lanes(load_f32(x + d), set_f32(first), load_f32(y + d), set_f32(second)));
  }
}

constexpr float kLog2E = 1.44269504f;

// What the values of a row are multiplied by in the end. maximum: in powers of two; sum: of the weights relative to it.
inline float row_factor(const AttentionCall& call, int64_t head, float maximum, float sum) {
  if (!call.sinks) return 1.0f / sum;
  MergeWeights weights = merge_weights(set_f32(maximum), set_f32(call.sinks[head] * kLog2E));
  float lanes[16];
  store_f32(lanes, div(weights.first, merge_lanes(set_f32(sum), weights.first, set_f32(1.0f), weights.second)));
  return lanes[0];
}

inline void write_row(const float* row, float factor, int64_t n, float* out) {   // + 0: a zero has no sign to differ by
  F32 wide = set_f32(factor);
  for (int64_t d = 0; d < n; d += 16) {
    store_f32_first(out + d, fma(load_f32(row + d), wide, zero_f32()), int(smaller(16, n - d)));
  }
}

inline void merge_item(const AttentionCall& call, const AttentionMerge& merge, const float* partials) {
  int64_t size = attention_partial_floats(call.pages.shape), dim = kv_value_dim(call.pages.shape), width = padded_head_dim(dim);
  float total[kMaxHeadDim] = {}, first[16], second[16];
  F32 maximum = set_f32(-INFINITY), sum = zero_f32();
  for (int64_t i = 0; i < merge.count; ++i) {
    const float* partial = partials + (merge.partial + i * merge.stride) * size;
    MergeWeights weights = merge_weights(maximum, set_f32(partial[width]));
    maximum = weights.maximum;
    sum = merge_lanes(sum, weights.first, set_f32(partial[width + 1]), weights.second);
    store_f32(first, weights.first);
    store_f32(second, weights.second);
    merge_row(total, first[0], partial, second[0], width);
  }
  store_f32(first, sum);
  store_f32(second, maximum);
  const AttentionSequence& sequence = call.sequences[merge.sequence];
  float factor = row_factor(call, merge.head, second[0], first[0]);
  float* out = call.out + (sequence.first_query + merge.query) * call.out_stride + merge.head * dim;
  write_row(total, factor, dim, out);
  rotate_blocks(out, dim, kv_value_rotation(call.pages.shape));
}

}  // namespace llmctl::LLMCTL_ISA
