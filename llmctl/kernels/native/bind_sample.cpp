#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>

#include "sample.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require_size(const Logits& logits, int64_t k) {
  if (logits.size() == 0 || logits.size() >= (1ull << 32)) throw nb::value_error("logits must have 1 to 2^32 - 1 numbers");
  if (k < 1) throw nb::value_error("k must be at least 1");
}

// A numpy array that owns its numbers.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> owned(std::unique_ptr<T[]> numbers, size_t count) {
  T* data = numbers.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {count}, owner);
}

int64_t bound_argmax(const Logits& logits) {
  require_size(logits, 1);
  return argmax(logits.data(), (int64_t)logits.size());
}

nb::tuple bound_top_k(const Logits& logits, int64_t k) {
  require_size(logits, k);
  size_t room = std::min((size_t)k, logits.size());
  std::unique_ptr<int64_t[]> ids(new int64_t[room]);
  std::unique_ptr<float[]> values(new float[room]);
  int64_t count = top_k(logits.data(), (int64_t)logits.size(), k, ids.get(), values.get());
  size_t found = count < 0 ? 0 : (size_t)count;
  return nb::make_tuple(owned(std::move(ids), found), owned(std::move(values), found));
}

void bound_keep_allowed(nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> logits,
                        nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> allowed) {
  if (allowed.size() != (logits.size() + 31) / 32) throw nb::value_error("allowed must have a bit for every logit");
  keep_allowed(logits.data(), (int64_t)logits.size(), allowed.data());
}

}  // namespace

void bind_sample(nb::module_& m) {
  m.def("argmax", &bound_argmax, nb::arg("logits"));
  m.def("top_k", &bound_top_k, nb::arg("logits"), nb::arg("k"));
  m.def("keep_allowed", &bound_keep_allowed, nb::arg("logits"), nb::arg("allowed"));
}

}  // namespace llmctl
