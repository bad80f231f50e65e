// ThreadPool for Python: what the other native objects are given, with what the tests need to look into it.
#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>

#include "thread_pool.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

// Calls body(worker) on every worker, the GIL taken by one after the other; the first exception comes back as it was.
void run_python(ThreadPool& pool, const nb::callable& body) {
  nb::gil_scoped_release release;
  pool.run([&](int worker) {
    nb::gil_scoped_acquire acquire;
    body(worker);
  });
}

void python_barrier(ThreadPool& pool) {
  nb::gil_scoped_release release;
  pool.barrier();
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Seconds a barrier takes, over `rounds` of them in one run.
double barrier_seconds(ThreadPool& pool, int64_t rounds) {
  const auto start = std::chrono::steady_clock::now();
  pool.run([&](int) {
    for (int64_t i = 0; i < rounds; ++i) pool.barrier();
  });
  return seconds_since(start) / static_cast<double>(rounds);
}

// Seconds an empty run takes, over `rounds` of them.
double run_seconds(ThreadPool& pool, int64_t rounds) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < rounds; ++i) pool.run([](int) {});
  return seconds_since(start) / static_cast<double>(rounds);
}

}  // namespace

void bind_pool(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), nb::arg("threads"))
      .def_prop_ro("size", &ThreadPool::size)
      .def("run", &run_python, nb::arg("body"))
      .def("barrier", &python_barrier)
      .def("barrier_seconds", &barrier_seconds, nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>())
      .def("run_seconds", &run_seconds, nb::arg("rounds"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace llmctl
