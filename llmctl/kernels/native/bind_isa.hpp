// The kernels of an instruction set, and activations, by name, for the bindings that tests call.
#pragma once

#include <string>

#include "kernels.hpp"

namespace llmctl {

// Throws ValueError where this build or this machine has no such instruction set.
const Kernels& kernels_named(const std::string& name);

// Throws ValueError where there is no such activation.
Activation activation_named(const std::string& name);

}  // namespace llmctl
