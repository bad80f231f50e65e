#include "encode.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "descent.hpp"
#include "feedback.hpp"

namespace llmctl {

namespace encode_generic {
extern const Encoder kEncoders[];
extern const RunFeedback kFeedback;
extern const RunDescent kDescent;
}
#if defined(__x86_64__)
namespace encode_avx2 {
extern const Encoder kEncoders[];
extern const RunFeedback kFeedback;
extern const RunDescent kDescent;
}
namespace encode_avx512 {
extern const Encoder kEncoders[];
extern const RunFeedback kFeedback;
extern const RunDescent kDescent;
}
#endif

namespace {

constexpr int64_t kElementsPerTurn = 1 << 15;   // what a thread takes at once

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

struct Compiled {
  const Encoder* encoders;
  RunFeedback feedback;
  RunDescent descent;
};

// Encoders know fewer instruction sets than kernels: what adds to one of theirs is served by it.
Compiled compiled_for(const std::string& isa) {
#if defined(__x86_64__)
  if (starts_with(isa, "amx") || starts_with(isa, "avx512")) return {encode_avx512::kEncoders, encode_avx512::kFeedback, encode_avx512::kDescent};
  if (starts_with(isa, "avx")) return {encode_avx2::kEncoders, encode_avx2::kFeedback, encode_avx2::kDescent};
#endif
  return {encode_generic::kEncoders, encode_generic::kFeedback, encode_generic::kDescent};
}

// Strips of rows, shared among the threads: kStripRows are whole vectors of every instruction set.
template <class Run>
void each_strip(int64_t rows, ThreadPool& pool, Run run) {
  std::atomic<int64_t> next{0};
  pool.run([&](int) {
    for (int64_t row = next.fetch_add(kStripRows); row < rows; row = next.fetch_add(kStripRows))
      run(row, std::min(row + kStripRows, rows));
  });
}

}  // namespace

const Encoder& encoder_named(const std::string& format, const std::string& isa) {
  for (const Encoder* encoder = compiled_for(isa).encoders; encoder->format; encoder++)
    if (format == encoder->format) return *encoder;
  throw std::invalid_argument("no native encoder is called " + format);
}

RunFeedback feedback_of(const std::string& isa) { return compiled_for(isa).feedback; }
RunDescent descent_of(const std::string& isa) { return compiled_for(isa).descent; }

void run_feedback(RunFeedback run, const FeedbackTask& task, ThreadPool& pool) {
  each_strip(task.rows, pool, [&](int64_t first, int64_t last) { run(task, first, last); });
}

void run_descent(RunDescent run, const DescentTask& task, ThreadPool& pool) {
  each_strip(task.rows, pool, [&](int64_t first, int64_t last) { run(task, first, last); });
}

int64_t encode_all(const Encoder& encoder, const EncodeTask& task, ThreadPool& pool) {
  const int64_t rows_per_turn = std::max<int64_t>(1, kElementsPerTurn / task.columns / 16) * 16;   // 16: whole panels
  std::atomic<int64_t> next{0}, bad{task.rows};
  pool.run([&](int) {
    for (int64_t row = next.fetch_add(rows_per_turn); row < bad; row = next.fetch_add(rows_per_turn)) {
      const int64_t last = std::min(row + rows_per_turn, task.rows), done = encoder.encode(task, row, last);
      for (int64_t least = bad; done < last && done < least && !bad.compare_exchange_weak(least, done);) {
      }
    }
  });
  return bad;
}

}  // namespace llmctl
