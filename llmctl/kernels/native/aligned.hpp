// Memory for vectors: aligned to 64 bytes, grown and never shrunk, uninitialised.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace llmctl {

template <typename T>
class AlignedArray {
 public:
  // At least `count` elements; old contents are lost when it grows. Throws std::bad_alloc.
  T* reserve(int64_t count) {
    if (count > capacity_) {
      const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
      memory_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
      capacity_ = memory_ ? count : 0;
      if (!memory_) throw std::bad_alloc();
    }
    return memory_.get();
  }
  T* get() const { return memory_.get(); }
  int64_t bytes() const { return capacity_ * static_cast<int64_t>(sizeof(T)); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace llmctl
