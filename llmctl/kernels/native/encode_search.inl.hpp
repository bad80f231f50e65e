// The searches for scales, lane by lane: many roundings of a group are tried, and for each the scale that fits it best. Orders of
// operations, limits and ties are those of llama.cpp; see formats/search.py, the definition, for what is computed.
#pragma once

#include "encode_lanes.inl.hpp"

namespace llmctl::LLMCTL_ENCODE {

constexpr float kTiny = 1e-15f;   // groups below are all zero

// The first of the values with the largest magnitude.
template <int N>
inline F32 extreme(const F32* x) {
  F32 largest = {}, value = {};
  for (int i = 0; i < N; i++) {
    const F32 magnitude = abs(x[i]);
    const I32 more = magnitude > largest;
    largest = select(more, magnitude, largest);
    value = select(more, x[i], value);
  }
  return value;
}

// x ~ scale * code - offset with codes 0 .. top and offset >= 0. The codes are those of `inverse` and `base`.
struct Affine {
  F32 scale, offset;
  F32 inverse, base;
  I32 flat;   // lanes where all values are equal (and not positive): codes 0

  I32 code(F32 x, int top) const { return ~flat & clamp(nearest(inverse * (x - base)), 0, top); }
};

struct Steps {
  float first, step;   // added to `top`
  int last;
};

template <int N, bool kAbsolute = false>
inline Affine fit_affine(const F32* x, const F32* weights, int top, Steps steps) {
  F32 lowest = x[0], highest = x[0], sum_w = weights[0], sum_x = weights[0] * x[0];
  for (int i = 1; i < N; i++) {
    lowest = select(x[i] < lowest, x[i], lowest);
    highest = select(x[i] > highest, x[i], highest);
    sum_w += weights[i];
    sum_x += weights[i] * x[i];
  }
  lowest = select(lowest > 0, F32{}, lowest);
  F32 codes[N];
  const auto round = [&](F32 inverse, F32 base) {
    for (int i = 0; i < N; i++) codes[i] = rounded(inverse * (x[i] - base), 0, top);
  };
  const auto loss = [&](F32 scale, F32 offset) {
    F32 sum = {};
    for (int i = 0; i < N; i++) {
      const F32 error = scale * codes[i] + offset - x[i];
      sum += weights[i] * (kAbsolute ? abs(error) : error * error);
    }
    return sum;
  };
  Affine best;
  best.flat = highest <= lowest;
  best.inverse = static_cast<float>(top) / (highest - lowest);
  best.scale = 1 / best.inverse;
  best.base = lowest;
  round(best.inverse, lowest);
  F32 offset = lowest, least = loss(best.scale, offset);
  for (int s = 0; s <= steps.last; s++) {
    const F32 inverse = (steps.first + steps.step * s + top) / (highest - offset);
    F32 sum_l = {}, sum_l2 = {}, sum_xl = {};
    round(inverse, offset);
    for (int i = 0; i < N; i++) {
      const F32 weighted = weights[i] * codes[i];
      sum_l += weighted;
      sum_l2 += weighted * codes[i];
      sum_xl += weighted * x[i];
    }
    const F32 determinant = sum_w * sum_l2 - sum_l * sum_l;
    F32 scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    F32 moved = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
    const I32 positive = moved > 0;
    scale = select(positive, sum_xl / sum_l2, scale);
    moved = select(positive, F32{}, moved);
    const F32 found = loss(scale, moved);
    const I32 better = (determinant > 0) & (found < least);
    least = select(better, found, least);
    best.scale = select(better, scale, best.scale);
    best.inverse = select(better, inverse, best.inverse);
    best.base = select(better, offset, best.base);
    offset = select(better, moved, offset);
  }
  best.scale = select(best.flat, F32{}, best.scale);
  best.offset = -select(best.flat, lowest, offset);
  return best;
}

// x ~ scale * code with codes -half .. half - 1, those of `inverse`.
struct Symmetric {
  F32 scale, inverse;
  I32 zero;   // lanes that are all zero: the lowest code

  I32 code(F32 x, int half) const {   // from 0
    return ~zero & (clamp(nearest(inverse * x), -half, half - 1) + half);
  }
};

template <int N>
inline Symmetric fit_symmetric(const F32* x, const F32* weights, int half) {
  const F32 largest = extreme<N>(x);
  F32 weighted[N];
  for (int i = 0; i < N; i++) weighted[i] = weights[i] * x[i];
  F32 sum_xl, sum_l2;
  const auto sums = [&](F32 inverse) {
    sum_xl = sum_l2 = F32{};
    for (int i = 0; i < N; i++) {
      const F32 code = rounded(inverse * x[i], -half, half - 1);
      sum_xl += weighted[i] * code;
      sum_l2 += weights[i] * code * code;
    }
  };
  Symmetric best;
  best.zero = abs(largest) < kTiny;
  best.inverse = static_cast<float>(-half) / largest;
  sums(best.inverse);
  best.scale = select(sum_l2 != 0, sum_xl / sum_l2, F32{});
  F32 most = best.scale * sum_xl;
  for (int s = -9; s <= 9; s++) {
    if (s == 0) continue;
    const F32 inverse = -(half + 0.1f * s) / largest;
    sums(inverse);
    const I32 better = (sum_l2 > 0) & (sum_xl * sum_xl > most * sum_l2);
    best.scale = select(better, sum_xl / sum_l2, best.scale);
    most = select(better, best.scale * sum_xl, most);
    best.inverse = select(better, inverse, best.inverse);
  }
  best.scale = select(best.zero, F32{}, best.scale);
  return best;
}

// One code after the other is moved to where the others would have it, while that helps; the scale that fits them best.
// low: least code; 0 stands for codes kept as bytes, where a negative one (of values that should have been positive) wraps.
template <int N>
inline F32 take_turns(const F32* x, const F32* weights, I32* codes, int low, int high) {
  const bool as_bytes = low == 0;
  F32 sum_xl = {}, sum_l2 = {};
  for (int i = 0; i < N; i++) {
    const F32 code = to_f32(codes[i]);
    sum_xl += weights[i] * x[i] * code;
    sum_l2 += weights[i] * code * code;
    if (as_bytes) codes[i] &= 255;
  }
  for (int turn = 0; turn < 5; turn++) {
    I32 changed = {};
    for (int i = 0; i < N; i++) {
      const F32 old = to_f32(codes[i]), weighted = weights[i] * x[i];
      F32 rest_xl = sum_xl - weighted * old, rest_l2 = sum_l2 - weights[i] * old * old;
      I32 code = min(nearest(x[i] * rest_l2 / rest_xl), high), moved = rest_xl > 0;
      if (as_bytes) {
        moved &= rest_l2 > 0;
      } else {
        code = max(code, low);
      }
      moved &= code != codes[i];
      const F32 wanted = to_f32(code);
      rest_xl += weighted * wanted;
      rest_l2 += weights[i] * wanted * wanted;
      moved &= rest_xl * rest_xl * sum_l2 > sum_xl * sum_xl * rest_l2;
      if (!as_bytes) moved &= rest_l2 > 0;
      codes[i] = select(moved, as_bytes ? code & 255 : code, codes[i]);
      sum_xl = select(moved, rest_xl, sum_xl);
      sum_l2 = select(moved, rest_l2, sum_l2);
      changed |= moved;
    }
    if (!any(changed)) break;
  }
  return select(sum_l2 > 0, sum_xl / sum_l2, F32{});
}

// Codes from 0, with weights x^2. Q3_K's own search.
template <int N>
inline F32 fit_by_turns(const F32* x, int half, I32* codes) {
  const F32 largest = extreme<N>(x), inverse = static_cast<float>(-half) / largest;
  F32 weights[N];
  for (int i = 0; i < N; i++) {
    weights[i] = x[i] * x[i];
    codes[i] = clamp(nearest(inverse * x[i]), -half, half - 1);
  }
  const F32 scale = take_turns<N>(x, weights, codes, -half, half - 1);
  const I32 zero = abs(largest) < kTiny;
  for (int i = 0; i < N; i++) codes[i] = ~zero & (codes[i] + half);
  return select(zero, F32{}, scale);
}

// x >= 0: scale * code with codes 0 .. top.
template <int N>
inline F32 fit_positive(const F32* x, const F32* weights, int top, I32* codes) {
  F32 highest = {};
  for (int i = 0; i < N; i++) highest = select(highest > x[i], highest, x[i]);
  const auto loss = [&](F32 inverse, auto code_of) {
    const F32 scale = 1 / inverse;
    F32 sum = {};
    for (int i = 0; i < N; i++) {
      const F32 error = x[i] - scale * to_f32(code_of(nearest(inverse * x[i])));
      sum += weights[i] * error * error;
    }
    return sum;
  };
  F32 inverse = static_cast<float>(top) / highest, least = loss(inverse, [](I32 code) { return code & 255; });
  for (int s = -4; s <= 4; s++) {
    if (s == 0) continue;
    const F32 tried = (0.1f * s + top) / highest, found = loss(tried, [=](I32 code) { return min(code, top); });
    inverse = select(found < least, tried, inverse);
    least = select(found < least, found, least);
  }
  for (int i = 0; i < N; i++) codes[i] = min(nearest(inverse * x[i]), top);
  const F32 scale = take_turns<N>(x, weights, codes, 0, top);
  const I32 zero = highest < kTiny;
  for (int i = 0; i < N; i++) codes[i] = ~zero & min(codes[i], top);
  return select(zero, F32{}, scale);
}

}  // namespace llmctl::LLMCTL_ENCODE
