// linear, dequantize_row and quantize_activations of kernels.hpp.
#pragma once

#include "kernels.hpp"
#include "linear_float.inl.hpp"
#include "linear_int8.inl.hpp"

namespace llmctl::LLMCTL_ISA {

template <class L>
void linear_quantized(const PackedMatrix& matrix, int64_t first_tile, int64_t last_tile, const Activations& x, float* y,
                      int64_t stride) {
  if (x.codes) linear_int8<L>(matrix, first_tile, last_tile, x, y, stride);
  else linear_float(matrix, first_tile, last_tile, x, y, stride, expanded_tiles<expand<L>, 1>, expanded_tiles<expand<L>, 2>);
}

// Half-precision weights are worth expanding once when several groups of tokens share them.
template <class Load>
void linear_plain(const PackedMatrix& matrix, int64_t first_tile, int64_t last_tile, const Activations& x, float* y,
                  int64_t stride) {
  bool expand_first = Load::kBytes < LoadF32::kBytes && x.tokens > kFloatTokens;
  if (expand_first)
    linear_float(matrix, first_tile, last_tile, x, y, stride, expanded_tiles<expand_plain<Load>, 1>,
                 expanded_tiles<expand_plain<Load>, 2>);
  else linear_float(matrix, first_tile, last_tile, x, y, stride, plain_tiles<Load, 1>, plain_tiles<Load, 2>);
}

struct FormatKernels {
  Linear linear;
  Expand expand;
};
template <class L> constexpr FormatKernels quantized() { return {linear_quantized<L>, expand<L>}; }
template <class Load> constexpr FormatKernels plain() { return {linear_plain<Load>, expand_plain<Load>}; }

// In the order of Layout.
static const FormatKernels kFormats[] = {
    plain<LoadF32>(), plain<LoadF16>(), plain<LoadBF16>(),
    quantized<Q4_0>(), quantized<Q4_1>(), quantized<Q5_0>(), quantized<Q5_1>(), quantized<Q8_0>(), quantized<IQ4_NL>(),
    quantized<MXFP4>(),
    quantized<Q4_K>(), quantized<Q5_K>(), quantized<Q6_K>(), quantized<Q3_K>(), quantized<Q2_K>(), quantized<IQ4_XS>(),
    quantized<I4>(), quantized<I8>(),
};
static_assert(sizeof kFormats / sizeof *kFormats == (size_t)Layout::Count);

static void linear(const PackedMatrix& matrix, int64_t first_tile, int64_t last_tile, const Activations& x, float* y,
                   int64_t stride) {
  kFormats[(size_t)matrix.layout].linear(matrix, first_tile, last_tile, x, y, stride);
}

static void dequantize_row(const PackedMatrix& matrix, int64_t row, float* out) {
  float tile[kFloatColumns * kTileRows];
  for (int64_t first = 0; first < matrix.columns; first += kFloatColumns) {
    int64_t count = matrix.columns - first < kFloatColumns ? matrix.columns - first : kFloatColumns;
    kFormats[(size_t)matrix.layout].expand(matrix, row / kTileRows, first, count, tile);
    for (int64_t c = 0; c < count; ++c) out[first + c] = tile[kTileRows * c + row % kTileRows];
  }
}

// 16 columns: codes and their sum.
LLMCTL_INLINE int32_t quantize_16(F32 x, F32 inverse, int8_t* codes) {
  I32 code = to_i32(mul(x, inverse));
  store_i8(codes, code);
  return reduce_add(code);
}

// 32 columns whose largest magnitude is finite and whose scale is a normal number.
LLMCTL_INLINE void quantize_block(F32 a, F32 b, float largest, int8_t* codes, float* scale, int32_t* sums) {
  F32 inverse = set_f32(127 / largest);
  *scale = largest / 127;
  sums[0] = quantize_16(a, inverse, codes);
  sums[1] = quantize_16(b, inverse, codes + 16);
}

LLMCTL_INLINE void fill_block(float value, int8_t* codes, float* scale, int32_t* sums) {
  *scale = value;
  sums[0] = sums[1] = 0;
  for (int i = 0; i < kBlock; ++i) codes[i] = 0;
}

static void quantize_activations(const float* x, int64_t columns, int64_t columns_padded, int8_t* codes, float* scales,
                                 int32_t* sums) {
  constexpr float kSmallest = 127 * 0x1p-126f, kInfinity = __builtin_inff();
  for (int64_t c = 0; c < columns_padded; c += kBlock, codes += kBlock, ++scales, sums += 2) {
    int64_t left = columns - c < 0 ? 0 : columns - c;
    F32 a = load_f32_first(x + c, left < 16 ? (int)left : 16);
    F32 b = left > 16 ? load_f32_first(x + c + 16, left < 32 ? (int)left - 16 : 16) : zero_f32();
    // The bits of magnitudes order as integers, NaN above infinity above the rest: no NaN gets lost.
    int32_t largest_bits = reduce_max(max(bits(abs(a)), bits(abs(b))));
    float largest;
    __builtin_memcpy(&largest, &largest_bits, 4);
    if (!(largest < kInfinity)) fill_block(__builtin_nanf(""), codes, scales, sums);   // the row's results become NaN
    else if (largest < kSmallest) fill_block(0, codes, scales, sums);
    else quantize_block(a, b, largest, codes, scales, sums);
  }
}

}  // namespace llmctl::LLMCTL_ISA
