#include "sample.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace llmctl {
namespace {

constexpr int kLanes = 4;
constexpr int kBlock = 256;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Mask __attribute__((vector_size(4 * kLanes)));

Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

float largest_lane(Lanes v) { return std::max(std::max(v[0], v[1]), std::max(v[2], v[3])); }

bool any(Mask mask) {
  uint64_t halves[2];
  std::memcpy(halves, &mask, sizeof halves);
  return (halves[0] | halves[1]) != 0;
}

// Largest number of a block. Every number is added to `sum`, which a NaN turns into NaN for good.
float largest(const float* block, Lanes& sum) {
  Lanes best[4], sums[4] = {};
  for (Lanes& lanes : best) lanes = load(block);
  for (int i = 0; i < kBlock; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      Lanes v = load(block + i + kLanes * j);
      best[j] = larger(v, best[j]);
      sums[j] += v;
    }
  }
  sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return largest_lane(larger(larger(best[0], best[1]), larger(best[2], best[3])));
}

// Calls visit(first index, largest number) for every block; the last one may be shorter. False: one is not a number.
template <class Visit>
bool scan(const float* x, int64_t n, Visit visit) {
  Lanes sum = {};
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) visit(i, largest(x + i, sum));
  float best = kLowest;
  for (int64_t rest = i; rest < n; ++rest) {
    best = std::max(best, x[rest]);
    sum[0] += x[rest];
  }
  if (i < n) visit(i, best);
  if (!any(sum != sum)) return true;
  // Infinities of both signs add up to NaN too, so the numbers themselves are asked.
  return std::none_of(x, x + n, [](float v) { return std::isnan(v); });
}

// Ascending keys are descending numbers, equal ones (zeros of both signs too) by index.
uint64_t key_of(float value, int64_t index) {
  float number = value + 0.0f;   // -0 becomes 0
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  uint32_t descending = bits >> 31 ? bits : ~bits & 0x7fffffffu;
  return (uint64_t)descending << 32 | (uint64_t)index;
}

int64_t index_of(uint64_t key) { return (int64_t)(key & 0xffffffffu); }

// The k best keys seen, and some that may yet fall out; `threshold` is what a number must exceed to get in.
struct Best {
  const float* logits;
  size_t k;
  float threshold;
  std::vector<uint64_t> keys;

  Best(const float* logits, int64_t n, int64_t k, float threshold) : logits(logits), k((size_t)k), threshold(threshold) {
    keys.reserve((size_t)std::min(n, 2 * k + 32));
  }

  void add(int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      if (any(load(logits + i) > threshold)) add_each(i, i + kLanes);
    }
    add_each(i, end);
  }

  void add_each(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!(logits[i] > threshold)) continue;
      if (keys.size() == keys.capacity()) shrink();
      keys.push_back(key_of(logits[i], i));
    }
  }

  void shrink() {
    if (keys.size() <= k) return;
    std::nth_element(keys.begin(), keys.begin() + (int64_t)k - 1, keys.end());
    keys.resize(k);
    threshold = logits[index_of(keys.back())];
  }

  void finish() {
    if (keys.empty()) keys.push_back(key_of(kLowest, 0));
    shrink();
    std::sort(keys.begin(), keys.end());
  }
};

// A number that at least k others exceed or equal, less the smallest step: the k-th largest of the blocks' largest.
float lower_bound(std::vector<float> block_best, int64_t k) {
  if ((int64_t)block_best.size() < k) return kLowest;
  std::nth_element(block_best.begin(), block_best.begin() + k - 1, block_best.end(), std::greater<float>());
  return std::nextafter(block_best[(size_t)k - 1], kLowest);
}

}  // namespace

int64_t argmax(const float* logits, int64_t n) {
  float best = kLowest;
  int64_t block = 0;
  bool numbers = scan(logits, n, [&](int64_t begin, float largest) {
    if (largest > best) {
      best = largest;
      block = begin;
    }
  });
  return numbers ? std::find(logits + block, logits + n, best) - logits : -1;
}

int64_t top_k(const float* logits, int64_t n, int64_t k, int64_t* ids, float* values) {
  k = std::min(k, n);
  std::vector<float> block_best;
  block_best.reserve((size_t)(n / kBlock + 1));
  if (!scan(logits, n, [&](int64_t, float largest) { block_best.push_back(largest); })) return -1;
  Best best(logits, n, k, lower_bound(block_best, k));
  for (size_t i = 0; i < block_best.size(); ++i) {
    int64_t begin = (int64_t)i * kBlock;
    if (block_best[i] > best.threshold) best.add(begin, std::min(n, begin + kBlock));
  }
  best.finish();
  for (uint64_t key : best.keys) {
    *ids++ = index_of(key);
    *values++ = logits[index_of(key)];
  }
  return (int64_t)best.keys.size();
}

void keep_allowed(float* logits, int64_t n, const uint32_t* allowed) {
  const Lanes lowest = {kLowest, kLowest, kLowest, kLowest};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32, ++allowed) {
    if (*allowed == 0xffffffffu) continue;
    Mask bits = {1, 2, 4, 8};
    const Mask word = {(int32_t)*allowed, (int32_t)*allowed, (int32_t)*allowed, (int32_t)*allowed};
    for (int j = 0; j < 32; j += kLanes, bits <<= kLanes) {
      Lanes v = (word & bits) != 0 ? load(logits + i + j) : lowest;
      std::memcpy(logits + i + j, &v, sizeof v);
    }
  }
  for (; i < n; ++i) {
    if (!(*allowed >> (i % 32) & 1)) logits[i] = kLowest;
  }
}

}  // namespace llmctl
