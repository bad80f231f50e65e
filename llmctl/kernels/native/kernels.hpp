// The table of kernels one instruction set offers. Every isa_*.cpp fills one; cpu.cpp chooses one at run time.
//
// Row invariance: what a kernel computes for a token never depends on how many tokens share the call. Integer sums are
// exact; floating-point sums run along K in one fixed order for every number of tokens.
#pragma once

#include <cstdint>

#include "layouts.hpp"

namespace llmctl {

// Activations as the linear kernels read them: tokens x columns. `columns_padded` is a multiple of 64.
// Int8: code = round(x * (127 / max|x|)), scale = max|x| / 127 over 32 columns (0 where that is no normal number, NaN where one
// of them is not finite; the codes then 0);
// sums[i] = sum of the 16 codes from column 16 * i (exact).
struct Activations {
  int64_t tokens;
  int64_t columns;
  int64_t columns_padded;   // codes beyond `columns` are 0
  const float* values;      // [tokens][columns] rows `value_stride` apart; null where int8 is in use
  int64_t value_stride;
  const int8_t* codes;      // [tokens][columns_padded]
  const float* scales;      // [tokens][columns_padded / 32]
  const int32_t* sums;      // [tokens][columns_padded / 16]
};

// ClampedSwiglu is no activation times up: (up + 1) * gate * sigmoid(1.702 * gate), gate at most 7, up from -7 to 7.
enum class Activation : int32_t { Silu, GeluTanh, Gelu, ClampedSwiglu };

struct Kernels {
  const char* name;         // "generic", "avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon"

  // y[t * stride + 16 * (tile - tiles.first) + r] for all tiles and all tokens of x, int8 or float activations by which of x's
  // pointers is set. Rows beyond matrix.rows are not written.
  void (*linear)(const TileRange& tiles, const Activations& x, float* y, int64_t stride);
  // One row of a prepared matrix as float32 [columns].
  void (*dequantize_row)(const PackedMatrix& matrix, int64_t row, float* out);
  // One token: x float32 [columns] to codes [columns_padded], scales, sums as in Activations.
  void (*quantize_activations)(const float* x, int64_t columns, int64_t columns_padded, int8_t* codes, float* scales,
                               int32_t* sums);

  // y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; y may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* y);
  // The same of x - mean(x), plus bias[i] unless bias is null; y may be x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y);
  // "rotate half": pairs (i, i + half) of one head, in place.
  void (*rotary)(float* head, const float* cos, const float* sin, int64_t half);
  // y[i] = activation(gate[i]) * up[i], or activation(gate[i]) where up is null; y may be gate or up.
  void (*gated_activation)(const float* gate, const float* up, Activation activation, int64_t n, float* y);
  void (*add)(const float* x, const float* y, int64_t n, float* out);
  void (*scale)(const float* x, float factor, int64_t n, float* out);
  void (*softcap)(const float* x, float cap, int64_t n, float* out);

  struct AttentionKernels const* attention;   // attention.hpp

  // So many rounds of products that no memory holds up, of int8 or of floats. Returns how many operations they were.
  int64_t (*peak)(bool int8, int64_t rounds);
};

// Null where the build has no such translation unit or the machine lacks the instructions.
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* amx_kernels();
const Kernels* neon_kernels();

// The best the machine has; LLMCTL_ISA=generic|avx2|avxvnni|avx512|avx512bf16|amx|neon forces one (an unknown or missing one is an error
// raised by the bindings, see cpu.hpp).
const Kernels* active_kernels();

}  // namespace llmctl
