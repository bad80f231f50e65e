// PackedWeight: a prepared matrix, or several of one shape (the experts of a layer), and the memory it lies in.
#pragma once

#include <cstdint>
#include <memory>

#include "layouts.hpp"
#include "pack.hpp"
#include "thread_pool.hpp"

namespace llmctl {

// Memory for `bytes`, 64-byte aligned, zeroed, given back with the last owner; std::bad_alloc where there is none. From
// 2 MiB on it is a mapping of its own on a huge page's border; smaller pieces share mappings, so that the weights of a small
// model lie on huge pages as well. LLMCTL_HUGE_PAGES=0 asks for none.
std::shared_ptr<uint8_t> weight_memory(int64_t bytes);

class PackedWeight {
 public:
  // std::invalid_argument for a shape the layout cannot hold.
  PackedWeight(Layout layout, int64_t rows, int64_t columns, int64_t group_size = 0, int64_t matrices = 1);

  PackedMatrix matrix(int64_t index = 0) const;
  int64_t matrices() const { return matrices_; }
  int64_t bytes() const { return matrices_ * matrix_bytes_; }

  // Rows first_row .. first_row + rows - 1 of one matrix; whole tiles, or up to the last row. pool may be null.
  void store(int64_t index, int64_t first_row, int64_t rows, const StoredRows& source, ThreadPool* pool);
  // All rows of one matrix as they were stored, in the packed order.
  void restore(int64_t index, const RestoredRows& target, ThreadPool* pool) const;

 private:
  PackedMatrix matrix_;   // the first
  int64_t matrices_;
  int64_t matrix_bytes_;
  std::shared_ptr<uint8_t> memory_;
};

}  // namespace llmctl
