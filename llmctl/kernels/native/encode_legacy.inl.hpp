// Blocks of 32 with one scale: Q4_0 to Q8_0, IQ4_NL, MXFP4. The definition: formats/legacy.py, iquants.py, smallfloat.py.
#pragma once

#include "encode_search.inl.hpp"

namespace llmctl::LLMCTL_ENCODE {

// count bytes of every row from `offset`, four at a time: byte(i) is one of 0 .. 255 in every lane.
template <class Byte>
inline void put_bytes(Panel& panel, int64_t offset, int count, Byte byte) {
  for (int i = 0; i < count; i += 4)
    panel.put32(offset + i, byte(i) | byte(i + 1) << 8 | byte(i + 2) << 16 | byte(i + 3) << 24);
}

inline void put_nibbles(Panel& panel, int64_t offset, const I32* codes) {
  put_bytes(panel, offset, 16, [=](int i) { return (codes[i] & 15) | (codes[i + 16] & 15) << 4; });
}

inline void put_fifth_bits(Panel& panel, int64_t offset, const I32* codes) {
  I32 word = {};
  for (int i = 0; i < 32; i++) word |= (codes[i] >> 4 & 1) << i;
  panel.put32(offset, word);
}

// 1 / scale; 0 where that is not finite, which is where float16 has 0 for the scale.
inline F32 safe_inverse(F32 scale) {
  const F32 inverse = 1 / scale;
  return select((bits(inverse) & 0x7fffffff) < 0x7f800000, inverse, F32{});
}

// sum + x[0]^2 + x[1]^2 ...
inline F32 add_squares(const F32* x, int n, F32 sum) {
  for (int i = 0; i < n; i++) sum += x[i] * x[i];
  return sum;
}

// importance * sqrt(mean_square + x^2), or what the caller takes for the weights without an importance.
template <int N>
inline void importance_weights(const F32* x, const float* importance, F32 mean_square, F32* weights) {
  for (int i = 0; i < N; i++) weights[i] = importance[i] * square_root(mean_square + x[i] * x[i]);
}

// kHalf: 8 or 16. The codes start at 0.
template <int kHalf>
inline void signed_codes(Panel& panel, const F32* x, I32* codes) {
  const F32 scale = extreme<32>(x) / static_cast<float>(-kHalf), inverse = safe_inverse(scale);
  panel.put_scale(0, scale);
  for (int i = 0; i < 32; i++) codes[i] = min(truncate(x[i] * inverse + (kHalf + 0.5f)), 2 * kHalf - 1);
}

template <int kTop>
inline void offset_codes(Panel& panel, const F32* x, I32* codes) {
  F32 lowest = x[0], highest = x[0];
  for (int i = 1; i < 32; i++) {
    lowest = select(x[i] < lowest, x[i], lowest);
    highest = select(x[i] > highest, x[i], highest);
  }
  const F32 scale = (highest - lowest) / static_cast<float>(kTop), inverse = safe_inverse(scale);
  panel.put_scale(0, scale);
  panel.put_scale(2, lowest);
  for (int i = 0; i < 32; i++) codes[i] = truncate((x[i] - lowest) * inverse + 0.5f);
}

template <int kHalf>
inline void weighted_signed_codes(Panel& panel, const F32* x, const F32* weights, I32* codes) {
  const Symmetric fit = fit_symmetric<32>(x, weights, kHalf);
  panel.put_scale(0, fit.scale);
  for (int i = 0; i < 32; i++) codes[i] = fit.code(x[i], kHalf);
}

template <int kTop>
inline void weighted_offset_codes(Panel& panel, const F32* x, const F32* weights, I32* codes) {
  const Affine fit = fit_affine<32>(x, weights, kTop, {-0.9f, 0.05f, 36});
  panel.put_scale(0, fit.scale);
  panel.put_scale(2, -fit.offset);
  for (int i = 0; i < 32; i++) codes[i] = fit.code(x[i], kTop);
}

// The formats with four or five bits. Without an importance a block is rounded from its extremes, with one it is searched.
struct Q4_0 {
  static constexpr int kBytes = 18;
  static void plain(Panel& panel, const F32* x, I32* codes) { signed_codes<8>(panel, x, codes); }
  static void weighted(Panel& panel, const F32* x, const F32* w, I32* codes) { weighted_signed_codes<8>(panel, x, w, codes); }
  static void put(Panel& panel, const I32* codes) { put_nibbles(panel, 2, codes); }
};

struct Q4_1 {
  static constexpr int kBytes = 20;
  static void plain(Panel& panel, const F32* x, I32* codes) {
    offset_codes<15>(panel, x, codes);
    for (int i = 0; i < 32; i++) codes[i] = min(codes[i], 15);
  }
  static void weighted(Panel& panel, const F32* x, const F32* w, I32* codes) { weighted_offset_codes<15>(panel, x, w, codes); }
  static void put(Panel& panel, const I32* codes) { put_nibbles(panel, 4, codes); }
};

struct Q5_0 {
  static constexpr int kBytes = 22;
  static void plain(Panel& panel, const F32* x, I32* codes) { signed_codes<16>(panel, x, codes); }
  static void weighted(Panel& panel, const F32* x, const F32* w, I32* codes) { weighted_signed_codes<16>(panel, x, w, codes); }
  static void put(Panel& panel, const I32* codes) {
    put_fifth_bits(panel, 2, codes);
    put_nibbles(panel, 6, codes);
  }
};

struct Q5_1 {
  static constexpr int kBytes = 24;
  static void plain(Panel& panel, const F32* x, I32* codes) { offset_codes<31>(panel, x, codes); }
  static void weighted(Panel& panel, const F32* x, const F32* w, I32* codes) { weighted_offset_codes<31>(panel, x, w, codes); }
  static void put(Panel& panel, const I32* codes) {
    put_fifth_bits(panel, 4, codes);
    put_nibbles(panel, 8, codes);
  }
};

inline F32 row_mean_square(Panel& panel, int64_t columns) {
  F32 sum = {}, x[32];
  for (int64_t column = 0; column < columns; column += 32) {
    panel.load<32>(column, x);
    sum = add_squares(x, 32, sum);
  }
  return sum / static_cast<float>(columns);
}

template <class Format>
void encode_legacy(Panel& panel, const EncodeTask& task) {
  const F32 mean_square = task.importance ? row_mean_square(panel, task.columns) : F32{};
  F32 x[32], weights[32];
  I32 codes[32];
  for (int64_t column = 0; column < task.columns; column += 32) {
    panel.load<32>(column, x);
    if (task.importance) {
      importance_weights<32>(x, task.importance + column, mean_square, weights);
      Format::weighted(panel, x, weights, codes);
    } else {
      Format::plain(panel, x, codes);
    }
    Format::put(panel, codes);
    panel.next_block(Format::kBytes);
  }
}

inline I32 round_half_away(F32 a) {
  const I32 whole = truncate(a);
  const F32 rest = a - to_f32(whole);   // exact
  return whole + truncate(rest + rest);
}

inline void encode_q8_0(Panel& panel, const EncodeTask& task) {
  F32 x[32];
  for (int64_t column = 0; column < task.columns; column += 32) {
    panel.load<32>(column, x);
    const F32 scale = abs(extreme<32>(x)) / 127.f, inverse = safe_inverse(scale);
    panel.put_scale(0, scale);
    put_bytes(panel, 2, 32, [&](int i) { return round_half_away(x[i] * inverse) & 255; });
    panel.next_block(34);
  }
}

// The values of IQ4_NL by code, and where the nearest changes; a value in the middle goes to the higher one.
constexpr float kGrid[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline F32 grid_value(F32 x) {
  F32 value = splat(kGrid[0]);
  for (int i = 0; i < 15; i++) {
    const float step = kGrid[i + 1] - kGrid[i];
    value += select(x < (kGrid[i] + kGrid[i + 1]) / 2, F32{}, splat(step));
  }
  return value;
}

inline I32 grid_code(F32 x) {
  I32 code = {};
  for (int i = 0; i < 15; i++) code += 1 + (x < (kGrid[i] + kGrid[i + 1]) / 2);
  return code;
}

inline F32 fit_grid(const F32* x, const F32* weights) {
  const F32 largest = extreme<32>(x);
  F32 sum_xq, sum_q2;
  const auto sums = [&](F32 inverse) {
    sum_xq = sum_q2 = F32{};
    for (int i = 0; i < 32; i++) {
      const F32 value = grid_value(inverse * x[i]), weighted = weights[i] * value;
      sum_xq += weighted * x[i];
      sum_q2 += weighted * value;
    }
  };
  sums(1 / (-largest / kGrid[0]));
  F32 scale = select(sum_q2 > 0, sum_xq / sum_q2, F32{}), most = scale * sum_xq;
  for (int s = -7; s <= 7; s++) {
    sums((s + kGrid[0]) / largest);
    const I32 better = (sum_q2 > 0) & (sum_xq * sum_xq > most * sum_q2);
    scale = select(better, sum_xq / sum_q2, scale);
    most = select(better, scale * sum_xq, most);
  }
  return select(abs(largest) < kTiny, F32{}, scale);
}

inline void encode_iq4_nl(Panel& panel, const EncodeTask& task) {
  F32 x[32], weights[32];
  I32 codes[32];
  for (int64_t column = 0; column < task.columns; column += 32) {
    panel.load<32>(column, x);
    if (task.importance) {
      importance_weights<32>(x, task.importance + column, add_squares(x, 32, F32{}) * (2.f / 32), weights);
    } else {
      for (int i = 0; i < 32; i++) weights[i] = x[i] * x[i];
    }
    const F32 scale = fit_grid(x, weights), inverse = select(scale != 0, 1 / scale, F32{});
    panel.put_scale(0, scale);
    for (int i = 0; i < 32; i++) codes[i] = grid_code(inverse * x[i]);
    put_nibbles(panel, 2, codes);
    panel.next_block(18);
  }
}

// floor(log2 x) of a logarithm rounded to float32: just below a power of two it is that power's. x > 0.
inline int floor_log2(float x) {
  int32_t word;
  std::memcpy(&word, &x, 4);
  const bool near = (word & 0x7fffff) >= 0x7fff00, subnormal = word < 0x800000;
  if (!near && !subnormal) return (word >> 23) - 127;
  return static_cast<int>(std::floor(static_cast<float>(std::log2(static_cast<double>(x)))));
}

inline I32 shared_exponent(F32 largest) {
  I32 exponents = {};
  for (int i = 0; i < kLanes; i++)
    if (largest[i] > 0 && largest[i] < HUGE_VALF) exponents[i] = std::max(0, floor_log2(largest[i]) - 2 + 127);
  return exponents;
}

// Halves of the 4-bit floats' steps, in units of half the shared scale; a value in the middle goes to the lower one.
inline I32 float4_code(F32 x, F32 half_scale) {
  constexpr float kMiddle[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
  I32 code = {};
  for (float middle : kMiddle) code -= abs(x) > middle * half_scale;
  return code | ((x < 0) & (code > 0) & 8);
}

inline void encode_mxfp4(Panel& panel, const EncodeTask& task) {
  F32 x[32];
  I32 codes[32];
  for (int64_t column = 0; column < task.columns; column += 32) {
    panel.load<32, kFinite>(column, x);
    const I32 exponent = shared_exponent(abs(extreme<32>(x)));
    const F32 half_scale = from_bits(select(exponent < 2, splat(0x200000) << min(exponent, 1), (exponent - 1) << 23));
    panel.put8(0, exponent);
    for (int i = 0; i < 32; i++) codes[i] = float4_code(x[i], half_scale);
    put_nibbles(panel, 1, codes);
    panel.next_block(17);
  }
}

}  // namespace llmctl::LLMCTL_ENCODE
