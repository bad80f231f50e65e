// Sixteen vectors of sixteen lanes become their columns: rows[i] lane j to rows[j] lane i, in place.
#pragma once

#include <cstdint>

namespace llmctl::LLMCTL_ISA {

#if defined(__AVX512F__)

// Which of two rows' lanes (the second's from 16 on) make the rows that have squares of Width lanes exchanged.
template <int Width> struct alignas(64) ExchangeTable {
  int32_t first[16], second[16];
  constexpr ExchangeTable() : first(), second() {
    for (int lane = 0; lane < 16; ++lane) {
      first[lane] = lane & Width ? 16 + lane - Width : lane;
      second[lane] = first[lane] + Width;
    }
  }
};
template <int Width> constexpr ExchangeTable<Width> kExchange;

// Squares of Width lanes change places across the diagonal.
template <int Width> inline __attribute__((always_inline)) void transpose_step(F32* rows) {
  __m512i first = _mm512_load_si512(kExchange<Width>.first), second = _mm512_load_si512(kExchange<Width>.second);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i & Width) continue;
    __m512 a = rows[i].v, b = rows[i + Width].v;
    rows[i].v = _mm512_permutex2var_ps(a, first, b);
    rows[i + Width].v = _mm512_permutex2var_ps(a, second, b);
  }
}
inline __attribute__((always_inline)) void transpose(F32* rows) {
  transpose_step<1>(rows);
  transpose_step<2>(rows);
  transpose_step<4>(rows);
  transpose_step<8>(rows);
}

#else

inline void transpose(F32* rows) {
  float from[16][16], to[16][16];
  for (int i = 0; i < 16; ++i) store_f32(from[i], rows[i]);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) to[j][i] = from[i][j];
  }
  for (int i = 0; i < 16; ++i) rows[i] = load_f32(to[i]);
}

#endif

}  // namespace llmctl::LLMCTL_ISA
