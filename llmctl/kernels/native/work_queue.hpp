// Pieces of work numbered from 0, taken by the workers. Each has a range of its own, so that it reads memory in one stream, and
// helps the others when that is done. How many pieces there are the workers need know only when they take them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "layouts.hpp"

namespace llmctl {

class WorkQueue {
 public:
  void restart(int workers) {
    if (!taken_) taken_ = std::make_unique<Counter[]>(workers);
    workers_ = workers;
    for (int i = 0; i < workers; i++) taken_[i].value.store(0, std::memory_order_relaxed);
  }
  int64_t begin(int64_t items, int worker) const { return items * worker / workers_; }
  // Whether no piece of the same range comes after this one.
  bool is_last(int64_t items, int64_t item) const {
    for (int worker = 1; worker <= workers_; worker++)
      if (item + 1 == begin(items, worker)) return true;
    return false;
  }
  // The next of `items` pieces for a worker that is helping the `helped`-th range after its own; -1 where nothing is left.
  int64_t take(int64_t items, int worker, int& helped) {
    for (; helped < workers_; helped++) {
      const int range = (worker + helped) % workers_;
      const int64_t item = begin(items, range) + taken_[range].value.fetch_add(1, std::memory_order_relaxed);
      if (item < begin(items, range + 1)) return item;
    }
    return -1;
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  std::unique_ptr<Counter[]> taken_;
  int workers_ = 1;
};

constexpr int64_t kPrefetch = 32 << 10;   // bytes of the weights of the work to come that are asked for before workers meet

// Asks memory for the first of a matrix's tiles first_tile .. last_tile - 1.
inline void prefetch_tiles(const PackedMatrix& matrix, int64_t first_tile, int64_t last_tile) {
  const int64_t all = (last_tile - first_tile) * matrix.tile_bytes(), bytes = all < kPrefetch ? all : kPrefetch;
  const uint8_t* data = matrix.tile(first_tile);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i, 0, 2);
}

}  // namespace llmctl
