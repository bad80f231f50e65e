// Attention over bf16 pages is of its own here: the table "avx512bf16" (cpu.cpp) is that of AVX-512 otherwise.
#include "simd/avx512.hpp"
//
#include "attention_dots.inl.hpp"
