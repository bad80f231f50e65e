// What pages are made of: elements by themselves, and blocks of 32 with a scale of their own.
#pragma once

#include "attention_merge.inl.hpp"

namespace llmctl::LLMCTL_ISA {

// ---- Elements by themselves.

inline F32 load_lanes(const float* p) { return load_f32(p); }
struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };
struct Small { uint8_t bits; };   // E4M3 without infinities: 448 is the largest, 0x7F a NaN
inline F32 load_lanes(const Half* p) { return load_f16(&p->bits); }
inline F32 load_lanes(const Brain* p) { return load_bf16(&p->bits); }
// An f16 number has as many more bits of exponent as E4M3 has fewer of the digits, and 2^-8 of the value: E4M3's smallest numbers,
// which have no leading one, become such numbers as well.
#if defined(__AVX512F__)
inline F32 load_lanes(const Small* p) {
  __m128i codes = _mm_loadu_si128((const __m128i*)p);
  __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16((short)0xBFFF));
  __mmask16 numbers = _mm_cmpneq_epi8_mask(_mm_add_epi8(codes, codes), _mm_set1_epi8((char)0xFE));
  return {_mm512_mask_mul_ps(_mm512_set1_ps(NAN), numbers, _mm512_cvtph_ps(halves), _mm512_set1_ps(256))};
}
#elif defined(__AVX2__)
inline F32 load_lanes(const Small* p) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), most = _mm256_set1_epi16(0x3F80);
  __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xBFFF));
  halves = _mm256_or_si256(halves, _mm256_slli_epi16(_mm256_cmpeq_epi16(_mm256_and_si256(halves, most), most), 9));   // a NaN
  __m256 factor = _mm256_set1_ps(256);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor)};
}
#else
inline F32 load_lanes(const Small* p) {
  I32 code = load_u8_i32(&p->bits), exponent = bit_and(shift_right<3>(code), set_i32(15));
  I32 implicit = bit_and(shift_right<1>(add(exponent, set_i32(15))), set_i32(8));   // 8 where the exponent is not 0
  I32 digits = bit_or(bit_and(code, set_i32(7)), implicit);
  F32 power = from_bits(shift_left<23>(add(max(exponent, set_i32(1)), set_i32(127 - 10))));
  F32 size = mul(to_f32(digits), power);
  size = select_less(size, set_f32(480), size, set_f32(NAN));
  return from_bits(bit_or(bits(size), shift_left<24>(bit_and(code, set_i32(128)))));
}
#endif

inline void round_to(float* to, F32 x) { store_f32(to, x); }
inline void round_to(Half* to, F32 x) { store_f16(&to->bits, x); }
inline void round_to(Brain* to, F32 x) {   // nearest even; a NaN keeps its upper bits and gets one that cannot vanish
  I32 word = bits(x);
  I32 odd = bit_and(shift_right<16>(word), set_i32(1));
  int32_t rounded[16], quiet[16];
  store_i32(rounded, shift_right<16>(add(add(word, set_i32(0x7FFF)), odd)));
  store_i32(quiet, bit_or(shift_right<16>(word), set_i32(0x40)));
  float lanes[16];
  store_f32(lanes, x);
  for (int i = 0; i < 16; ++i) to[i].bits = uint16_t(lanes[i] == lanes[i] ? rounded[i] : quiet[i]);
}
inline uint8_t small_of(float x) {   // nearest even; what is too large becomes the largest, an infinity a NaN
  uint32_t word;
  memcpy(&word, &x, 4);
  uint8_t sign = uint8_t(word >> 24 & 0x80);
  word &= 0x7FFFFFFF;
  if (word >= 0x7F800000) return sign | 0x7F;
  if (word >= 0x43E00000) return sign | 0x7E;
  if (word < 0x3C800000) return sign | uint8_t(lrintf(fabsf(x) * 512.0f));   // below 2^-6: steps of 2^-9
  return sign | uint8_t(((word + 0x7FFFF + (word >> 20 & 1)) >> 20) - (120 << 3));
}
inline void round_to(Small* to, F32 x) {
  float lanes[16];
  store_f32(lanes, x);
  for (int i = 0; i < 16; ++i) to[i].bits = small_of(lanes[i]);
}

// x [n] to out [n], out rounded up to whole vectors and 0 there.
template <class T>
inline void round_row(const float* x, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += 16) round_to(out + i, load_f32_first(x + i, int(smaller(16, n - i))));
}

// ---- Blocks of 32, as in GGUF files but for where the bits lie. Scales are f16, codes use them before they are rounded. An
// infinity or a NaN makes a NaN of the scale, so that it stays seen.
//   Q8  value = scale * code                      d = max|x| / 127
//   Q5  value = scale * code + offset             d = (max - min) / 31, the offset is the least
//   Q4  value = scale * (code - 8)                d = the number of the largest magnitude / -8
// Four bits lie in bytes, numbers 0 to 15 of the block below numbers 16 to 31; Q5's fifth bits are the bits of 4 bytes.

struct Q8 { static constexpr int kScales = 1, kCodes = 32, kHigh = 0; };
struct Q5 { static constexpr int kScales = 2, kCodes = 16, kHigh = 4; };
struct Q4 { static constexpr int kScales = 1, kCodes = 16, kHigh = 0; };
template <class T> constexpr bool is_block = false;
template <> constexpr bool is_block<Q8> = true;
template <> constexpr bool is_block<Q5> = true;
template <> constexpr bool is_block<Q4> = true;

constexpr int64_t kMaxBlocks = kMaxHeadDim / 32;

// A row in blocks: scales [kScales][blocks], codes [blocks][kCodes], high [blocks][kHigh].
struct BlockRow {
  uint16_t scales[2 * kMaxBlocks];
  uint8_t codes[32 * kMaxBlocks];
  uint8_t high[4 * kMaxBlocks];
};

inline uint16_t half_of(float x) {
  uint16_t lanes[16];
  store_f16(lanes, set_f32(x));
  return lanes[0];
}
inline float inverse_of(float scale) { return scale != 0 ? 1.0f / scale : 0.0f; }

inline void pack_fours(const int32_t* codes, uint8_t* out) {
  for (int i = 0; i < 16; ++i) out[i] = uint8_t((codes[i] & 15) | (codes[i + 16] & 15) << 4);
}

inline void quantize_block(Q8, F32 low, F32 high, float spoilt, BlockRow& row, int64_t block, int64_t) {
  float scale = reduce_max(max(abs(low), abs(high))) / 127.0f + spoilt;
  F32 inverse = set_f32(inverse_of(scale > 0 ? scale : 0.0f));
  store_i8((int8_t*)row.codes + 32 * block, to_i32(mul(low, inverse)));
  store_i8((int8_t*)row.codes + 32 * block + 16, to_i32(mul(high, inverse)));
  row.scales[block] = half_of(scale);
}

inline void quantize_block(Q5, F32 low, F32 high, float spoilt, BlockRow& row, int64_t block, int64_t blocks) {
  float least = reduce_max(max(sub(zero_f32(), low), sub(zero_f32(), high))) * -1.0f;
  float scale = (reduce_max(max(low, high)) - least) / 31.0f + spoilt;
  F32 inverse = set_f32(inverse_of(scale > 0 ? scale : 0.0f)), base = set_f32(least), most = set_f32(31);
  int32_t codes[32];
  store_i32(codes, to_i32(min(mul(sub(low, base), inverse), most)));
  store_i32(codes + 16, to_i32(min(mul(sub(high, base), inverse), most)));
  pack_fours(codes, row.codes + 16 * block);
  for (int byte = 0; byte < 4; ++byte) {
    int bits = 0;
    for (int i = 0; i < 8; ++i) bits |= (codes[8 * byte + i] >> 4 & 1) << i;
    row.high[4 * block + byte] = uint8_t(bits);
  }
  row.scales[block] = half_of(scale);
  row.scales[blocks + block] = half_of(least);
}

inline void quantize_block(Q4, F32 low, F32 high, float spoilt, BlockRow& row, int64_t block, int64_t) {
  float most = reduce_max(max(low, high)), least = reduce_max(max(sub(zero_f32(), low), sub(zero_f32(), high)));
  float scale = (most > least ? most : -least) / -8.0f + spoilt;
  F32 inverse = set_f32(inverse_of(scale == scale ? scale : 0.0f)), end = set_f32(7);
  int32_t codes[32];
  store_i32(codes, add(to_i32(min(mul(low, inverse), end)), set_i32(8)));
  store_i32(codes + 16, add(to_i32(min(mul(high, inverse), end)), set_i32(8)));
  pack_fours(codes, row.codes + 16 * block);
  row.scales[block] = half_of(scale);
}

// x [n]; what is missing to whole blocks counts as 0.
template <class T>
inline void quantize_row(const float* x, int64_t n, BlockRow& row) {
  const int64_t blocks = (n + 31) / 32;
  for (int64_t block = 0; block < blocks; ++block) {
    int64_t first = block * 32, rest = smaller(32, n - first);
    F32 low = load_f32_first(x + first, int(smaller(16, rest)));
    F32 high = rest > 16 ? load_f32_first(x + first + 16, int(rest - 16)) : zero_f32();
    quantize_block(T(), low, high, 0.0f * reduce_add(add(low, high)), row, block, blocks);
  }
}

// Codes of 4 bits as lanes, less kLess: those below, or those above. Codes of 5, whose highest bits are bit `bit` of the bytes at
// `high`, or the bits of `fifths`.
#if defined(__AVX512F__)
template <bool kUpper, int kLess>
inline F32 load_fours(const uint8_t* p) {
  const __m512 first = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  I32 bytes = load_u8_i32(p);   // a table is asked by the lowest four bits
  return {_mm512_permutexvar_ps(kUpper ? shift_right<4>(bytes).v : bytes.v, _mm512_sub_ps(first, _mm512_set1_ps(kLess)))};
}
inline F32 with_fifths(F32 fours, __mmask16 fifths) {
  return {_mm512_mask_add_ps(fours.v, fifths, fours.v, _mm512_set1_ps(16))};
}
template <bool kUpper>
inline F32 load_fives(const uint8_t* p, const uint8_t* high, int bit) {
  __mmask16 fifths = _mm_test_epi8_mask(_mm_loadu_si128((const __m128i*)high), _mm_set1_epi8((char)(1 << bit)));
  return with_fifths(load_fours<kUpper, 0>(p), fifths);
}
template <bool kUpper>
inline F32 load_fives(const uint8_t* p, uint16_t fifths) { return with_fifths(load_fours<kUpper, 0>(p), fifths); }
#else
using Bytes = uint8_t __attribute__((vector_size(16)));   // cheaper to work on before they are made wider

inline Bytes load_bytes(const uint8_t* p) {
  Bytes bytes;
  memcpy(&bytes, p, 16);
  return bytes;
}
#if defined(__AVX2__)
inline I32 widen(Bytes bytes) {   // not by way of the memory
  __m128i low = (__m128i)bytes, high = _mm_unpackhi_epi64(low, low);
  return {_mm256_cvtepu8_epi32(low), _mm256_cvtepu8_epi32(high)};
}
#else
inline I32 widen(Bytes bytes) {
  uint8_t lanes[16];
  memcpy(lanes, &bytes, 16);
  return load_u8_i32(lanes);
}
#endif
inline F32 to_lanes(Bytes bytes, int less) {
  I32 codes = widen(bytes);
  return to_f32(less ? sub(codes, set_i32(less)) : codes);
}
template <bool kUpper> inline Bytes fours_of(const uint8_t* p) { return kUpper ? load_bytes(p) >> 4 : load_bytes(p) & 15; }
template <bool kUpper, int kLess>
inline F32 load_fours(const uint8_t* p) { return to_lanes(fours_of<kUpper>(p), kLess); }
template <bool kUpper>
inline F32 with_fifths(const uint8_t* p, Bytes bytes, Bytes bits) {
  return to_lanes(fours_of<kUpper>(p) | ((Bytes)((bytes & bits) == bits) & 16), 0);
}
template <bool kUpper>
inline F32 load_fives(const uint8_t* p, const uint8_t* high, int bit) {
  return with_fifths<kUpper>(p, load_bytes(high), uint8_t(1 << bit) - Bytes{});
}
template <bool kUpper>
inline F32 load_fives(const uint8_t* p, uint16_t fifths) {
  using Words = uint16_t __attribute__((vector_size(16)));
  const Bytes bytes = __builtin_shuffle((Bytes)(fifths - Words{}), Bytes{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1});
  return with_fifths<kUpper>(p, bytes, Bytes{1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128});
}
#endif

struct Scales { F32 scale, offset; };   // the offset is Q5's

}  // namespace llmctl::LLMCTL_ISA
