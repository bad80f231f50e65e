// Columns of a matrix rounded in turn, each told of the errors of those before it: the sequential part of GPTQ, for one block of
// columns. Rows do not touch each other, so a lane of a vector is a row and results are the same on
// every instruction set, and equal to kernels/feedback.py, the definition. Products between blocks are the caller's.
#pragma once

#include <cstdint>
#include <string>

#include "thread_pool.hpp"

namespace llmctl {

// A block of `columns` columns of a matrix with `rows` rows, stored column by column. An element is step * level + offset.
// couplings: [columns][columns], above the diagonal. groups: [columns], which of `steps` a column has. steps, inverses (1 / step,
// or 0), offsets: [groups][rows]; offsets may be null. table: ascending levels, null where levels are the whole numbers
// lowest .. highest. wanted: [columns][rows], the weights. values: the same after what the columns before this block brought.
// levels, errors: [columns][rows], the errors being those of the values that come out.
struct FeedbackTask {
  int64_t rows, columns;
  const float* couplings;
  const int32_t* groups;
  const float *steps, *inverses, *offsets;
  float lowest, highest;
  const float* table;
  int64_t table_size;
  const float *wanted, *values;
  float *levels, *errors;
};

// Rows first .. last - 1.
using RunFeedback = void (*)(const FeedbackTask& task, int64_t first, int64_t last);

// Of an instruction set as cpu.hpp names them.
RunFeedback feedback_of(const std::string& isa);

// All rows, shared among the threads.
void run_feedback(RunFeedback run, const FeedbackTask& task, ThreadPool& pool);

}  // namespace llmctl
