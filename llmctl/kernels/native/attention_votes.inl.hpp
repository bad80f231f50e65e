// What the last queries of a sequence look at, and stored rows that move: for caches that keep a part of a prompt.
#pragma once

#include "attention.inl.hpp"

namespace llmctl::LLMCTL_ISA {

// [rows][16 tokens] of `bytes` each, token `from` of one page to token `to` of another.
inline void move_column(const uint8_t* source, uint8_t* target, int64_t rows, int64_t bytes, int64_t from, int64_t to) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* read = source + (row * kPageTokens + from) * bytes;
    uint8_t* written = target + (row * kPageTokens + to) * bytes;
    for (int64_t i = 0; i < bytes; ++i) written[i] = read[i];
  }
}

// [parts][16 tokens][bytes], the same.
inline void move_rows(const uint8_t* source, uint8_t* target, int64_t parts, int64_t bytes, int64_t from, int64_t to) {
  for (int64_t part = 0; part < parts; ++part) {
    memmove(target + (part * kPageTokens + to) * bytes, source + (part * kPageTokens + from) * bytes, size_t(bytes));
  }
}

template <class T>
inline void move_key(const KvShape& shape, const PageHead& source, const PageHead& target, int64_t from, int64_t to) {
  if constexpr (is_block<T>) {
    const int64_t blocks = kv_blocks(shape.head_dim), codes = blocks * T::kCodes;
    move_column((const uint8_t*)source.key_scales, (uint8_t*)target.key_scales, blocks * T::kScales, 2, from, to);
    move_column(source.keys, target.keys, codes + blocks * T::kHigh, 1, from, to);
  } else {
    move_column(source.keys, target.keys, shape.head_dim, sizeof(T), from, to);
  }
}

template <class T>
inline void move_value(const KvShape& shape, const PageHead& source, const PageHead& target, int64_t from, int64_t to) {
  if constexpr (is_block<T>) {
    const int64_t blocks = kv_blocks(shape.head_dim), codes = blocks * T::kCodes * kPageTokens;
    move_rows((const uint8_t*)source.value_scales, (uint8_t*)target.value_scales, T::kScales, blocks * 2, from, to);
    move_rows(source.values, target.values, 1, blocks * T::kCodes, from, to);
    move_rows(source.values + codes, target.values + codes, 1, blocks * T::kHigh, from, to);
  } else {
    move_rows(source.values, target.values, 1, padded_head_dim(shape.head_dim) * int64_t(sizeof(T)), from, to);
  }
}

inline void move(const KvPages& pages, int64_t kv_head, int64_t source, int64_t target) {
  const KvShape& shape = pages.shape;
  const PageHead from = page_head(pages, source / kPageTokens, kv_head), to = page_head(pages, target / kPageTokens, kv_head);
  const int64_t first = source % kPageTokens, second = target % kPageTokens;
  with_element(shape.key_type, [&](auto element) { move_key<decltype(element)>(shape, from, to, first, second); });
  if (shape.latent) return;
  with_element(shape.value_type, [&](auto element) { move_value<decltype(element)>(shape, from, to, first, second); });
}

inline void load_page_keys(const KvPages& pages, int64_t page, int64_t kv_head, float* out) {
  load_keys(pages.shape, page_head(pages, page, kv_head), out);
}

// votes [length] += what the item's rows give to each token.
class VoteRun {
 public:
  VoteRun(const VoteCall& call, const VoteItem& item, float* scratch)
      : call_(call), item_(item), group_(call.num_heads / call.pages.shape.kv_heads), dim_(call.pages.shape.head_dim),
        width_(padded_head_dim(dim_)), stride_((call.length + kKeyTile - 1) / kKeyTile * kKeyTile) {
    scores_ = scratch;
    queries_ = scores_ + kVoteRows * stride_;
    keys_ = queries_ + kVoteRows * width_;
  }

  void run(float* votes) {
    load_queries();
    for (int64_t start = 0; start < call_.length; start += kKeyTile) score(start);
    for (int64_t row = 0; row < item_.count; ++row) add_row(scores_ + row * stride_, head(row), seen(row), votes);
  }

 private:
  int64_t query(int64_t row) const { return (item_.first + row) / group_; }
  int64_t head(int64_t row) const { return item_.kv_head * group_ + (item_.first + row) % group_; }
  int64_t seen(int64_t row) const { return call_.length - call_.num_queries + query(row) + 1; }

  void load_queries() {   // scores are in powers of two, as in ItemRun
    F32 factor = set_f32(call_.softcap != 0 ? call_.scale / call_.softcap : call_.scale * kLog2E);
    for (int64_t row = 0; row < item_.count; ++row) {
      const float* values = call_.queries + (query(row) * call_.num_heads + head(row)) * dim_;
      float* to = queries_ + row * width_;
      for (int64_t d = 0; d < dim_; d += 16) {
        store_f32(to + d, mul(load_f32_first(values + d, int(smaller(16, dim_ - d))), factor));
      }
      rotate_blocks(to, dim_, kv_key_rotation(call_.pages.shape));
    }
  }

  void score(int64_t start) {
    const int64_t end = smaller(start + kKeyTile, (call_.length + kPageTokens - 1) / kPageTokens * kPageTokens);
    for (int64_t key = start; key < end; key += kPageTokens) {
      call_.kernels->load_keys(call_.pages, call_.block_table[key / kPageTokens], item_.kv_head, keys_ + key - start);
    }
    multiply(item_.count, (end - start) / 16, queries_, width_, dim_, LoadedRows{keys_, kKeyTile}, nullptr, scores_ + start, stride_);
  }

  void add_row(float* scores, int64_t head, int64_t seen, float* votes) const {
    const int64_t end = (seen + 15) / 16 * 16;
    for (int64_t key = seen; key < end; ++key) scores[key] = -INFINITY;
    F32 most = set_f32(-INFINITY), sum = zero_f32(), cap = set_f32(call_.softcap * kLog2E);
    for (int64_t key = 0; key < end; key += 16) {
      if (call_.softcap != 0) store_f32(scores + key, capped(scores + key, cap, seen - key));
      most = max(most, load_f32(scores + key));
    }
    const float maximum = reduce_max(most);
    for (int64_t key = 0; key < end; key += 16) {
      F32 weight = exp2_negative(sub(load_f32(scores + key), set_f32(maximum)));
      store_f32(scores + key, weight);
      sum = add(sum, weight);
    }
    // A sink far above every score takes all the weight.
    AttentionCall sinks = {};
    sinks.sinks = call_.sinks;
    F32 factor = set_f32(row_factor(sinks, head, maximum, reduce_add(sum)));
    for (int64_t key = 0; key < seen; key += 16) {
      const int lanes = int(smaller(16, seen - key));
      store_f32_first(votes + key, fma(load_f32(scores + key), factor, load_f32_first(votes + key, lanes)), lanes);
    }
  }

  // Minus infinity stays what it is.
  static F32 capped(const float* scores, F32 cap, int64_t seen) {
    float lanes[16];
    store_f32(lanes, mul(cap, tanh(load_f32(scores))));
    for (int64_t i = larger(seen, 0); i < 16; ++i) lanes[i] = -INFINITY;
    return load_f32(lanes);
  }

  const VoteCall& call_;
  const VoteItem& item_;
  const int64_t group_, dim_, width_, stride_;
  float *scores_, *queries_, *keys_;   // [rows][stride], [rows][width], [head_dim][64]
};

inline void vote(const VoteCall& call, const VoteItem& item, float* scratch, float* votes) {
  VoteRun(call, item, scratch).run(votes);
}

// `inline` gives it one address a namespace, and each instruction set is a namespace of its own.
inline const AttentionKernels attention_kernels = {store, load, run_item, merge_item, move, load_page_keys, vote};

}  // namespace llmctl::LLMCTL_ISA
