// What this machine can do at best, for benchmarks to compare with: bytes it reads and operations it computes in a second.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "aligned.hpp"
#include "bind_isa.hpp"
#include "thread_pool.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

typedef uint64_t Lanes __attribute__((vector_size(16)));   // every processor has registers of this size

constexpr int kLine = 64 / static_cast<int>(sizeof(Lanes));
// Stretches a worker reads side by side: one alone leaves a third of what a core can fetch unused.
constexpr int kStreams = 8;

// A block of memory that a pool reads from end to end, each worker one stretch of it.
class MemoryReader {
 public:
  explicit MemoryReader(int64_t bytes) : lines_(bytes / 64) {
    if (lines_ < 1) throw nb::value_error("bytes must be at least 64");
    Lanes* data = memory_.reserve(lines_ * kLine);
#if defined(__linux__)
    madvise(data, static_cast<size_t>(this->bytes()), MADV_HUGEPAGE);   // as prepared weights lie; may be refused
#endif
    std::memset(data, 1, static_cast<size_t>(this->bytes()));
  }

  int64_t bytes() const { return lines_ * 64; }

  // Seconds that reading everything once takes (but for a few lines at the borders of the stretches).
  double seconds(ThreadPool& pool) const {
    const auto start = Clock::now();
    pool.run([&](int worker) { read(lines_ * worker / pool.size(), lines_ * (worker + 1) / pool.size()); });
    return seconds_since(start);
  }

 private:
  void read(int64_t first, int64_t last) const {
    const int64_t length = (last - first) / kStreams;
    const Lanes* begin = memory_.get() + first * kLine;
    Lanes sums[kLine] = {};
    for (int64_t i = 0; i < length; ++i) {
      for (int stream = 0; stream < kStreams; ++stream) {
        for (int lane = 0; lane < kLine; ++lane) sums[lane] ^= begin[(stream * length + i) * kLine + lane];
      }
    }
    Lanes sum = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
    __asm__ __volatile__("" : : "m"(sum));   // or the compiler leaves the reading out
  }

  AlignedArray<Lanes> memory_;
  int64_t lines_;
};

// Operations one core computes in a second with an instruction set: the best of some measurements of a millisecond or more.
double peak_operations(const std::string& isa, bool int8) {
  const Kernels& kernels = kernels_named(isa);
  double best = 0;
  for (int64_t rounds = 1 << 10, measured = 0; measured < 20;) {
    const auto start = Clock::now();
    const int64_t operations = kernels.peak(int8, rounds);
    const double seconds = seconds_since(start);
    if (seconds < 1e-3) {
      rounds *= 2;
      continue;
    }
    best = std::max(best, static_cast<double>(operations) / seconds);
    ++measured;
  }
  return best;
}

}  // namespace

void bind_ceilings(nb::module_& m) {
  nb::class_<MemoryReader>(m, "MemoryReader")
      .def(nb::init<int64_t>(), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes", &MemoryReader::bytes)
      .def("seconds", &MemoryReader::seconds, nb::arg("pool"), nb::call_guard<nb::gil_scoped_release>());
  m.def("peak_operations", &peak_operations, nb::arg("isa"), nb::arg("int8"));
}

}  // namespace llmctl
