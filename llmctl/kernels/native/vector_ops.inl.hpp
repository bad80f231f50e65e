// The element-wise kernels and the norm, over 16 lanes; any length. What an element becomes does not depend on where in a
// vector it stands.
#pragma once

#include <math.h>

#include "kernels.hpp"
#include "vector_math.inl.hpp"

namespace llmctl::LLMCTL_ISA {

template <class Function>
inline void map(const float* x, int64_t n, float* out, Function function) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store_f32(out + i, function(load_f32(x + i)));
  if (i == n) return;
  int rest = int(n - i);
  store_f32_first(out + i, function(load_f32_first(x + i, rest)), rest);
}

template <class Function>
inline void map(const float* x, const float* y, int64_t n, float* out, Function function) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store_f32(out + i, function(load_f32(x + i), load_f32(y + i)));
  if (i == n) return;
  int rest = int(n - i);
  store_f32_first(out + i, function(load_f32_first(x + i, rest), load_f32_first(y + i, rest)), rest);
}

// Four sums, vector i into sum i mod 4: enough to hide the latency, and an order that n alone decides.
template <class Step>
inline float sum_over(const float* x, int64_t n, Step step) {
  F32 sums[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) sums[j] = step(sums[j], load_f32(x + i + 16 * j));
  }
  for (int j = 0; i < n; i += 16, ++j) {
    sums[j] = step(sums[j], n - i < 16 ? load_f32_first(x + i, int(n - i)) : load_f32(x + i));
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

inline float sum_of_squares(const float* x, int64_t n) {
  return sum_over(x, n, [](F32 sum, F32 value) { return fma(value, value, sum); });
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
  F32 factor = set_f32(1.0f / sqrtf(sum_of_squares(x, n) / float(n) + eps));
  map(x, weight, n, y, [factor](F32 value, F32 w) { return mul(mul(value, factor), w); });
}

inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y) {
  F32 mean = set_f32(sum_over(x, n, [](F32 sum, F32 value) { return add(sum, value); }) / float(n));
  map(x, n, y, [mean](F32 value) { return sub(value, mean); });
  rms_norm(y, weight, eps, n, y);
  if (bias) map(y, bias, n, y, [](F32 value, F32 b) { return add(value, b); });
}

// Products and their sum are rounded one by one, as the reference does.
inline void rotary(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    int lanes = half - i < 16 ? int(half - i) : 16;
    F32 c = load_f32_first(cos + i, lanes), s = load_f32_first(sin + i, lanes);
    F32 first = load_f32_first(head + i, lanes), second = load_f32_first(head + half + i, lanes);
    store_f32_first(head + i, sub(mul(first, c), mul(second, s)), lanes);
    store_f32_first(head + half + i, add(mul(second, c), mul(first, s)), lanes);
  }
}

// x / (1 + e^-x). The exponential is taken of -|x|, so that it never overflows.
inline F32 times_sigmoid(F32 x, F32 of) {
  F32 small = exp(sub(zero_f32(), abs(of)));
  F32 share = div(select_less(of, zero_f32(), small, set_f32(1.0f)), add(set_f32(1.0f), small));
  return mul(x, share);
}

// All three go to 0 on the left; minus infinity would be infinity times 0.
inline F32 without_infinity(F32 x) { return max(set_f32(-1e30f), x); }

inline F32 silu(F32 x) {
  x = without_infinity(x);
  return times_sigmoid(x, x);
}

inline F32 gelu_tanh(F32 x) {   // 0.5 (1 + tanh u) = sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  x = without_infinity(x);
  F32 inner = fma(mul(x, x), set_f32(1.5957691216f * 0.044715f), set_f32(1.5957691216f));
  return times_sigmoid(x, mul(x, inner));
}

inline F32 gelu(F32 x) {
  x = without_infinity(x);
  F32 half = set_f32(0.5f);
  return mul(x, fma(erf(mul(x, set_f32(0.70710678f))), half, half));
}

// max and min give their second operand where one is NaN: a NaN stays one.
inline F32 clamped_swiglu(F32 gate, F32 up) {
  gate = min(set_f32(7.0f), gate);
  up = max(set_f32(-7.0f), min(set_f32(7.0f), up));
  gate = without_infinity(gate);
  return mul(add(up, set_f32(1.0f)), times_sigmoid(gate, mul(gate, set_f32(1.702f))));
}

template <class Function>
inline void map_gated(const float* gate, const float* up, int64_t n, float* y, Function function) {
  if (!up) return map(gate, n, y, function);
  map(gate, up, n, y, [function](F32 g, F32 u) { return mul(function(g), u); });
}

inline void gated_activation(const float* gate, const float* up, Activation activation, int64_t n, float* y) {
  switch (activation) {
    case Activation::Silu: return map_gated(gate, up, n, y, [](F32 g) { return silu(g); });
    case Activation::GeluTanh: return map_gated(gate, up, n, y, [](F32 g) { return gelu_tanh(g); });
    case Activation::Gelu: return map_gated(gate, up, n, y, [](F32 g) { return gelu(g); });
    case Activation::ClampedSwiglu: return map(gate, up, n, y, [](F32 g, F32 u) { return clamped_swiglu(g, u); });
  }
}

inline void add(const float* x, const float* y, int64_t n, float* out) {
  map(x, y, n, out, [](F32 a, F32 b) { return add(a, b); });
}

inline void scale(const float* x, float factor, int64_t n, float* out) {
  F32 wide = set_f32(factor);
  map(x, n, out, [wide](F32 a) { return mul(a, wide); });
}

inline void softcap(const float* x, float cap, int64_t n, float* out) {
  F32 wide = set_f32(cap);
  map(x, n, out, [wide](F32 a) { return mul(wide, tanh(div(a, wide))); });
}

}  // namespace llmctl::LLMCTL_ISA
