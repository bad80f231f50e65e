#include "kv_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace llmctl {
namespace {

KvType type_named(const std::string& name) {
  static const std::pair<const char*, KvType> kTypes[] = {{"f32", KvType::F32},   {"f16", KvType::F16},   {"bf16", KvType::BF16},
                                                          {"fp8", KvType::FP8},   {"q8_0", KvType::Q8_0}, {"q5_1", KvType::Q5_1},
                                                          {"q4_0", KvType::Q4_0}};
  for (const auto& [known, type] : kTypes)
    if (name == known) return type;
  throw std::invalid_argument("KV pages are f32, f16, bf16, fp8, q8_0, q5_1 or q4_0, not " + name);
}

}  // namespace

KvMemory::KvMemory(int64_t num_pages, int64_t kv_heads, int64_t head_dim, const std::string& key_type,
                   const std::string& value_type, int64_t latent, bool rotates)
    : pages_{{type_named(key_type), type_named(value_type), kv_heads, head_dim, latent, rotates}, nullptr, 0}, bytes_(0) {
  if (head_dim <= 0 || head_dim > kMaxHeadDim || head_dim % 8)
    throw std::invalid_argument("head_dim must be a multiple of 8 up to " + std::to_string(kMaxHeadDim) + ", found " +
                                std::to_string(head_dim));
  if (latent < 0 || latent > head_dim)
    throw std::invalid_argument("latent values must be 0 to " + std::to_string(head_dim) + " columns of the keys, found " +
                                std::to_string(latent));
  pages_.page_stride = kv_page_bytes(pages_.shape);
  bytes_ = std::max<int64_t>(1, num_pages) * pages_.page_stride;
  void* memory = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  pages_.data = static_cast<uint8_t*>(memory);
}

const uint8_t* KvMemory::page(int64_t index) const {
  if (index < 0 || index >= num_pages()) throw std::out_of_range("there is no page " + std::to_string(index));
  return pages_.data + index * pages_.page_stride;
}

void KvMemory::set_page(int64_t index, const uint8_t* bytes) {
  std::memmove(const_cast<uint8_t*>(page(index)), bytes, static_cast<size_t>(pages_.page_stride));
}

void KvMemory::copy_page(int64_t source, int64_t target) { set_page(target, page(source)); }

KvMemory::~KvMemory() { munmap(pages_.data, static_cast<size_t>(bytes_)); }

}  // namespace llmctl
