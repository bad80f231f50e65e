// One persistent pool of threads. The calling thread is worker 0. Waiting threads spin for a while, then sleep.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace llmctl {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  int size() const;
  // Runs body(worker) on every worker and returns when all are done. Not reentrant.
  void run(const std::function<void(int)>& body);
  // Inside body: all workers meet here. Writes before it are seen by all after it.
  void barrier();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace llmctl
