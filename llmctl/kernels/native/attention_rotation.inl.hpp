// A rotation that spreads outliers over a head before it is cut into 16 steps: H x / sqrt(n), H the Hadamard matrix of n, a power
// of two. It is its own inverse, and leaves the product of two vectors that are both rotated as it was.
#pragma once

#include <math.h>
#include <cstdint>

namespace llmctl::LLMCTL_ISA {

// x [n] in blocks of `block`, a power of two; 0: as it is.
inline void rotate_blocks(float* x, int64_t n, int64_t block) {
  if (!block) return;
  for (int64_t step = 1; step < block; step *= 2) {
    for (int64_t first = 0; first < n; first += 2 * step) {
      for (int64_t i = first; i < first + step; ++i) {
        float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
    }
  }
  const float factor = 1.0f / sqrtf(float(block));
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace llmctl::LLMCTL_ISA
