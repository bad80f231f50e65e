// The body of every encode_*.cpp: all encoders for the instruction set it is compiled for.
#pragma once

#include <algorithm>

#include "encode_kquants.inl.hpp"

namespace llmctl::LLMCTL_ENCODE {

template <void (*kEncode)(Panel&, const EncodeTask&)>
int64_t encode_rows(const EncodeTask& task, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row += kLanes) {
    Panel panel(task, row, last);
    kEncode(panel, task);
    const int bad = panel.first_bad();
    if (bad < kLanes) return row + bad;
  }
  return last;
}

extern const Encoder kEncoders[];
const Encoder kEncoders[] = {
    {"Q4_0", 32, 18, encode_rows<encode_legacy<Q4_0>>},   {"Q4_1", 32, 20, encode_rows<encode_legacy<Q4_1>>},
    {"Q5_0", 32, 22, encode_rows<encode_legacy<Q5_0>>},   {"Q5_1", 32, 24, encode_rows<encode_legacy<Q5_1>>},
    {"Q8_0", 32, 34, encode_rows<encode_q8_0>},           {"Q2_K", 256, 84, encode_rows<encode_affine<Q2_K>>},
    {"Q3_K", 256, 110, encode_rows<encode_q3_k>},         {"Q4_K", 256, 144, encode_rows<encode_affine<Q4_K>>},
    {"Q5_K", 256, 176, encode_rows<encode_affine<Q5_K>>}, {"Q6_K", 256, 210, encode_rows<encode_q6_k>},
    {"IQ4_NL", 32, 18, encode_rows<encode_iq4_nl>},       {"MXFP4", 32, 17, encode_rows<encode_mxfp4>},
    {nullptr, 0, 0, nullptr},
};

}  // namespace llmctl::LLMCTL_ENCODE
