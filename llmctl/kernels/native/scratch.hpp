// Working memory of the calling thread, 64-byte aligned; contents last until the next call in the same thread.
#pragma once

#include <cstddef>

namespace llmctl {

void* thread_scratch(size_t bytes);

}  // namespace llmctl
