// linear, dequantize_row and quantize_activations of kernels.hpp.
#pragma once

#include "kernels.hpp"
#include "linear_float.inl.hpp"
#include "linear_int8.inl.hpp"

namespace llmctl::LLMCTL_ISA {

template <class L>
void linear_quantized(const TileRange& tiles, const Activations& x, float* y, int64_t stride) {
  if (x.codes) linear_int8<L>(tiles, x, y, stride);
  else linear_float(tiles, x, y, stride, expanded_tiles<expand<L>, 1>, expanded_tiles<expand<L>, 2>);
}

// Half-precision weights are worth expanding once when more than two groups of tokens share them.
template <class Load>
void linear_plain(const TileRange& tiles, const Activations& x, float* y, int64_t stride) {
  bool expand_first = Load::kBytes < LoadF32::kBytes && x.tokens > 2 * kFloatTokens;
  if (expand_first)
    linear_float(tiles, x, y, stride, expanded_tiles<expand_plain<Load>, 1>, expanded_tiles<expand_plain<Load>, 2>);
  else linear_float(tiles, x, y, stride, plain_tiles<Load, 1>, plain_tiles<Load, 2>);
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

static void linear(const TileRange& tiles, const Activations& x, float* y, int64_t stride) {
  kFormats[(size_t)tiles.matrix.layout].linear(tiles, x, y, stride);
}

static void dequantize_row(const PackedMatrix& matrix, int64_t row, float* out) {
  float tile[kFloatColumns * kTileRows];
  for (int64_t first = 0; first < matrix.columns; first += kFloatColumns) {
    int64_t count = matrix.columns - first < kFloatColumns ? matrix.columns - first : kFloatColumns;
    kFormats[(size_t)matrix.layout].expand(matrix, row / kTileRows, first, count, tile);
    for (int64_t c = 0; c < count; ++c) out[first + c] = tile[kTileRows * c + row % kTileRows];
  }
}

// 256 columns: eight scales, whose division and horizontal maxima then cost little, and 16 sums. False, and nothing is
// written, if one of them is not finite.
LLMCTL_INLINE bool quantize_256(const float* x, int8_t* codes, float* scales, int32_t* sums) {
  I32 largest[8];   // bits of magnitudes order as integers, NaN above infinity above the rest
#pragma GCC unroll 8
  for (int b = 0; b < 8; ++b)
    largest[b] = max(bits(abs(load_f32(x + kBlock * b))), bits(abs(load_f32(x + kBlock * b + 16))));
  I32 top_bits = largest_of_8(largest);
  if (reduce_max(top_bits) >= 0x7F800000) return false;
  F32 top = from_bits(top_bits), limit = set_f32(127), smallest = set_f32(127 * 0x1p-126f), zero = zero_f32();
  float inverses[16];
  store_f32(inverses, select_less(top, smallest, zero, div(limit, top)));
  store_f32_first(scales, select_less(top, smallest, zero, div(top, limit)), 8);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) store_i8(codes + 16 * i, to_i32(mul(load_f32(x + 16 * i), set_f32(inverses[i / 2]))));
  sums_of_16(codes, sums);
  return true;
}

// One block of any values, `left` of its columns present. Where one is not finite the scale becomes NaN, and so do the
// token's results.
LLMCTL_INLINE void quantize_block(const float* x, int64_t left, int8_t* codes, float* scale, int32_t* sums) {
  F32 a = load_f32_first(x, left <= 0 ? 0 : left < 16 ? (int)left : 16);
  F32 b = left <= 16 ? zero_f32() : load_f32_first(x + 16, left < 32 ? (int)left - 16 : 16);
  const int32_t top_bits = reduce_max(max(bits(abs(a)), bits(abs(b))));
  float top;
  std::memcpy(&top, &top_bits, sizeof top);
  const bool finite = top_bits < 0x7F800000;
  if (!finite || top < 127 * 0x1p-126f) {
    *scale = finite ? 0 : __builtin_nanf("");
    sums[0] = sums[1] = 0;
    std::memset(codes, 0, kBlock);
    return;
  }
  *scale = top / 127;
  F32 inverse = set_f32(127 / top);
  I32 first = to_i32(mul(a, inverse)), second = to_i32(mul(b, inverse));
  store_i8(codes, first);
  store_i8(codes + 16, second);
  sums[0] = reduce_add(first);
  sums[1] = reduce_add(second);
}

static void quantize_activations(const float* x, int64_t columns, int64_t columns_padded, int8_t* codes, float* scales,
                                 int32_t* sums) {
  for (int64_t c = 0; c < columns_padded; c += kSuperBlock) {
    if (c + kSuperBlock <= columns && quantize_256(x + c, codes + c, scales + c / 32, sums + c / 16)) continue;
    const int64_t end = c + kSuperBlock < columns_padded ? c + kSuperBlock : columns_padded;
    for (int64_t b = c; b < end; b += kBlock) quantize_block(x + b, columns - b, codes + b, scales + b / 32, sums + b / 16);
  }
}

}  // namespace llmctl::LLMCTL_ISA
