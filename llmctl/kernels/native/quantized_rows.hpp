// Rows of activations in int8, as the linear kernels read them, in memory of their own.
#pragma once

#include <cstdint>
#include <cstring>

#include "aligned.hpp"
#include "kernels.hpp"

namespace llmctl {

inline int64_t padded_columns(int64_t columns) { return (columns + 63) / 64 * 64; }

// Plain weights take float activations.
inline bool is_plain(Layout layout) {
  return layout == Layout::F32 || layout == Layout::F16 || layout == Layout::BF16;
}

struct QuantizedRows {
  AlignedArray<int8_t> codes;
  AlignedArray<float> scales;
  AlignedArray<int32_t> sums;

  void reserve(int64_t rows, int64_t columns) {
    codes.reserve(rows * padded_columns(columns));
    scales.reserve(rows * padded_columns(columns) / 32);
    sums.reserve(rows * padded_columns(columns) / 16);
  }
  void quantize(const Kernels& kernels, const float* x, int64_t row, int64_t columns) {
    const int64_t wide = padded_columns(columns);
    kernels.quantize_activations(x, columns, wide, codes.get() + row * wide, scales.get() + row * wide / 32,
                                 sums.get() + row * wide / 16);
  }
  void copy_row(int64_t from, int64_t to, int64_t columns) {
    const int64_t wide = padded_columns(columns);
    std::memcpy(codes.get() + to * wide, codes.get() + from * wide, wide);
    std::memcpy(scales.get() + to * wide / 32, scales.get() + from * wide / 32, wide / 32 * sizeof(float));
    std::memcpy(sums.get() + to * wide / 16, sums.get() + from * wide / 16, wide / 16 * sizeof(int32_t));
  }
  Activations rows(int64_t first, int64_t count, int64_t columns) const {
    const int64_t wide = padded_columns(columns);
    return {count, columns, wide, nullptr, 0, codes.get() + first * wide, scales.get() + first * wide / 32,
            sums.get() + first * wide / 16};
  }
  int64_t bytes() const { return codes.bytes() + scales.bytes() + sums.bytes(); }
};

}  // namespace llmctl
