// What the phases of a program are made of, for the files that each hold one kind of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "program.hpp"

namespace llmctl {

constexpr int64_t kOwnRows = 8192;           // elements up to which every worker computes the rows for itself
constexpr int64_t kPrefetch = 32 << 10;      // bytes of the next phase's weights that are asked for before meeting

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

// Pieces of work numbered from 0, taken by the workers. Each has a range of its own, so that it reads memory in one stream,
// and helps the others when that is done.
class WorkQueue {
 public:
  void restart(int64_t items, int workers) {
    if (!next_) next_ = std::make_unique<Counter[]>(workers);
    items_ = items;
    workers_ = workers;
    for (int i = 0; i < workers; i++) next_[i].value.store(begin(i), std::memory_order_relaxed);
  }
  int64_t begin(int worker) const { return items_ * worker / workers_; }
  // The next piece for a worker that is helping the `helped`-th range after its own; -1 where nothing is left.
  int64_t take(int worker, int& helped) {
    for (; helped < workers_; helped++) {
      const int range = (worker + helped) % workers_;
      const int64_t item = next_[range].value.fetch_add(1, std::memory_order_relaxed);
      if (item < begin(range + 1)) return item;
    }
    return -1;
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  std::unique_ptr<Counter[]> next_;
  int64_t items_ = 0;
  int workers_ = 1;
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
