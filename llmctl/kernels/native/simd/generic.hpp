// Sixteen lanes as four of the compiler's own vectors of 16 bytes, for any machine; see avx512.hpp for the interface. `fma`
// rounds twice here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace llmctl::LLMCTL_ISA {

template <class Number> struct VectorOf { typedef Number Type __attribute__((vector_size(16))); };
using Float4 = VectorOf<float>::Type;
using Int4 = VectorOf<int32_t>::Type;
using Word4 = VectorOf<uint32_t>::Type;
using Short8 = VectorOf<int16_t>::Type;
using Half8 = VectorOf<uint16_t>::Type;
using Byte16 = VectorOf<uint8_t>::Type;

struct F32 { Float4 v[4]; };
struct I32 { Int4 v[4]; };
struct U8 { Byte16 v[4]; };   // 64 bytes: 4 per lane

// Each quarter of the result is f(number of the quarter).
template <class R, class F> static inline R make(F f) {
  R r;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) r.v[i] = f(i);
  return r;
}
template <class To, class From> static inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
template <class To> static inline To load_as(const void* p) {
  To to;
  std::memcpy(&to, p, sizeof to);
  return to;
}
static inline Float4 all4(float x) { return Float4{x, x, x, x}; }
static inline Int4 all4(int32_t x) { return Int4{x, x, x, x}; }
static inline Float4 select(Int4 mask, Float4 x, Float4 y) {
  return bit_cast<Float4>((mask & bit_cast<Int4>(x)) | (~mask & bit_cast<Int4>(y)));
}
// One lane after another, where there is no operator.
template <class R, class F> static inline R make_lanes(F f) {
  decltype(R{}.v[0][0] + 0) lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = f(i);
  return load_as<R>(lanes);
}

inline F32 set_f32(float x) { return make<F32>([&](int) { return all4(x); }); }
inline F32 zero_f32() { return set_f32(0); }
inline F32 load_f32(const float* p) { return load_as<F32>(p); }
inline void store_f32(float* p, F32 a) { std::memcpy(p, &a, sizeof a); }
inline F32 load_f32_first(const float* p, int n) {   // lanes n.. are 0; n from 0 to 16
  float lanes[16] = {};
  std::memcpy(lanes, p, 4 * (size_t)n);
  return load_f32(lanes);
}
inline void store_f32_first(float* p, F32 a, int n) { std::memcpy(p, &a, 4 * (size_t)n); }

// Half precision without F16C. The multiplication moves the exponent, subnormal numbers included.
static inline Word4 widen4(const uint16_t* p) { return Word4{p[0], p[1], p[2], p[3]}; }
static inline Float4 half_to_float(Word4 h) {
  Word4 moved = bit_cast<Word4>(bit_cast<Float4>((h & 0x7FFF) << 13) * 0x1p112f);
  Word4 special = (Word4)((h & 0x7C00) == 0x7C00) & (0x7F800000u | (h & 0x3FF) << 13);
  return bit_cast<Float4>(moved | special | (h & 0x8000) << 16);
}
static inline float as_float(uint32_t bits) { return bit_cast<float>(bits); }
static inline uint16_t float_to_half(float x) {   // round to nearest even
  uint32_t sign = bit_cast<uint32_t>(x) >> 16 & 0x8000, bits = bit_cast<uint32_t>(x) & 0x7FFFFFFF;
  if (bits >= 0x47800000) {   // 65536 and above, infinity, NaN
    uint32_t nan = bits > 0x7F800000 ? 0x200 | (bits >> 13 & 0x3FF) : 0;
    return (uint16_t)(sign | 0x7C00 | nan);
  }
  if (bits < 0x38800000) {   // below the normal half numbers: adding 1/2 rounds to the last place of theirs
    return (uint16_t)(sign | (bit_cast<uint32_t>(as_float(bits) + 0.5f) - 0x3F000000));
  }
  return (uint16_t)(sign | (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13);
}
inline F32 load_f16(const uint16_t* p) { return make<F32>([&](int i) { return half_to_float(widen4(p + 4 * i)); }); }
inline void store_f16(uint16_t* p, F32 a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i / 4][i % 4]);
}
inline F32 load_bf16(const uint16_t* p) { return make<F32>([&](int i) { return bit_cast<Float4>(widen4(p + 4 * i) << 16); }); }

inline F32 add(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] + b.v[i]; }); }
inline F32 sub(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] - b.v[i]; }); }
inline F32 mul(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] * b.v[i]; }); }
inline F32 div(F32 a, F32 b) { return make<F32>([&](int i) { return a.v[i] / b.v[i]; }); }
inline F32 fma(F32 a, F32 b, F32 c) { return make<F32>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F32 select_less(F32 a, F32 b, F32 x, F32 y) {   // a < b ? x : y; y where a or b is NaN
  return make<F32>([&](int i) { return select(a.v[i] < b.v[i], x.v[i], y.v[i]); });
}
// max: a > b ? a : b, min: a < b ? a : b, so b where either is NaN.
inline F32 max(F32 a, F32 b) { return make<F32>([&](int i) { return select(a.v[i] > b.v[i], a.v[i], b.v[i]); }); }
inline F32 min(F32 a, F32 b) { return make<F32>([&](int i) { return select(a.v[i] < b.v[i], a.v[i], b.v[i]); }); }
static inline Float4 abs4(Float4 a) { return bit_cast<Float4>(bit_cast<Int4>(a) & 0x7FFFFFFF); }
inline F32 abs(F32 a) { return make<F32>([&](int i) { return abs4(a.v[i]); }); }
inline float reduce_add(F32 a) {   // lane i + lane i + 8, then + 4, + 2, + 1
  Float4 quarter = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}
inline float reduce_max(F32 a) {
  auto larger = [](auto x, auto y) { return x > y ? x : y; };
  F32 half = max(a, F32{{a.v[2], a.v[3], a.v[2], a.v[3]}});
  Float4 quarter = select(half.v[0] > half.v[1], half.v[0], half.v[1]);
  return larger(larger(quarter[0], quarter[2]), larger(quarter[1], quarter[3]));
}
// Nearest even: at 2^23 and above every float is whole, so adding it to a smaller one rounds. The sign of zero stays.
static inline Float4 round4(Float4 a) {
  Float4 size = abs4(a), whole = size + 0x1p23f - 0x1p23f;
  Int4 sign = bit_cast<Int4>(a) & INT32_MIN;
  return select(size < 0x1p23f, bit_cast<Float4>(bit_cast<Int4>(whole) | sign), a);
}
inline F32 round_f32(F32 a) { return make<F32>([&](int i) { return round4(a.v[i]); }); }
// a * 2^n in two steps, so that results below the normal numbers come out and the exponent of neither factor overflows.
static inline Float4 times_power_of_two(Float4 a, Float4 n) {
  n = select(n < 254.0f, n, all4(254.0f));
  Int4 whole = __builtin_convertvector(select(n > -252.0f, n, all4(-252.0f)), Int4), half = whole >> 1;
  return a * bit_cast<Float4>((half + 127) << 23) * bit_cast<Float4>((whole - half + 127) << 23);
}
inline F32 scale_by_power_of_two(F32 a, F32 n) {   // a * 2^n, n whole
  return make<F32>([&](int i) { return times_power_of_two(a.v[i], n.v[i]); });
}

inline I32 set_i32(int32_t x) { return make<I32>([&](int) { return all4(x); }); }
inline I32 zero_i32() { return set_i32(0); }
inline I32 load_i32(const int32_t* p) { return load_as<I32>(p); }
inline void store_i32(int32_t* p, I32 a) { std::memcpy(p, &a, sizeof a); }
inline I32 load_u8_i32(const uint8_t* p) { return make_lanes<I32>([&](int i) { return p[i]; }); }
inline I32 load_i8_i32(const int8_t* p) { return make_lanes<I32>([&](int i) { return p[i]; }); }
inline I32 add(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] + b.v[i]; }); }
inline I32 sub(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] - b.v[i]; }); }
inline I32 mul(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] * b.v[i]; }); }
inline I32 max(I32 a, I32 b) {
  return make<I32>([&](int i) { Int4 larger = a.v[i] > b.v[i]; return (larger & a.v[i]) | (~larger & b.v[i]); });
}
inline I32 bit_and(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] & b.v[i]; }); }
inline I32 bit_or(I32 a, I32 b) { return make<I32>([&](int i) { return a.v[i] | b.v[i]; }); }
template <int N> I32 shift_right(I32 a) { return make<I32>([&](int i) { return (Int4)((Word4)a.v[i] >> N); }); }   // logical
template <int N> I32 shift_left(I32 a) { return make<I32>([&](int i) { return (Int4)((Word4)a.v[i] << N); }); }
inline F32 to_f32(I32 a) { return make<F32>([&](int i) { return __builtin_convertvector(a.v[i], Float4); }); }
inline I32 to_i32(F32 a) {   // nearest even; what does not fit comes out as on x86
  return make<I32>([&](int i) {
    Int4 fits = (a.v[i] >= -0x1p31f) & (a.v[i] < 0x1p31f);
    Int4 whole = __builtin_convertvector(round4(select(fits, a.v[i], all4(0.0f))), Int4);
    return (fits & whole) | (~fits & INT32_MIN);
  });
}
inline I32 bits(F32 a) { return make<I32>([&](int i) { return bit_cast<Int4>(a.v[i]); }); }
inline F32 from_bits(I32 a) { return make<F32>([&](int i) { return bit_cast<Float4>(a.v[i]); }); }
inline int32_t reduce_max(I32 a) {
  int32_t largest = a.v[0][0];
  for (int i = 1; i < 16; ++i) largest = largest > a.v[i / 4][i % 4] ? largest : a.v[i / 4][i % 4];
  return largest;
}
inline int32_t reduce_add(I32 a) {
  Int4 quarter = a.v[0] + a.v[1] + a.v[2] + a.v[3];
  return quarter[0] + quarter[1] + quarter[2] + quarter[3];
}
inline void store_i8(int8_t* p, I32 a) {   // values fit
  for (int i = 0; i < 16; ++i) p[i] = (int8_t)a.v[i / 4][i % 4];
}

static inline Byte16 all16(uint8_t x) { return x - Byte16{}; }
inline U8 load_u8(const uint8_t* p) { return load_as<U8>(p); }
inline void store_u8(uint8_t* p, U8 a) { std::memcpy(p, &a, sizeof a); }
inline U8 set_u8(uint8_t x) { return make<U8>([&](int) { return all16(x); }); }
inline U8 bit_and(U8 a, U8 b) { return make<U8>([&](int i) { return a.v[i] & b.v[i]; }); }
inline U8 and_or(U8 a, U8 mask, U8 b) { return make<U8>([&](int i) { return (a.v[i] & mask.v[i]) | b.v[i]; }); }
template <int N> U8 shift_right(U8 a) { return make<U8>([&](int i) { return (Byte16)((Half8)a.v[i] >> N); }); }
template <int N> U8 shift_left(U8 a) { return make<U8>([&](int i) { return (Byte16)((Half8)a.v[i] << N); }); }
inline U8 load_table(const uint8_t* p) { return make<U8>([&](int) { return load_as<Byte16>(p); }); }
inline U8 look_up(U8 table, U8 index) {   // index 0 to 15
  uint8_t entries[64], at[64], found[64];
  store_u8(entries, table);
  store_u8(at, index);
  for (int i = 0; i < 64; ++i) found[i] = entries[at[i] & 15];
  return load_u8(found);
}
template <int N> I32 byte_i32(U8 a) {   // byte N of every lane
  return make<I32>([&](int i) { return (Int4)((bit_cast<Word4>(a.v[i]) >> (8 * N)) & 255); });
}
// a * b where a fits 16 unsigned bits read as int16 and b fits int16.
inline I32 mul_i16(I32 a, I32 b) { return make<I32>([&](int i) { return (a.v[i] << 16 >> 16) * b.v[i]; }); }

inline I32 largest_of_8(const I32* a) {   // lane i of the result, i from 0 to 7: the largest lane of a[i]
  int32_t largest[16] = {};
  for (int i = 0; i < 8; ++i) largest[i] = reduce_max(a[i]);
  return load_i32(largest);
}
inline void sums_of_16(const int8_t* codes, int32_t* sums) {   // the sums of 16 times 16 codes
  for (int i = 0; i < 16; ++i) {
    sums[i] = 0;
    for (int j = 0; j < 16; ++j) sums[i] += codes[16 * i + j];
  }
}

constexpr bool kDotSigned = false;
constexpr int kDotTokens = 2;
constexpr int kTilesAtOnce = 1, kSharedTokens = kDotTokens;
constexpr int kFloatTokens = 2;
inline U8 dot_form(U8 codes) { return codes; }
// Products of even and of odd bytes fit 16 bits (255 * 127); two of them lie in a lane.
template <int MaxCode, int Groups, int T>
inline void dot(const U8* codes, const int8_t* x, int64_t stride, I32* sums) {
  for (int t = 0; t < T; ++t)
    for (int g = 0; g < Groups; ++g) {
      const int8_t* y = x + t * stride + 4 * g;
      Short8 even = {y[0], y[2], y[0], y[2], y[0], y[2], y[0], y[2]}, odd = {y[1], y[3], y[1], y[3], y[1], y[3], y[1], y[3]};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Half8 pairs = (Half8)codes[g].v[i];
        Int4 a = (Int4)((Short8)(pairs & 255) * even), b = (Int4)((Short8)(pairs >> 8) * odd);
        sums[t].v[i] += ((a << 16 >> 16) + (a >> 16)) + ((b << 16 >> 16) + (b >> 16));
      }
    }
}

}  // namespace llmctl::LLMCTL_ISA
