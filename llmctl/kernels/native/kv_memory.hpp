// KvMemory: the pages of one layer and the memory they lie in, taken from the system page by page as tokens come.
#pragma once

#include <cstdint>
#include <string>

#include "attention.hpp"

namespace llmctl {

class KvMemory {
 public:
  // Types: f32, f16, bf16, fp8, q8_0, q5_1 or q4_0. latent, rotates: of KvShape. std::invalid_argument for another type, or sizes
  // that attention.hpp excludes; std::bad_alloc where the address space does not hold it.
  KvMemory(int64_t num_pages, int64_t kv_heads, int64_t head_dim, const std::string& key_type, const std::string& value_type,
           int64_t latent, bool rotates);
  ~KvMemory();
  KvMemory(const KvMemory&) = delete;
  KvMemory& operator=(const KvMemory&) = delete;

  const KvPages& pages() const { return pages_; }
  int64_t bytes() const { return bytes_; }
  // std::out_of_range for a page that is none.
  void copy_page(int64_t source, int64_t target);
  // A page's bytes, page_stride of them, out and back in. std::out_of_range for a page that is none.
  const uint8_t* page(int64_t index) const;
  void set_page(int64_t index, const uint8_t* bytes);
  int64_t num_pages() const { return bytes_ / pages_.page_stride; }

 private:
  KvPages pages_;
  int64_t bytes_;
};

}  // namespace llmctl
