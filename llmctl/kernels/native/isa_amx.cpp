// Linear layers and attention over bf16 pages are of its own here: the table "amx" (cpu.cpp) is that of AVX-512 otherwise.
#include "simd/avx512.hpp"
//
#include "attention_amx.inl.hpp"
#include "kernels.hpp"
#include "linear_amx.inl.hpp"

namespace llmctl {

namespace avx512 {
extern const Kernels kKernels;
}

namespace amx {
namespace {

// In the order of Layout. Plain weights have no int8 activations; with two scales a block half of a tile would stay empty,
// and dot products are as quick.
const Linear kLinear[] = {
    nullptr, nullptr, nullptr,
    linear_amx<Q4_0>, linear_amx<Q4_1>, linear_amx<Q5_0>, linear_amx<Q5_1>, linear_amx<Q8_0>, linear_amx<IQ4_NL>,
    linear_amx<MXFP4>,
    linear_amx<Q4_K>, linear_amx<Q5_K>, nullptr, nullptr, nullptr, linear_amx<IQ4_XS>,
    linear_amx<I4>, linear_amx<I8>,
};
static_assert(sizeof kLinear / sizeof *kLinear == (size_t)Layout::Count);

}  // namespace

void linear(const TileRange& tiles, const Activations& x, float* y, int64_t stride) {
  Linear with_tiles = x.codes && x.tokens >= kAmxTokens ? kLinear[(size_t)tiles.matrix.layout] : nullptr;
  (with_tiles ? with_tiles : avx512::kKernels.linear)(tiles, x, y, stride);
}

}  // namespace amx
}  // namespace llmctl
