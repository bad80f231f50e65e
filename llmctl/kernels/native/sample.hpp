// What a draw needs of the logits. Every function goes over them once; argmax and top_k find what is not a number on the way.
#pragma once

#include <cstdint>

namespace llmctl {

// Index of the largest of n > 0 numbers, the smallest index where several are equal. -1 if one is not a number.
int64_t argmax(const float* logits, int64_t n);

// The k largest of n > 0 numbers, without those that are -inf; index 0 alone where all are. Largest first, equal ones by
// index. ids and values hold min(k, n) numbers, 0 < n < 2^32. Returns how many there are, -1 if one is not a number.
int64_t top_k(const float* logits, int64_t n, int64_t k, int64_t* ids, float* values);

// Sets to -inf each of n numbers whose bit is 0: number i is bit i % 32 of word i / 32.
void keep_allowed(float* logits, int64_t n, const uint32_t* allowed);

}  // namespace llmctl
