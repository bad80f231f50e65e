// Sixteen lanes in four NEON registers, with the dot product of ARMv8.2; see avx512.hpp for the interface. The matrix
// instructions of i8mm are not used: they want 8 columns of a row side by side, and the layouts keep 4.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace llmctl::LLMCTL_ISA {

struct F32 { float32x4_t v[4]; };
struct I32 { int32x4_t v[4]; };
struct U8 { uint8x16_t v[4]; };   // 64 bytes: 4 per lane

// Each quarter of the result is f(number of the quarter).
template <class R, class F> inline R make(F f) { return {{f(0), f(1), f(2), f(3)}}; }

inline F32 set_f32(float x) { return make<F32>([&](int) { return vdupq_n_f32(x); }); }
inline F32 zero_f32() { return set_f32(0); }
inline F32 load_f32(const float* p) { return make<F32>([&](int i) { return vld1q_f32(p + 4 * i); }); }
inline void store_f32(float* p, F32 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline F32 load_f32_first(const float* p, int n) {   // lanes n.. are 0; n from 0 to 16
  float lanes[16] = {};
  std::memcpy(lanes, p, 4 * (size_t)n);
  return load_f32(lanes);
}
inline void store_f32_first(float* p, F32 a, int n) {
  float lanes[16];
  store_f32(lanes, a);
  std::memcpy(p, lanes, 4 * (size_t)n);
}
inline F32 load_f16(const uint16_t* p) {
  return make<F32>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void store_f16(uint16_t* p, F32 a) {   // round to nearest even
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
inline F32 load_bf16(const uint16_t* p) {
  return make<F32>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline F32 add(F32 a, F32 b) { return make<F32>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
inline F32 sub(F32 a, F32 b) { return make<F32>([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
inline F32 mul(F32 a, F32 b) { return make<F32>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
inline F32 div(F32 a, F32 b) { return make<F32>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
inline F32 fma(F32 a, F32 b, F32 c) { return make<F32>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
inline F32 select_less(F32 a, F32 b, F32 x, F32 y) {   // a < b ? x : y; y where a or b is NaN
  return make<F32>([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), x.v[i], y.v[i]); });
}
// max: a > b ? a : b, min: a < b ? a : b, so b where either is NaN.
inline float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline F32 max(F32 a, F32 b) { return make<F32>([&](int i) { return max4(a.v[i], b.v[i]); }); }
inline F32 min(F32 a, F32 b) { return make<F32>([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); }); }
inline F32 abs(F32 a) { return make<F32>([&](int i) { return vabsq_f32(a.v[i]); }); }
inline float reduce_add(F32 a) {   // lane i + lane i + 8, then + 4, + 2, + 1
  float32x4_t quarter = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  float32x2_t eighth = vadd_f32(vget_low_f32(quarter), vget_high_f32(quarter));
  return vget_lane_f32(eighth, 0) + vget_lane_f32(eighth, 1);
}
inline float reduce_max(F32 a) {
  float32x4_t quarter = max4(max4(a.v[0], a.v[2]), max4(a.v[1], a.v[3]));
  quarter = max4(quarter, vextq_f32(quarter, quarter, 2));
  return vgetq_lane_f32(max4(quarter, vextq_f32(quarter, quarter, 1)), 0);
}
inline F32 round_f32(F32 a) { return make<F32>([&](int i) { return vrndnq_f32(a.v[i]); }); }
// a * 2^n in two steps, so that results below the normal numbers come out and the exponent of neither factor overflows.
inline float32x4_t times_power_of_two(float32x4_t a, float32x4_t n) {
  int32x4_t whole = vcvtnq_s32_f32(vmaxnmq_f32(vminnmq_f32(n, vdupq_n_f32(254)), vdupq_n_f32(-252)));
  int32x4_t half = vshrq_n_s32(whole, 1), bias = vdupq_n_s32(127);
  float32x4_t first = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
  float32x4_t second = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23));
  return vmulq_f32(vmulq_f32(a, first), second);
}
inline F32 scale_by_power_of_two(F32 a, F32 n) {   // a * 2^n, n whole
  return make<F32>([&](int i) { return times_power_of_two(a.v[i], n.v[i]); });
}

inline I32 set_i32(int32_t x) { return make<I32>([&](int) { return vdupq_n_s32(x); }); }
inline I32 zero_i32() { return set_i32(0); }
inline I32 load_i32(const int32_t* p) { return make<I32>([&](int i) { return vld1q_s32(p + 4 * i); }); }
inline void store_i32(int32_t* p, I32 a) {
  for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]);
}
inline I32 widen_u8(uint8x16_t a) {
  uint16x8_t low = vmovl_u8(vget_low_u8(a)), high = vmovl_high_u8(a);
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))}};
}
inline I32 load_u8_i32(const uint8_t* p) { return widen_u8(vld1q_u8(p)); }
inline I32 load_i8_i32(const int8_t* p) {
  int8x16_t a = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(a)), high = vmovl_high_s8(a);
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}
inline I32 add(I32 a, I32 b) { return make<I32>([&](int i) { return vaddq_s32(a.v[i], b.v[i]); }); }
inline I32 sub(I32 a, I32 b) { return make<I32>([&](int i) { return vsubq_s32(a.v[i], b.v[i]); }); }
inline I32 mul(I32 a, I32 b) { return make<I32>([&](int i) { return vmulq_s32(a.v[i], b.v[i]); }); }
inline I32 max(I32 a, I32 b) { return make<I32>([&](int i) { return vmaxq_s32(a.v[i], b.v[i]); }); }
inline I32 bit_and(I32 a, I32 b) { return make<I32>([&](int i) { return vandq_s32(a.v[i], b.v[i]); }); }
inline I32 bit_or(I32 a, I32 b) { return make<I32>([&](int i) { return vorrq_s32(a.v[i], b.v[i]); }); }
template <int N> I32 shift_right(I32 a) {   // logical
  return make<I32>([&](int i) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), N)); });
}
template <int N> I32 shift_left(I32 a) { return make<I32>([&](int i) { return vshlq_n_s32(a.v[i], N); }); }
inline F32 to_f32(I32 a) { return make<F32>([&](int i) { return vcvtq_f32_s32(a.v[i]); }); }
inline I32 to_i32(F32 a) { return make<I32>([&](int i) { return vcvtnq_s32_f32(a.v[i]); }); }   // nearest even, saturated
inline I32 bits(F32 a) { return make<I32>([&](int i) { return vreinterpretq_s32_f32(a.v[i]); }); }
inline F32 from_bits(I32 a) { return make<F32>([&](int i) { return vreinterpretq_f32_s32(a.v[i]); }); }
inline int32_t reduce_max(I32 a) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3]))); }
inline int32_t reduce_add(I32 a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
inline void store_i8(int8_t* p, I32 a) {   // values fit
  int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1])), high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline U8 load_u8(const uint8_t* p) { return make<U8>([&](int i) { return vld1q_u8(p + 16 * i); }); }
inline void store_u8(uint8_t* p, U8 a) {
  for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, a.v[i]);
}
inline U8 set_u8(uint8_t x) { return make<U8>([&](int) { return vdupq_n_u8(x); }); }
inline U8 bit_and(U8 a, U8 b) { return make<U8>([&](int i) { return vandq_u8(a.v[i], b.v[i]); }); }
inline U8 and_or(U8 a, U8 mask, U8 b) { return make<U8>([&](int i) { return vorrq_u8(vandq_u8(a.v[i], mask.v[i]), b.v[i]); }); }
template <int N> U8 shift_right(U8 a) { return make<U8>([&](int i) { return vshrq_n_u8(a.v[i], N); }); }
template <int N> U8 shift_left(U8 a) { return make<U8>([&](int i) { return vshlq_n_u8(a.v[i], N); }); }
inline U8 load_table(const uint8_t* p) { return make<U8>([&](int) { return vld1q_u8(p); }); }
inline U8 look_up(U8 table, U8 index) { return make<U8>([&](int i) { return vqtbl1q_u8(table.v[i], index.v[i]); }); }
template <int N> I32 byte_i32(U8 a) {   // byte N of every lane
  return make<I32>([&](int i) {
    uint32x4_t words = vreinterpretq_u32_u8(a.v[i]);
    if constexpr (N > 0) words = vshrq_n_u32(words, 8 * N);
    return vreinterpretq_s32_u32(vandq_u32(words, vdupq_n_u32(255)));
  });
}
// a * b where a fits 16 unsigned bits read as int16 and b fits int16.
inline I32 mul_i16(I32 a, I32 b) {
  return make<I32>([&](int i) { return vmull_s16(vmovn_s32(a.v[i]), vmovn_s32(b.v[i])); });
}

inline I32 largest_of_8(const I32* a) {   // lane i of the result, i from 0 to 7: the largest lane of a[i]
  int32_t largest[16] = {};
  for (int i = 0; i < 8; ++i) largest[i] = reduce_max(a[i]);
  return load_i32(largest);
}
inline void sums_of_16(const int8_t* codes, int32_t* sums) {   // the sums of 16 times 16 codes
  for (int i = 0; i < 16; ++i) sums[i] = vaddlvq_s8(vld1q_s8(codes + 16 * i));
}

constexpr bool kDotSigned = true;
constexpr int kDotTokens = 4;
constexpr int kTilesAtOnce = 1, kSharedTokens = kDotTokens;
constexpr int kFloatTokens = 2;
inline U8 dot_form(U8 codes) { return make<U8>([&](int i) { return veorq_u8(codes.v[i], vdupq_n_u8(0x80)); }); }
template <int MaxCode, int Groups, int T>
inline void dot(const U8* codes, const int8_t* x, int64_t stride, I32* sums) {
  static_assert(Groups % 4 == 0);
  for (int first = 0; first < Groups; first += 4) {
    int8x16_t words[T];   // four groups of four columns
    for (int t = 0; t < T; ++t) words[t] = vld1q_s8(x + t * stride + 4 * first);
    for (int t = 0; t < T; ++t)
      for (int i = 0; i < 4; ++i) {
        sums[t].v[i] = vdotq_laneq_s32(sums[t].v[i], vreinterpretq_s8_u8(codes[first].v[i]), words[t], 0);
        sums[t].v[i] = vdotq_laneq_s32(sums[t].v[i], vreinterpretq_s8_u8(codes[first + 1].v[i]), words[t], 1);
        sums[t].v[i] = vdotq_laneq_s32(sums[t].v[i], vreinterpretq_s8_u8(codes[first + 2].v[i]), words[t], 2);
        sums[t].v[i] = vdotq_laneq_s32(sums[t].v[i], vreinterpretq_s8_u8(codes[first + 3].v[i]), words[t], 3);
      }
  }
}

}  // namespace llmctl::LLMCTL_ISA
