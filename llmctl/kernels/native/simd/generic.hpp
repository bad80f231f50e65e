// Sixteen lanes as plain arrays, for any machine; see avx512.hpp for the interface. The loops are for the compiler to
// vectorise. `fma` rounds twice here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace llmctl::LLMCTL_ISA {

struct F32 { float v[16]; };
struct I32 { int32_t v[16]; };
struct U8 { uint8_t v[64]; };   // 4 bytes per lane

static inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// A vector whose lane i is f(i).
template <class R, class F> static inline R make(F f) {
  R r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}

// Half precision without F16C. The multiplication moves the exponent, subnormal numbers included.
static inline float half_to_float(uint16_t h) {
  uint32_t bits = as_bits(as_float((uint32_t)(h & 0x7FFF) << 13) * 0x1p112f);
  if ((h & 0x7C00) == 0x7C00) bits = 0x7F800000u | (uint32_t)(h & 0x3FF) << 13;
  return as_float(bits | (uint32_t)(h & 0x8000) << 16);
}
static inline uint16_t float_to_half(float x) {   // round to nearest even
  uint32_t sign = as_bits(x) >> 16 & 0x8000, bits = as_bits(x) & 0x7FFFFFFF;
  if (bits >= 0x47800000) {   // 65536 and above, infinity, NaN
    uint32_t nan = bits > 0x7F800000 ? 0x200 | (bits >> 13 & 0x3FF) : 0;
    return (uint16_t)(sign | 0x7C00 | nan);
  }
  if (bits < 0x38800000) {   // below the normal half numbers: adding 1/2 rounds to the last place of theirs
    return (uint16_t)(sign | (as_bits(as_float(bits) + 0.5f) - 0x3F000000));
  }
  return (uint16_t)(sign | (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13);
}

inline F32 set_f32(float x) { return make<F32>([&](int) { return x; }); }
inline F32 zero_f32() { return set_f32(0); }
inline F32 load_f32(const float* p) { return make<F32>([&](int i) { return p[i]; }); }
inline F32 load_f32_first(const float* p, int n) {   // lanes n.. are 0; n from 0 to 16
  return make<F32>([&](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store_f32(float* p, F32 a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store_f32_first(float* p, F32 a, int n) { std::memcpy(p, a.v, 4 * (size_t)n); }
inline F32 load_f16(const uint16_t* p) { return make<F32>([&](int i) { return half_to_float(p[i]); }); }
inline void store_f16(uint16_t* p, F32 a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]);
}
inline F32 load_bf16(const uint16_t* p) { return make<F32>([&](int i) { return as_float((uint32_t)p[i] << 16); }); }
inline F32 add(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] + b.v[i]; }); }
inline F32 sub(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] - b.v[i]; }); }
inline F32 mul(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] * b.v[i]; }); }
inline F32 div(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] / b.v[i]; }); }
inline F32 fma(F32 a, F32 b, F32 c) { return make<F32>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F32 select_less(F32 a, F32 b, F32 x, F32 y) {   // a < b ? x : y; y where a or b is NaN
  return make<F32>([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
// max: a > b ? a : b, min: a < b ? a : b, so b where either is NaN.
inline F32 max(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F32 min(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F32 abs(F32 a) { return make<F32>([&](int i) { return std::fabs(a.v[i]); }); }
inline float reduce_add(F32 a) {   // lane i + lane i + 8, then + 4, + 2, + 1
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline float reduce_max(F32 a) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}
// Nearest even: at 2^23 and above every float is whole, so adding it to a smaller one rounds.
static inline float round_to_even(float x) {
  float rounded = std::copysign(std::fabs(x) + 0x1p23f - 0x1p23f, x);
  return std::fabs(x) < 0x1p23f ? rounded : x;
}
inline F32 round_f32(F32 a) { return make<F32>([&](int i) { return round_to_even(a.v[i]); }); }
// a * 2^n in two steps, so that results below the normal numbers come out and the exponent of neither factor overflows.
static inline float times_power_of_two(float a, float n) {
  n = n < 254.0f ? n : 254.0f;
  int32_t whole = (int32_t)(n > -252.0f ? n : -252.0f), half = whole >> 1;
  return a * as_float((uint32_t)(half + 127) << 23) * as_float((uint32_t)(whole - half + 127) << 23);
}
inline F32 scale_by_power_of_two(F32 a, F32 n) {   // a * 2^n, n whole
  return make<F32>([&](int i) { return times_power_of_two(a.v[i], n.v[i]); });
}

inline I32 set_i32(int32_t x) { return make<I32>([&](int) { return x; }); }
inline I32 zero_i32() { return set_i32(0); }
inline I32 load_i32(const int32_t* p) { return make<I32>([&](int i) { return p[i]; }); }
inline void store_i32(int32_t* p, I32 a) { std::memcpy(p, a.v, sizeof a.v); }
inline I32 load_u8_i32(const uint8_t* p) { return make<I32>([&](int i) { return p[i]; }); }
inline I32 load_i8_i32(const int8_t* p) { return make<I32>([&](int i) { return p[i]; }); }
inline I32 add(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] + b.v[i]; }); }
inline I32 sub(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] - b.v[i]; }); }
inline I32 mul(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] * b.v[i]; }); }
inline I32 max(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline I32 bit_and(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] & b.v[i]; }); }
inline I32 bit_or(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] | b.v[i]; }); }
template <int N> I32 shift_right(I32 a) { return make<I32>([&](int i) { return (int32_t)((uint32_t)a.v[i] >> N); }); }
template <int N> I32 shift_left(I32 a) { return make<I32>([&](int i) { return (int32_t)((uint32_t)a.v[i] << N); }); }
inline F32 to_f32(I32 a) { return make<F32>([&](int i) { return (float)a.v[i]; }); }
static inline int32_t nearest_i32(float x) {   // what does not fit comes out as on x86
  return x >= -0x1p31f && x < 0x1p31f ? (int32_t)round_to_even(x) : INT32_MIN;
}
inline I32 to_i32(F32 a) { return make<I32>([&](int i) { return nearest_i32(a.v[i]); }); }   // nearest even
inline I32 bits(F32 a) { return make<I32>([&](int i) { return (int32_t)as_bits(a.v[i]); }); }
inline F32 from_bits(I32 a) { return make<F32>([&](int i) { return as_float((uint32_t)a.v[i]); }); }
inline int32_t reduce_max(I32 a) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}
inline int32_t reduce_add(I32 a) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += a.v[i];
  return sum;
}
inline void store_i8(int8_t* p, I32 a) {   // values fit
  for (int i = 0; i < 16; ++i) p[i] = (int8_t)a.v[i];
}

template <class F> static inline U8 make_u8(F f) {
  U8 r;
  for (int i = 0; i < 64; ++i) r.v[i] = (uint8_t)f(i);
  return r;
}
// Sixteen bits, low byte first, shifted as one number.
template <class F> static inline U8 make_u16(U8 a, F f) {
  for (int i = 0; i < 64; i += 2) {
    uint32_t pair = f((uint32_t)a.v[i] | (uint32_t)a.v[i + 1] << 8);
    a.v[i] = (uint8_t)pair;
    a.v[i + 1] = (uint8_t)(pair >> 8);
  }
  return a;
}
inline U8 load_u8(const uint8_t* p) { return make_u8([&](int i) { return p[i]; }); }
inline void store_u8(uint8_t* p, U8 a) { std::memcpy(p, a.v, sizeof a.v); }
inline U8 set_u8(uint8_t x) { return make_u8([&](int) { return x; }); }
inline U8 bit_and(U8 a, U8 b) { return make_u8([&](int i) { return a.v[i] & b.v[i]; }); }
inline U8 and_or(U8 a, U8 mask, U8 b) { return make_u8([&](int i) { return (a.v[i] & mask.v[i]) | b.v[i]; }); }
template <int N> U8 shift_right(U8 a) { return make_u16(a, [](uint32_t pair) { return pair >> N; }); }
template <int N> U8 shift_left(U8 a) { return make_u16(a, [](uint32_t pair) { return pair << N; }); }
inline U8 load_table(const uint8_t* p) { return make_u8([&](int i) { return p[i & 15]; }); }
inline U8 look_up(U8 table, U8 index) { return make_u8([&](int i) { return table.v[index.v[i] & 15]; }); }
template <int N> I32 byte_i32(U8 a) { return make<I32>([&](int i) { return a.v[4 * i + N]; }); }
inline I32 mul_i16(I32 a, I32 b) { return make<I32>([&](int i) { return (int16_t)a.v[i] * b.v[i]; }); }

constexpr bool kDotSigned = false;
constexpr int kDotTokens = 2;
constexpr int kFloatTokens = 2;
inline U8 dot_form(U8 codes) { return codes; }
template <int MaxCode, int Groups, int T>
inline void dot(const U8* codes, const int8_t* x, int64_t stride, I32* sums) {
  for (int t = 0; t < T; ++t)
    for (int g = 0; g < Groups; ++g)
      for (int i = 0; i < 64; ++i) sums[t].v[i / 4] += codes[g].v[i] * x[t * stride + 4 * g + i % 4];
}

}  // namespace llmctl::LLMCTL_ISA
