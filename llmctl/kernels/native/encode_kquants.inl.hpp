// Super-blocks of 256 whose groups' scales are quantized in turn: Q2_K to Q6_K. The definition: formats/kquants_encode.py.
#pragma once

#include "encode_legacy.inl.hpp"

namespace llmctl::LLMCTL_ENCODE {

// The scales of groups, and the codes their searches found: they stand where the stored scale comes out as zero.
template <int kGroups>
struct Groups {
  F32 scales[kGroups], offsets[kGroups], weights[kGroups];   // weights: sums, with an importance
  I32 codes[256];
};

template <int N>
inline void sum_weights(const F32* weights, F32& sum) {
  sum = F32{};
  for (int i = 0; i < N; i++) sum += weights[i];
}

// What Q2_K, Q4_K and Q5_K differ in. kUnit: the greatest code of a scale.
struct Q2_K {
  static constexpr int kGroup = 16, kTop = 3, kUnit = 15, kBytes = 84;
  static constexpr bool kAbsolute = true;
  static constexpr Steps kSteps = {-0.5f, 0.1f, 15};
  static constexpr float kMeanFactor = 1;
};
struct Q4_K {
  static constexpr int kGroup = 32, kTop = 15, kUnit = 63, kBytes = 144;
  static constexpr bool kAbsolute = false;
  static constexpr Steps kSteps = {-1.f, 0.1f, 20};
  static constexpr float kMeanFactor = 2;
};
struct Q5_K {
  static constexpr int kGroup = 32, kTop = 31, kUnit = 63, kBytes = 176;
  static constexpr bool kAbsolute = false;
  static constexpr Steps kSteps = {-0.5f, 0.1f, 15};
  static constexpr float kMeanFactor = 2;
};

// Weights of the squared errors without an importance: large values count more.
template <class Format>
inline void own_weights(const F32* x, F32* weights) {
  constexpr int N = Format::kGroup;
  const F32 mean = Format::kAbsolute ? F32{} : square_root(add_squares(x, N, F32{}) / static_cast<float>(N));
  for (int i = 0; i < N; i++) weights[i] = Format::kAbsolute ? abs(x[i]) : mean + abs(x[i]);
}

template <class Format>
inline void fit_groups(const F32* x, const float* importance, Groups<256 / Format::kGroup>& groups) {
  constexpr int N = Format::kGroup;
  const F32 mean_square = importance ? Format::kMeanFactor * add_squares(x, 256, F32{}) / 256.f : F32{};
  F32 weights[N];
  for (int j = 0; j < 256 / N; j++) {
    Affine fit;
    if (importance) {
      importance_weights<N>(x + j * N, importance + j * N, mean_square, weights);
      sum_weights<N>(weights, groups.weights[j]);
      fit = fit_affine<N>(x + j * N, weights, Format::kTop, {-0.9f, 0.05f, 36});
    } else {
      own_weights<Format>(x + j * N, weights);
      fit = fit_affine<N, Format::kAbsolute>(x + j * N, weights, Format::kTop, Format::kSteps);
    }
    groups.scales[j] = fit.scale;
    groups.offsets[j] = fit.offset;
    for (int i = 0; i < N; i++) groups.codes[j * N + i] = fit.code(x[j * N + i], Format::kTop);
  }
}

// Scales (or offsets) as multiples of one number, which is returned.
template <int kGroups>
inline F32 quantize_scales(const F32* scales, const F32* weights, bool weighted, int unit, I32* codes) {
  if (weighted) return fit_positive<kGroups>(scales, weights, unit, codes);
  F32 largest = {};
  for (int j = 0; j < kGroups; j++) largest = select(scales[j] > largest, scales[j], largest);
  const F32 inverse = select(largest > 0, static_cast<float>(unit) / largest, F32{});
  for (int j = 0; j < kGroups; j++) codes[j] = min(nearest(inverse * scales[j]) & 255, unit);
  return select(largest > 0, largest / static_cast<float>(unit), F32{});
}

// The codes once more, for the scales as they are stored.
template <class Format>
inline void round_affine(const F32* x, I32 scale, const I32* scale_codes, I32 offset, const I32* offset_codes, I32* codes) {
  constexpr int N = Format::kGroup;
  for (int j = 0; j < 256 / N; j++) {
    const F32 d = from_half(scale) * to_f32(scale_codes[j]), m = from_half(offset) * to_f32(offset_codes[j]);
    for (int i = j * N; i < (j + 1) * N; i++)
      codes[i] = select(d != 0, clamp(nearest((x[i] + m) / d), 0, Format::kTop), codes[i]);
  }
}

inline void put_pairs(Panel& panel, int64_t offset, const I32* codes) {   // two bits of four codes a byte
  put_bytes(panel, offset, 64, [=](int i) {
    const I32* q = codes + i / 32 * 128 + i % 32;
    return (q[0] & 3) | (q[32] & 3) << 2 | (q[64] & 3) << 4 | (q[96] & 3) << 6;
  });
}

inline void put_six_bit_scales(Panel& panel, int64_t offset, const I32* scales, const I32* offsets) {
  put_bytes(panel, offset, 4, [=](int j) { return scales[j] | scales[j + 4] >> 4 << 6; });
  put_bytes(panel, offset + 4, 4, [=](int j) { return offsets[j] | offsets[j + 4] >> 4 << 6; });
  put_bytes(panel, offset + 8, 4, [=](int j) { return (scales[j + 4] & 15) | (offsets[j + 4] & 15) << 4; });
}

inline void put_affine(Q2_K, Panel& panel, F32 scale, F32 offset, const I32* scales, const I32* offsets, const I32* codes) {
  put_bytes(panel, 0, 16, [=](int j) { return scales[j] | offsets[j] << 4; });
  put_pairs(panel, 16, codes);
  panel.put_scale(80, scale);
  panel.put_scale(82, offset);
}

inline void put_affine(Q4_K, Panel& panel, F32 scale, F32 offset, const I32* scales, const I32* offsets, const I32* codes) {
  panel.put_scale(0, scale);
  panel.put_scale(2, offset);
  put_six_bit_scales(panel, 4, scales, offsets);
  for (int p = 0; p < 4; p++)
    put_bytes(panel, 16 + 32 * p, 32, [=](int i) { return codes[64 * p + i] | codes[64 * p + 32 + i] << 4; });
}

inline void put_affine(Q5_K, Panel& panel, F32 scale, F32 offset, const I32* scales, const I32* offsets, const I32* codes) {
  panel.put_scale(0, scale);
  panel.put_scale(2, offset);
  put_six_bit_scales(panel, 4, scales, offsets);
  put_bytes(panel, 16, 32, [=](int i) {
    I32 byte = {};
    for (int j = 0; j < 8; j++) byte |= codes[32 * j + i] >> 4 << j;
    return byte;
  });
  for (int p = 0; p < 4; p++)
    put_bytes(panel, 48 + 32 * p, 32, [=](int i) { return (codes[64 * p + i] & 15) | (codes[64 * p + 32 + i] & 15) << 4; });
}

template <class Format>
void encode_affine(Panel& panel, const EncodeTask& task) {
  constexpr int kGroups = 256 / Format::kGroup;
  F32 x[256];
  Groups<kGroups> groups;
  I32 scales[kGroups], offsets[kGroups];
  for (int64_t column = 0; column < task.columns; column += 256) {
    const float* importance = task.importance ? task.importance + column : nullptr;
    panel.load<256>(column, x);
    fit_groups<Format>(x, importance, groups);
    const F32 scale = quantize_scales<kGroups>(groups.scales, groups.weights, importance, Format::kUnit, scales);
    const F32 offset = quantize_scales<kGroups>(groups.offsets, groups.weights, importance, Format::kUnit, offsets);
    round_affine<Format>(x, to_half(scale), scales, to_half(offset), offsets, groups.codes);
    put_affine(Format{}, panel, scale, offset, scales, offsets, groups.codes);
    panel.next_block(Format::kBytes);
  }
}

// The codes of symmetric groups of 16 once more, from 0, for the scales as they are stored.
inline void round_symmetric(const F32* x, I32 scale, const I32* scale_codes, int half, I32* codes) {
  for (int j = 0; j < 16; j++) {
    const F32 d = from_half(scale) * to_f32(scale_codes[j]);
    for (int i = 16 * j; i < 16 * (j + 1); i++)
      codes[i] = select(d != 0, clamp(nearest(x[i] / d), -half, half - 1) + half, codes[i]);
  }
}

// Largest in magnitude to the lowest code: scales -limit .. limit - 1 and what they are multiples of. Zero lanes: 0.
inline F32 signed_scales(const F32* scales, int limit, I32* codes) {
  const F32 largest = extreme<16>(scales), inverse = static_cast<float>(-limit) / largest;
  for (int j = 0; j < 16; j++) codes[j] = clamp(nearest(inverse * scales[j]), -limit, limit - 1);
  return 1 / inverse;
}

inline F32 q3_k_scales(const F32* x, const float* importance, Groups<16>& groups, I32* scales) {
  F32 weights[16];
  if (!importance) {
    for (int j = 0; j < 16; j++) groups.scales[j] = fit_by_turns<16>(x + 16 * j, 4, groups.codes + 16 * j);
    const I32 zero = extreme<16>(groups.scales) == 0;
    const F32 scale = signed_scales(groups.scales, 32, scales);
    for (int j = 0; j < 16; j++) scales[j] = select(zero, splat(-32), scales[j]);
    return select(zero, F32{}, scale);
  }
  const F32 mean_square = 2 * add_squares(x, 256, F32{}) / 256.f;
  for (int j = 0; j < 16; j++) {
    importance_weights<16>(x + 16 * j, importance + 16 * j, mean_square, weights);
    sum_weights<16>(weights, groups.weights[j]);
    const Symmetric fit = fit_symmetric<16>(x + 16 * j, weights, 4);
    groups.scales[j] = fit.scale;
    for (int i = 16 * j; i < 16 * (j + 1); i++) groups.codes[i] = fit.code(x[i], 4);
  }
  const Symmetric fit = fit_symmetric<16>(groups.scales, groups.weights, 32);
  for (int j = 0; j < 16; j++) scales[j] = fit.code(groups.scales[j], 32) - 32;
  return fit.scale;
}

inline void encode_q3_k(Panel& panel, const EncodeTask& task) {
  F32 x[256];
  Groups<16> groups;
  I32 scales[16];
  const I32* codes = groups.codes;
  for (int64_t column = 0; column < task.columns; column += 256) {
    panel.load<256>(column, x);
    const F32 scale = q3_k_scales(x, task.importance ? task.importance + column : nullptr, groups, scales);
    round_symmetric(x, to_half(scale), scales, 4, groups.codes);
    put_bytes(panel, 0, 32, [=](int i) {
      I32 byte = {};
      for (int j = 0; j < 8; j++) byte |= codes[32 * j + i] >> 2 << j;
      return byte;
    });
    put_pairs(panel, 32, codes);
    for (I32& code : scales) code += 32;
    put_bytes(panel, 96, 8, [&](int j) { return (scales[j] & 15) | (scales[j + 8] & 15) << 4; });
    put_bytes(panel, 104, 4, [&](int j) {
      return scales[j] >> 4 | scales[j + 4] >> 4 << 2 | scales[j + 8] >> 4 << 4 | scales[j + 12] >> 4 << 6;
    });
    panel.put_scale(108, scale);
    panel.next_block(110);
  }
}

inline void q6_k_groups(const F32* x, const float* importance, Groups<16>& groups) {
  F32 weights[16];
  for (int j = 0; j < 16; j++) {
    for (int i = 0; i < 16; i++) weights[i] = importance ? splat(importance[16 * j + i]) : x[16 * j + i] * x[16 * j + i];
    const Symmetric fit = fit_symmetric<16>(x + 16 * j, weights, 32);
    groups.scales[j] = fit.scale;
    for (int i = 16 * j; i < 16 * (j + 1); i++) groups.codes[i] = fit.code(x[i], 32);
  }
}

inline void put_q6_k(Panel& panel, F32 scale, const I32* scales, const I32* codes) {
  put_bytes(panel, 0, 128, [=](int i) {
    const I32* q = codes + i / 64 * 128 + i % 64;
    return (q[0] & 15) | (q[64] & 15) << 4;
  });
  put_bytes(panel, 128, 64, [=](int i) {
    const I32* q = codes + i / 32 * 128 + i % 32;
    return q[0] >> 4 | q[32] >> 4 << 2 | q[64] >> 4 << 4 | q[96] >> 4 << 6;
  });
  put_bytes(panel, 192, 16, [=](int j) { return scales[j] & 255; });
  panel.put_scale(208, scale);
}

inline void encode_q6_k(Panel& panel, const EncodeTask& task) {
  F32 x[256];
  Groups<16> groups;
  I32 scales[16];
  for (int64_t column = 0; column < task.columns; column += 256) {
    panel.load<256>(column, x);
    q6_k_groups(x, task.importance ? task.importance + column : nullptr, groups);
    const I32 zero = abs(extreme<16>(groups.scales)) < kTiny;   // all bytes of the block are 0 then
    const F32 scale = select(zero, F32{}, signed_scales(groups.scales, 128, scales));
    for (I32& code : scales) code &= ~zero;
    round_symmetric(x, to_half(scale), scales, 32, groups.codes);
    for (I32& code : groups.codes) code &= ~zero;
    put_q6_k(panel, scale, scales, groups.codes);
    panel.next_block(210);
  }
}

}  // namespace llmctl::LLMCTL_ENCODE
