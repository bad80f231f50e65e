// What the phases of a program are made of, for the files that each hold one kind of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "program.hpp"
#include "work_queue.hpp"

namespace llmctl {

constexpr int64_t kOwnRows = 8192;           // elements up to which every worker computes the rows for itself

// What one worker has to itself. `view` is where each buffer's rows are for this worker: the program's own memory, or, for
// what a phase computes row by row in every worker, a private copy.
struct Program::Worker {
  int number;
  std::vector<float*> view;
  AlignedArray<float> rows;
  QuantizedRows quantized;
  AlignedArray<float> chunk;
  AlignedArray<float> chunk_up;
  AlignedArray<float> attention;
};

// Adds the time since the last mark to one of a phase's sums; does nothing where nobody asked for times.
class Stopwatch {
 public:
  explicit Stopwatch(Program::PhaseTime* times) : times_(times) {
    if (times_) last_ = std::chrono::steady_clock::now();
  }
  void mark(double Program::PhaseTime::* sum) {
    if (!times_) return;
    const auto now = std::chrono::steady_clock::now();
    times_->*sum += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  Program::PhaseTime* times_;
  std::chrono::steady_clock::time_point last_;
};

struct Program::Phase {
  int number = 0;   // its place in the program
  virtual ~Phase() = default;
  virtual void prepare(Program& program) = 0;   // before every run, on the calling thread
  virtual void run(Program& program, int worker) = 0;
  // Asks for the memory this phase begins with; false where it has none to ask for and the next one should.
  virtual bool prefetch(int) const { return false; }
};

}  // namespace llmctl
