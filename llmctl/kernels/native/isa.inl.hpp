// The body of every isa_*.cpp: all kernels, compiled for the instruction set that LLMCTL_ISA names (given on the command line
// with the flags) over the 16-lane interface that is included before.
#pragma once

#include "attention_votes.inl.hpp"
#include "kernels.hpp"
#include "linear.inl.hpp"
#include "peak.inl.hpp"
#include "vector_ops.inl.hpp"

#define LLMCTL_NAME_OF(isa) #isa
#define LLMCTL_NAME(isa) LLMCTL_NAME_OF(isa)

namespace llmctl::LLMCTL_ISA {

extern const Kernels kKernels;
const Kernels kKernels = {
    LLMCTL_NAME(LLMCTL_ISA), linear, dequantize_row, quantize_activations, rms_norm, layer_norm, rotary, gated_activation, add, scale, softcap,
    &attention_kernels, peak,
};

}  // namespace llmctl::LLMCTL_ISA
