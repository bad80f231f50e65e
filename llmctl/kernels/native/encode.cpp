#include "encode.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace llmctl {

namespace encode_generic {
extern const Encoder kEncoders[];
}
#if defined(__x86_64__)
namespace encode_avx2 {
extern const Encoder kEncoders[];
}
namespace encode_avx512 {
extern const Encoder kEncoders[];
}
#endif

namespace {

constexpr int64_t kElementsPerTurn = 1 << 15;   // what a thread takes at once

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// Encoders know fewer instruction sets than kernels: what adds to one of theirs is served by it.
const Encoder* encoders(const std::string& isa) {
#if defined(__x86_64__)
  if (starts_with(isa, "amx") || starts_with(isa, "avx512")) return encode_avx512::kEncoders;
  if (starts_with(isa, "avx")) return encode_avx2::kEncoders;
#endif
  return encode_generic::kEncoders;
}

}  // namespace

const Encoder& encoder_named(const std::string& format, const std::string& isa) {
  for (const Encoder* encoder = encoders(isa); encoder->format; encoder++)
    if (format == encoder->format) return *encoder;
  throw std::invalid_argument("no native encoder is called " + format);
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
