// Sixteen lanes in two AVX2 registers (with FMA and F16C); see avx512.hpp for the interface.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace llmctl::LLMCTL_ISA {

struct F32 { __m256 lo, hi; };    // 16 float32
struct I32 { __m256i lo, hi; };   // 16 int32
struct U8 { __m256i lo, hi; };    // 64 bytes: 4 per lane

// 16 words of ones, then 16 of zeros: the mask of the first n lanes starts at word 16 - n.
alignas(64) static const int32_t kFirstLanes[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};

inline __m256i load256(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store256(void* p, __m256i a) { _mm256_storeu_si256((__m256i*)p, a); }

inline F32 zero_f32() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 set_f32(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32 load_f32_first(const float* p, int n) {   // lanes n.. are 0; n from 0 to 16
  const int32_t* mask = kFirstLanes + 16 - n;
  return {_mm256_maskload_ps(p, load256(mask)), _mm256_maskload_ps(p + 8, load256(mask + 8))};
}
inline void store_f32(float* p, F32 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store_f32_first(float* p, F32 a, int n) {
  const int32_t* mask = kFirstLanes + 16 - n;
  _mm256_maskstore_ps(p, load256(mask), a.lo);
  _mm256_maskstore_ps(p + 8, load256(mask + 8), a.hi);
}
inline F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void store_f16(uint16_t* p, F32 a) {   // round to nearest even
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 widen_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F32 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32 fma(F32 a, F32 b, F32 c) {   // a * b + c, one rounding
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline __m256 select_less(__m256 a, __m256 b, __m256 x, __m256 y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline F32 select_less(F32 a, F32 b, F32 x, F32 y) {   // a < b ? x : y; y where a or b is NaN
  return {select_less(a.lo, b.lo, x.lo, y.lo), select_less(a.hi, b.hi, x.hi, y.hi)};
}
// max: a > b ? a : b, min: a < b ? a : b, so b where either is NaN.
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32 abs(F32 a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline float reduce_add(F32 a) {   // lane i + lane i + 8, then + 4, + 2, + 1
  __m256 half = _mm256_add_ps(a.lo, a.hi);
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}
inline float reduce_max(F32 a) {
  __m256 half = _mm256_max_ps(a.lo, a.hi);
  __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}
inline F32 round_f32(F32 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n in two steps, so that results below the normal numbers come out and the exponent of neither factor overflows.
inline __m256 scale_by_power_of_two(__m256 a, __m256 n) {
  n = _mm256_max_ps(_mm256_min_ps(n, _mm256_set1_ps(254)), _mm256_set1_ps(-252));
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
inline F32 scale_by_power_of_two(F32 a, F32 n) {   // a * 2^n, n whole
  return {scale_by_power_of_two(a.lo, n.lo), scale_by_power_of_two(a.hi, n.hi)};
}

inline I32 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32 set_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32 load_i32(const int32_t* p) { return {load256(p), load256(p + 8)}; }
inline void store_i32(int32_t* p, I32 a) {
  store256(p, a.lo);
  store256(p + 8, a.hi);
}
inline I32 load_u8_i32(const uint8_t* p) {
  __m128i lo = _mm_loadl_epi64((const __m128i*)p), hi = _mm_loadl_epi64((const __m128i*)(p + 8));
  return {_mm256_cvtepu8_epi32(lo), _mm256_cvtepu8_epi32(hi)};
}
inline I32 load_i8_i32(const int8_t* p) {
  __m128i lo = _mm_loadl_epi64((const __m128i*)p), hi = _mm_loadl_epi64((const __m128i*)(p + 8));
  return {_mm256_cvtepi8_epi32(lo), _mm256_cvtepi8_epi32(hi)};
}
inline I32 add(I32 a, I32 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I32 sub(I32 a, I32 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline I32 mul(I32 a, I32 b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline I32 max(I32 a, I32 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline I32 bit_and(I32 a, I32 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline I32 bit_or(I32 a, I32 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N> I32 shift_right(I32 a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }   // logical
template <int N> I32 shift_left(I32 a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
inline F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I32 to_i32(F32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }   // nearest even
inline I32 bits(F32 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline F32 from_bits(I32 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline int32_t reduce_max(I32 a) {
  __m256i half = _mm256_max_epi32(a.lo, a.hi);
  __m128i quarter = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  quarter = _mm_max_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(quarter, _mm_shuffle_epi32(quarter, 0xB1)));
}
inline int32_t reduce_add(I32 a) {
  __m256i half = _mm256_add_epi32(a.lo, a.hi);
  __m128i quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  quarter = _mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xB1)));
}
inline void store_i8(int8_t* p, I32 a) {   // values fit
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline int32_t load_word(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

inline U8 load_u8(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
inline void store_u8(uint8_t* p, U8 a) {
  store256(p, a.lo);
  store256(p + 32, a.hi);
}
inline U8 set_u8(uint8_t x) { return {_mm256_set1_epi8((char)x), _mm256_set1_epi8((char)x)}; }
inline U8 bit_and(U8 a, U8 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline U8 and_or(U8 a, U8 mask, U8 b) {   // (a & mask) | b
  return {_mm256_or_si256(_mm256_and_si256(a.lo, mask.lo), b.lo), _mm256_or_si256(_mm256_and_si256(a.hi, mask.hi), b.hi)};
}
template <int N> U8 shift_right(U8 a) { return {_mm256_srli_epi16(a.lo, N), _mm256_srli_epi16(a.hi, N)}; }
template <int N> U8 shift_left(U8 a) { return {_mm256_slli_epi16(a.lo, N), _mm256_slli_epi16(a.hi, N)}; }
inline U8 load_table(const uint8_t* p) {
  __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return {table, table};
}
inline U8 look_up(U8 table, U8 index) {   // index 0 to 15
  return {_mm256_shuffle_epi8(table.lo, index.lo), _mm256_shuffle_epi8(table.hi, index.hi)};
}
template <int N> I32 byte_i32(U8 a) {   // byte N of every lane
  const int at = (int)(0x80808000u | N);   // the others become 0
  __m256i pick = _mm256_setr_epi32(at, at + 4, at + 8, at + 12, at, at + 4, at + 8, at + 12);
  return {_mm256_shuffle_epi8(a.lo, pick), _mm256_shuffle_epi8(a.hi, pick)};
}
inline I32 mul_i16(I32 a, I32 b) { return {_mm256_madd_epi16(a.lo, b.lo), _mm256_madd_epi16(a.hi, b.hi)}; }

inline I32 largest_of_8(const I32* a) {   // lane i of the result, i from 0 to 7: the largest lane of a[i]
  int32_t largest[16] = {};
  for (int i = 0; i < 8; ++i) largest[i] = reduce_max(a[i]);
  return load_i32(largest);
}
inline void sums_of_16(const int8_t* codes, int32_t* sums) {   // the sums of 16 times 16 codes
  __m256i ones = _mm256_set1_epi8(1), pair = _mm256_set1_epi16(1);
  for (int i = 0; i < 2; ++i, codes += 128, sums += 8) {
    __m256i fours[4];   // 16 codes in half a register
    for (int j = 0; j < 4; ++j) fours[j] = _mm256_madd_epi16(_mm256_maddubs_epi16(ones, load256(codes + 32 * j)), pair);
    __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(fours[0], fours[1]), _mm256_hadd_epi32(fours[2], fours[3]));
    __m128i even = _mm256_castsi256_si128(all), odd = _mm256_extracti128_si256(all, 1);
    _mm_storeu_si128((__m128i*)sums, _mm_unpacklo_epi32(even, odd));
    _mm_storeu_si128((__m128i*)(sums + 4), _mm_unpackhi_epi32(even, odd));
  }
}

constexpr int kFloatTokens = 2;
#ifdef __AVXVNNI__
constexpr bool kDotSigned = false;
constexpr int kDotTokens = 4;
constexpr int kTilesAtOnce = 1, kSharedTokens = kDotTokens;
inline U8 dot_form(U8 codes) { return codes; }
template <int MaxCode, int Groups, int T>
inline void dot(const U8* codes, const int8_t* x, int64_t stride, I32* sums) {
#pragma GCC unroll 8
  for (int g = 0; g < Groups; ++g)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      __m256i word = _mm256_set1_epi32(load_word(x + t * stride + 4 * g));
      sums[t].lo = _mm256_dpbusd_avx_epi32(sums[t].lo, codes[g].lo, word);
      sums[t].hi = _mm256_dpbusd_avx_epi32(sums[t].hi, codes[g].hi, word);
    }
}
#else
// Without a four-byte dot product pairs of products are summed in 16 bits (maddubs, which saturates).
constexpr bool kDotSigned = true;
constexpr int kDotTokens = 4;
constexpr int kTilesAtOnce = 1, kSharedTokens = kDotTokens;
inline U8 dot_form(U8 codes) {
  __m256i flip = _mm256_set1_epi8((char)0x80);
  return {_mm256_xor_si256(codes.lo, flip), _mm256_xor_si256(codes.hi, flip)};
}
// Eight signed bits: |code| <= 128 times the activation with the code's sign, two of them at most 32512.
inline __m256i dot_signed(__m256i codes, __m256i word) {
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(word, codes));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
template <int Groups, int T> inline void dot_signed(const U8* codes, const int8_t* x, int64_t stride, I32* sums) {
#pragma GCC unroll 8
  for (int g = 0; g < Groups; ++g)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      __m256i word = _mm256_set1_epi32(load_word(x + t * stride + 4 * g));
      sums[t].lo = _mm256_add_epi32(sums[t].lo, dot_signed(codes[g].lo, word));
      sums[t].hi = _mm256_add_epi32(sums[t].hi, dot_signed(codes[g].hi, word));
    }
}
// GCC puts all products before the first sum otherwise, and most of them into memory.
inline void compute_now(I32& a) { asm volatile("" : "+x"(a.lo), "+x"(a.hi)); }
// Codes of up to 6 bits: as many groups as 16 bits can hold are summed before they are widened.
template <int MaxCode, int Groups, int T>
inline void dot(const U8* codes, const int8_t* x, int64_t stride, I32* sums) {
  if constexpr (MaxCode > 127) {
    dot_signed<Groups, T>(codes, x, stride, sums);
  } else {
    constexpr int kHolds = 32767 / (2 * 127 * MaxCode), kRun = kHolds < Groups ? kHolds : Groups;
    static_assert(kRun >= 1 && Groups % kRun == 0);
#pragma GCC unroll 8
    for (int first = 0; first < Groups; first += kRun) {
      I32 pairs[T];
#pragma GCC unroll 8
      for (int g = first; g < first + kRun; ++g)
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          __m256i word = _mm256_set1_epi32(load_word(x + t * stride + 4 * g));
          __m256i lo = _mm256_maddubs_epi16(codes[g].lo, word), hi = _mm256_maddubs_epi16(codes[g].hi, word);
          pairs[t].lo = g == first ? lo : _mm256_add_epi16(pairs[t].lo, lo);
          pairs[t].hi = g == first ? hi : _mm256_add_epi16(pairs[t].hi, hi);
          compute_now(pairs[t]);
        }
      for (int t = 0; t < T; ++t) {
        sums[t].lo = _mm256_add_epi32(sums[t].lo, _mm256_madd_epi16(pairs[t].lo, _mm256_set1_epi16(1)));
        sums[t].hi = _mm256_add_epi32(sums[t].hi, _mm256_madd_epi16(pairs[t].hi, _mm256_set1_epi16(1)));
      }
    }
  }
}
#endif

}  // namespace llmctl::LLMCTL_ISA
