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
  // Inside body, between pieces of work: throws where another worker failed, so that nobody works for a run that is lost.
  void check() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace llmctl
