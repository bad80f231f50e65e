#include "scratch.hpp"

#include "aligned.hpp"

namespace llmctl {

void* thread_scratch(size_t bytes) {
  thread_local AlignedArray<unsigned char> memory;
  return memory.reserve(static_cast<int64_t>(bytes));
}

}  // namespace llmctl
