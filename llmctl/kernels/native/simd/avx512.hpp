// Sixteen lanes in one AVX-512 register: the interface that every file in simd/ offers, under the same names. Kernels are
// written once against it and compiled once per instruction set. A lane is an output row, a head dimension or a key.
//
// No standard containers or algorithms in files compiled for one instruction set: the linker would be free to pick their
// AVX-512 copy for everyone.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace llmctl::LLMCTL_ISA {

struct F32 { __m512 v; };    // 16 float32
struct I32 { __m512i v; };   // 16 int32
struct U8 { __m512i v; };    // 64 bytes: 4 per lane

inline F32 zero_f32() { return {_mm512_setzero_ps()}; }
inline F32 set_f32(float x) { return {_mm512_set1_ps(x)}; }
inline F32 load_f32(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32 load_f32_first(const float* p, int n) {   // lanes n.. are 0; n from 0 to 16
  return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)};
}
inline void store_f32(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline void store_f32_first(float* p, F32 a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v); }
inline F32 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store_f16(uint16_t* p, F32 a) {   // round to nearest even
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F32 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }   // a * b + c, one rounding
inline F32 select_less(F32 a, F32 b, F32 x, F32 y) {   // a < b ? x : y; y where a or b is NaN
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// max: a > b ? a : b, min: a < b ? a : b, so b where either is NaN.
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
inline float reduce_add(F32 a) {   // a fixed tree: lane i + lane i + 8, then + 4, + 2, + 1, in every instruction set
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}
inline float reduce_max(F32 a) {   // the same tree
  __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}
inline F32 round_f32(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32 scale_by_power_of_two(F32 a, F32 n) { return {_mm512_scalef_ps(a.v, n.v)}; }   // a * 2^n, n whole, -252 to 252

inline I32 zero_i32() { return {_mm512_setzero_si512()}; }
inline I32 set_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_i32(int32_t* p, I32 a) { _mm512_storeu_si512(p, a.v); }
inline I32 load_u8_i32(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline I32 load_i8_i32(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32 sub(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I32 mul(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I32 max(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline I32 bit_and(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I32 bit_or(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N> I32 shift_right(I32 a) { return {_mm512_srli_epi32(a.v, N)}; }   // logical
template <int N> I32 shift_left(I32 a) { return {_mm512_slli_epi32(a.v, N)}; }
inline I32 bits(F32 a) { return {_mm512_castps_si512(a.v)}; }
inline F32 from_bits(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
inline F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32 to_i32(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }   // nearest even
inline int32_t reduce_max(I32 a) { return _mm512_reduce_max_epi32(a.v); }
inline int32_t reduce_add(I32 a) { return _mm512_reduce_add_epi32(a.v); }
inline void store_i8(int8_t* p, I32 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }   // values fit

// Four int8 activations as one word.
inline int32_t load_word(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// Bytes: the codes of a weight block, 4 columns of a row in a lane. Shifts move within 16 bits, so bits of the neighbouring
// byte come in at the end: mask them.
inline U8 load_u8(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_u8(uint8_t* p, U8 a) { _mm512_storeu_si512(p, a.v); }
inline U8 set_u8(uint8_t x) { return {_mm512_set1_epi8((char)x)}; }
inline U8 bit_and(U8 a, U8 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline U8 and_or(U8 a, U8 mask, U8 b) { return {_mm512_ternarylogic_epi32(a.v, mask.v, b.v, 0xEA)}; }   // (a & mask) | b
template <int N> U8 shift_right(U8 a) { return {_mm512_srli_epi16(a.v, N)}; }
template <int N> U8 shift_left(U8 a) { return {_mm512_slli_epi16(a.v, N)}; }
inline U8 load_table(const uint8_t* p) { return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))}; }
inline U8 look_up(U8 table, U8 index) { return {_mm512_shuffle_epi8(table.v, index.v)}; }   // index 0 to 15
template <int N> I32 byte_i32(U8 a) {   // byte N of every lane
  const int at = (int)(0x80808000u | N);   // the others become 0
  if (N == 3) return {_mm512_srli_epi32(a.v, 24)};
  return {_mm512_shuffle_epi8(a.v, _mm512_set4_epi32(at + 12, at + 8, at + 4, at))};
}
// a * b where a fits 16 unsigned bits read as int16 and b fits int16.
inline I32 mul_i16(I32 a, I32 b) { return {_mm512_madd_epi16(a.v, b.v)}; }

// Lane i of the result, i from 0 to 7: the largest lane of a[i]. (The lanes behind them repeat it.)
inline __m512i larger_words(__m512i a, __m512i b) {
  return _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
inline __m512i larger_pairs(__m512i a, __m512i b) {
  return _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
inline I32 largest_of_8(const I32* a) {
  __m512i low = larger_pairs(larger_words(a[0].v, a[1].v), larger_words(a[2].v, a[3].v));
  __m512i high = larger_pairs(larger_words(a[4].v, a[5].v), larger_words(a[6].v, a[7].v));
  __m512i both = _mm512_max_epi32(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xDD));
  both = _mm512_max_epi32(both, _mm512_shuffle_i32x4(both, both, 0xB1));   // quarters 0 and 2 hold a[0..3] and a[4..7]
  return {_mm512_shuffle_i32x4(both, both, 0x88)};
}
// The sums of 16 times 16 codes.
inline void sums_of_16(const int8_t* codes, int32_t* sums) {
  __m512i ones = _mm512_set1_epi8(1), pair = _mm512_set1_epi16(1), fours[4];
  for (int i = 0; i < 4; ++i) fours[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, _mm512_loadu_si512(codes + 64 * i));
  __m512i low = _mm512_madd_epi16(_mm512_packs_epi32(fours[0], fours[1]), pair);
  __m512i high = _mm512_madd_epi16(_mm512_packs_epi32(fours[2], fours[3]), pair);
  __m512i all = _mm512_madd_epi16(_mm512_packs_epi32(low, high), pair);   // word v of quarter q: sum 4 v + q
  __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(sums, _mm512_permutexvar_epi32(order, all));
}

// Dot products of codes (unsigned bytes up to MaxCode) with the int8 activations of T tokens, `stride` bytes apart:
// sums[t] += sum over g < Groups, c < 4 of codes[g].byte[4 * lane + c] * x[t * stride + 4 * g + c]. Exact.
// Codes above 127 go through dot_form first; where kDotSigned they then count as code - 128.
constexpr bool kDotSigned = false;
constexpr int kDotTokens = 8;     // tokens that fill the registers beside a tile
constexpr int kTilesAtOnce = 2;   // unpacked tiles that share the loads of activations
constexpr int kSharedTokens = 4;  // tokens that fill the registers beside them
constexpr int kFloatTokens = 8;   // the same for two tiles of floats
inline U8 dot_form(U8 codes) { return codes; }
template <int MaxCode, int Groups, int T>
inline void dot(const U8* codes, const int8_t* x, int64_t stride, I32* sums) {
#pragma GCC unroll 8
  for (int g = 0; g < Groups; ++g)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
      sums[t].v = _mm512_dpbusd_epi32(sums[t].v, codes[g].v, _mm512_set1_epi32(load_word(x + t * stride + 4 * g)));
}

}  // namespace llmctl::LLMCTL_ISA
