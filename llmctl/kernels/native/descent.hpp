// Coordinate descent on the levels, steps and offsets of a matrix on a grid of blocks: the loss is e H e' over the rows, e what
// the values are off by. Each pass moves every group's step and offset, then every level, to where the loss is least while all
// else stays. Rows do not touch each other: threads share them, in strips whose gradients stay in the cache.
// kernels/descent.py is the definition; sums are of another order here, so steps and levels may differ where two are as good.
#pragma once

#include <cstdint>
#include <string>

#include "thread_pool.hpp"

namespace llmctl {

// A matrix of `columns` columns and `rows` rows, stored column by column. An element is step * level + offset.
// hessian: [columns][columns], symmetric, with inverse diagonal `pivots`. wanted: [columns][rows]. levels: [columns][rows],
// brought up to date, as steps and offsets are: [columns / group_size][rows]; offsets may be null.
// units, offset_units: [groups / groups_per_unit][rows], what steps and negative offsets are multiples of, least_code ..
// greatest_code; null where they are float16 numbers. table: ascending levels, null where levels are the whole numbers
// lowest .. highest.
struct DescentTask {
  int64_t rows, columns, passes;
  const float *hessian, *pivots, *wanted;
  int64_t group_size, groups_per_unit;
  const float *units, *offset_units;
  float least_code, greatest_code, lowest, highest;
  const float* table;
  int64_t table_size;
  float *levels, *steps, *offsets;
};

// Rows first .. last - 1, kStripRows of them at most.
using RunDescent = void (*)(const DescentTask& task, int64_t first, int64_t last);
constexpr int64_t kStripRows = 64;

// Of an instruction set as cpu.hpp names them.
RunDescent descent_of(const std::string& isa);

// All rows, shared among the threads.
void run_descent(RunDescent run, const DescentTask& task, ThreadPool& pool);

}  // namespace llmctl
