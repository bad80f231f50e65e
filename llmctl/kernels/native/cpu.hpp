// Which instruction sets this build and this machine have. The operating system must save their registers, too.
#pragma once

#include <string>
#include <vector>

namespace llmctl {

// Best first.
std::vector<std::string> available_isas();

}  // namespace llmctl
