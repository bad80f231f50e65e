// The most a core can compute: the products of the linear kernels on numbers that stay in registers and the first cache.
#pragma once

#include <cstdint>

namespace llmctl::LLMCTL_ISA {

constexpr int kPeakColumns = 32;

static int64_t peak_int8(int64_t rounds) {
  alignas(64) uint8_t codes[2][kPeakColumns / 4][64] = {};
  alignas(64) int8_t x[kDotTokens * kPeakColumns] = {};
  alignas(64) int32_t out[16];
  I32 sums[2][kDotTokens];   // of two tiles: those of one wait for each other
  for (auto& tile : sums)
    for (I32& sum : tile) sum = zero_i32();
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ __volatile__("" : : "r"(codes), "r"(x) : "memory");   // or the same products would be computed only once
    for (int tile = 0; tile < 2; ++tile) {
      U8 weights[kPeakColumns / 4];
      for (int g = 0; g < kPeakColumns / 4; ++g) weights[g] = load_u8(codes[tile][g]);
      dot<15, kPeakColumns / 4, kDotTokens>(weights, x, kPeakColumns, sums[tile]);
    }
  }
  for (auto& tile : sums)
    for (I32& sum : tile) sums[0][0] = add(sums[0][0], sum);   // every sum counts, or the compiler drops it
  store_i32(out, sums[0][0]);
  __asm__ __volatile__("" : : "r"(out) : "memory");
  return rounds * 2 * 2 * 16 * kPeakColumns * kDotTokens;
}

static int64_t peak_float(int64_t rounds) {
  alignas(64) float weights[2][kPeakColumns][16] = {};
  alignas(64) float x[kFloatTokens][kPeakColumns] = {};
  alignas(64) float out[16];
  F32 sums[2][kFloatTokens];
  for (auto& tile : sums)
    for (F32& sum : tile) sum = zero_f32();
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ __volatile__("" : : "r"(weights), "r"(x) : "memory");
    for (int column = 0; column < kPeakColumns; ++column) {
      F32 first = load_f32(weights[0][column]), second = load_f32(weights[1][column]);
#pragma GCC unroll 8
      for (int t = 0; t < kFloatTokens; ++t) {
        F32 token = set_f32(x[t][column]);
        sums[0][t] = fma(first, token, sums[0][t]);
        sums[1][t] = fma(second, token, sums[1][t]);
      }
    }
  }
  for (auto& tile : sums)
    for (F32& sum : tile) sums[0][0] = add(sums[0][0], sum);
  store_f32(out, sums[0][0]);
  __asm__ __volatile__("" : : "r"(out) : "memory");
  return rounds * 2 * 2 * 16 * kPeakColumns * kFloatTokens;
}

static int64_t peak(bool int8, int64_t rounds) { return int8 ? peak_int8(rounds) : peak_float(rounds); }

}  // namespace llmctl::LLMCTL_ISA
