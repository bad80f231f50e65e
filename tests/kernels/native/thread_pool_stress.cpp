// Works a ThreadPool hard and exits with 0 if every result was right; built with -fsanitize=thread by test_thread_pool.py.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "thread_pool.hpp"

using llmctl::ThreadPool;

namespace {

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

// Plain memory written before a barrier by one worker and read after it by the next: a race if the barrier orders nothing.
void neighbours_see_each_other(ThreadPool& pool, int rounds) {
  std::vector<int> values(pool.size(), 0);
  std::vector<int> errors(pool.size(), 0);
  pool.run([&](int worker) {
    for (int round = 1; round <= rounds; ++round) {
      values[worker] = round;
      pool.barrier();
      errors[worker] += values[(worker + 1) % pool.size()] != round;
      pool.barrier();
    }
  });
  check(std::accumulate(errors.begin(), errors.end(), 0) == 0, "a barrier let a worker through early");
}

void runs_follow_each_other(ThreadPool& pool, int runs) {
  std::vector<int> counts(pool.size(), 0);
  int total = 0;
  for (int i = 0; i < runs; ++i) {
    pool.run([&](int worker) { ++counts[worker]; });
    total = std::accumulate(counts.begin(), counts.end(), 0);
    check(total == (i + 1) * pool.size(), "a run ended before its workers");
    if (i % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // long enough for the workers to sleep
  }
}

void failures_come_back(ThreadPool& pool, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    bool caught = false;
    try {
      pool.run([&](int worker) {
        pool.barrier();
        if (worker == i % pool.size()) throw std::runtime_error("on purpose");
        pool.barrier();
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    check(caught, "a failure was lost");
  }
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3, 5}) {
    for (int born = 0; born < 3; ++born) {
      ThreadPool pool(threads);
      neighbours_see_each_other(pool, 300);
      runs_follow_each_other(pool, 300);
      failures_come_back(pool, 20);
      neighbours_see_each_other(pool, 20);
    }
    const ThreadPool never_used(threads);
  }
  return 0;
}
