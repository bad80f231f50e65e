// A rotation that spreads outliers over a head before it is cut into 16 steps: H x / sqrt(n), H the Hadamard matrix of n, a power
// of two. It is its own inverse, and leaves the product of two vectors that are both rotated as it was.
#pragma once

#include <math.h>
#include <cstdint>
#include <cstring>

namespace llmctl::LLMCTL_ISA {

using Four = float __attribute__((vector_size(16)));
using FourPlaces = int32_t __attribute__((vector_size(16)));

inline Four in_pairs(Four x) { return __builtin_shuffle(x, FourPlaces{1, 0, 3, 2}) + x * Four{1, -1, 1, -1}; }
inline Four in_fours(Four x) { return __builtin_shuffle(x, FourPlaces{2, 3, 0, 1}) + x * Four{1, 1, -1, -1}; }

// One block of Block numbers, or all that have room in four.
template <int Block, int Fours>
inline void rotate_fours(Four (&x)[Fours]) {
  for (Four& each : x) {
    if constexpr (Block >= 2) each = in_pairs(each);
    if constexpr (Block >= 4) each = in_fours(each);
  }
#pragma GCC unroll 4
  for (int step = 1; step < Fours; step *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < Fours; ++i) {
      if (i & step) continue;
      Four a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
  for (Four& each : x) each *= 1.0f / sqrtf(float(Block));
}

template <int Block>
inline void rotate_all(float* x, int64_t n) {
  constexpr int64_t kFours = Block < 4 ? 1 : Block / 4, kWhole = 4 * kFours;
  Four block[kFours] = {};
  for (; n >= kWhole; n -= kWhole, x += kWhole) {
    memcpy(block, x, sizeof block);
    rotate_fours<Block>(block);
    memcpy(x, block, sizeof block);
  }
  memcpy(block, x, size_t(n) * sizeof(float));   // less than four, of smaller blocks
  rotate_fours<Block>(block);
  memcpy(x, block, size_t(n) * sizeof(float));
}

// x [n] in blocks of `block`, a power of two up to 32; 0: as it is.
inline void rotate_blocks(float* x, int64_t n, int64_t block) {
  switch (block) {
    case 0: return;
    case 1: return rotate_all<1>(x, n);
    case 2: return rotate_all<2>(x, n);
    case 4: return rotate_all<4>(x, n);
    case 8: return rotate_all<8>(x, n);
    case 16: return rotate_all<16>(x, n);
    default: return rotate_all<32>(x, n);
  }
}

}  // namespace llmctl::LLMCTL_ISA
