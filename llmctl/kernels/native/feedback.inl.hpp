// The kernel of feedback.hpp for the instruction set this is compiled for.
#pragma once

#include <algorithm>

#include "encode_lanes.inl.hpp"
#include "feedback.hpp"

namespace llmctl::LLMCTL_ENCODE {

constexpr int kMostColumns = 128;

// kLanes rows of a column; beyond the last row there are zeros.
inline F32 load_rows(const float* column, int64_t row, int64_t last) {
  F32 x = {};
  if (row + kLanes <= last) std::memcpy(&x, column + row, sizeof x);
  else std::memcpy(&x, column + row, sizeof(float) * (last - row));
  return x;
}

inline void store_rows(float* column, int64_t row, int64_t last, F32 x) {
  if (row + kLanes <= last) std::memcpy(column + row, &x, sizeof x);
  else std::memcpy(column + row, &x, sizeof(float) * (last - row));
}

// The nearest level: whole numbers half to even, of a table the higher in the middle of two.
template <class Task>
F32 nearest_level(const Task& task, F32 x) {
  if (!task.table) return rounded(max(min(x, splat(task.highest)), splat(task.lowest)), task.lowest, task.highest);
  F32 level = splat(task.table[0]);
  for (int64_t i = 1; i < task.table_size; i++) {
    const float middle = (task.table[i - 1] + task.table[i]) / 2.f;
    level = select(x >= middle, splat(task.table[i]), level);
  }
  return level;
}

// Step, its inverse and the offset of one column for kLanes rows.
struct Scales {
  F32 step, inverse, offset;

  Scales(const FeedbackTask& task, int64_t column, int64_t row, int64_t last) {
    const int64_t at = task.groups[column] * task.rows;
    step = load_rows(task.steps + at, row, last);
    inverse = load_rows(task.inverses + at, row, last);
    offset = task.offsets ? load_rows(task.offsets + at, row, last) : F32{};
  }
  F32 value(F32 level) const { return step * level + offset; }
};

// A column is rounded; what it is off by then is taken from the columns after it.
inline void feed_back(const FeedbackTask& task, int64_t first, int64_t last) {
  F32 w[kMostColumns];
  for (int64_t row = first; row < last; row += kLanes) {
    for (int64_t i = 0; i < task.columns; i++) w[i] = load_rows(task.values + i * task.rows, row, last);
    for (int64_t i = 0; i < task.columns; i++) {
      const Scales scales(task, i, row, last);
      const F32 level = nearest_level(task, (w[i] - scales.offset) * scales.inverse);
      const F32 error = scales.value(level) - load_rows(task.wanted + i * task.rows, row, last);
      const float* couplings = task.couplings + i * task.columns;
      for (int64_t k = i + 1; k < task.columns; k++) w[k] -= couplings[k] * error;
      store_rows(task.levels + i * task.rows, row, last, level);
      store_rows(task.errors + i * task.rows, row, last, error);
    }
  }
}

extern const RunFeedback kFeedback;
const RunFeedback kFeedback = feed_back;

}  // namespace llmctl::LLMCTL_ENCODE
