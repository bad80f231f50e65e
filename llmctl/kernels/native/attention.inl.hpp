// Attention of one item: a block of query rows (tokens x heads that share a kv head) against the keys of one kv head, tile by tile.
// Decode and prefill are the same code; only the number of rows differs. See attention.hpp for what fixes the order of sums.
#pragma once

#include <math.h>

#include "attention_merge.inl.hpp"
#include "attention_pages.inl.hpp"

namespace llmctl::LLMCTL_ISA {

// How many vectors of a row an inner loop sums at a time: 4 where there are 32 registers of 16 lanes, else 1.
#if defined(__AVX512F__)
constexpr int kSumVectors = 4;
#else
constexpr int kSumVectors = 1;
#endif

// Up to here keys and values are used as they lie in their pages; with more rows a tile is worth being loaded first.
constexpr int64_t kDirectRows = 16;

// Rows whose scores stay in the first-level cache between their sums.
constexpr int64_t kRowsAtOnce = 24;

// c [R][16 V] = factor[row] * c (null: 0) + a [R][count] times b [count][16 V]: one chain of fma per element, k ascending.
template <int R, int V, class Rows>
inline void multiply_block(const float* a, int64_t a_stride, int64_t count, const Rows& b, const float* factors, float* c,
                           int64_t c_stride) {
  F32 sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      sums[r][v] = factors ? mul(set_f32(factors[r]), load_f32(c + r * c_stride + 16 * v)) : zero_f32();
    }
  }
  auto add_row = [&](int64_t k, auto at) __attribute__((always_inline)) {
    F32 row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) row[v] = at(v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      F32 factor = set_f32(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = fma(factor, row[v], sums[r][v]);
    }
  };
  if constexpr (Rows::kBlocks) {   // their scales are read once
    for (int64_t first = 0; first < count; first += 32) {
      Scales scales[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) scales[v] = b.scales(first / 32, v);
      const int64_t middle = smaller(first + 16, count), last = smaller(first + 32, count);
      for (int64_t k = first; k < middle; ++k) add_row(k, [&](int v) { return b.template at_scaled<false>(k, v, scales[v]); });
      for (int64_t k = middle; k < last; ++k) add_row(k, [&](int v) { return b.template at_scaled<true>(k, v, scales[v]); });
    }
  } else {
    for (int64_t k = 0; k < count; ++k) add_row(k, [&](int v) { return b.at(k, v); });
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store_f32(c + r * c_stride + 16 * v, sums[r][v]);
  }
}

// The same with `rows` known at run time only, 1 to R.
template <int R, int V, class Rows>
inline void multiply_rows(int64_t rows, const float* a, int64_t a_stride, int64_t count, const Rows& b, const float* factors,
                          float* c, int64_t c_stride) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<R - 1, V>(rows, a, a_stride, count, b, factors, c, c_stride);
  }
  multiply_block<R, V>(a, a_stride, count, b, factors, c, c_stride);
}

// The same for any number of rows and vectors, in blocks of at most Rows::kRows (as even as can be) and V.
template <int V = kSumVectors, class Rows>
inline void multiply(int64_t rows, int64_t vectors, const float* a, int64_t a_stride, int64_t count, Rows b,
                     const float* factors, float* c, int64_t c_stride) {
  constexpr int R = Rows::kRows;
  for (; vectors >= V; vectors -= V, b = b.columns(V), c += 16 * V) {
    for (int64_t first = 0, block; first < rows; first += block) {
      int64_t left = rows - first;
      block = left <= R ? left : left < 2 * R ? (left + 1) / 2 : R;
      multiply_rows<R, V>(block, a + first * a_stride, a_stride, count, b, factors ? factors + first : nullptr,
                          c + first * c_stride, c_stride);
    }
  }
  if constexpr (V > 1) {
    if (vectors) multiply<V / 2>(rows, vectors, a, a_stride, count, b, factors, c, c_stride);
  }
}

// One item at work. Scores are in powers of two: queries are scaled by log2 e on the way in (or after the cap).
class ItemRun {
 public:
  ItemRun(const AttentionCall& call, const AttentionItem& item, float* scratch)
      : call_(call),
        item_(item),
        shape_(call.pages.shape),
        sequence_(call.sequences[item.sequence]),
        group_(item.num_heads),
        rows_(item.num_queries * group_),
        width_(padded_head_dim(shape_.head_dim)),
        value_width_(padded_head_dim(kv_value_dim(shape_))),
        first_position_(sequence_.context_len - sequence_.num_queries + item.first_query) {
    int64_t most = attention_max_rows(call.num_heads, shape_), lanes = (most + 15) / 16 * 16;
    auto take = [&scratch](int64_t floats) { float* p = scratch; scratch += floats; return p; };
    queries_ = take(most * width_);
    keys_ = take(shape_.head_dim * kKeyTile);
    values_ = take(kKeyTile * value_width_);
    scores_ = take(most * kKeyTile);
    partition_ = {take(lanes), take(lanes), take(most * value_width_)};
    total_ = {take(lanes), take(lanes), take(most * value_width_)};
    lane_sums_ = take(most * 16);
    factors_ = take(lanes);
    tile_maxima_ = take(lanes);
  }

  void run(float* partials) {
    load_queries();
    for (int64_t part = 0; part < item_.parts(); ++part) {
      run_partition(item_.partition(part));
      if (item_.partial >= 0) {
        write_partial(partials + (item_.partial + part * rows_) * attention_partial_floats(shape_));
      } else if (part == 0) {   // merged with nothing
        Softmax first = partition_;
        partition_ = total_;
        total_ = first;
      } else {
        merge_partition();
      }
    }
    if (item_.partial < 0) write_out();
  }

 private:
  struct Softmax { float *maxima, *sums, *rows; };   // rows [rows][value_width]: weighted, not yet divided by the sum

  // Keys [low, high) of the tile that begins at `start` are those that token `i` of the block sees; none if low >= high.
  int64_t low(int64_t start, int64_t i) const {
    return window_ ? larger(larger(first_position_ + i - window_ + 1, first_key_) - start, 0) : 0;
  }
  int64_t high(int64_t start, int64_t i) const { return smaller(smaller(first_position_ + i + 1, end_key_) - start, kKeyTile); }

  void load_queries() {
    F32 factor = set_f32(call_.softcap != 0 ? call_.scale / call_.softcap : call_.scale * kLog2E);
    int64_t dim = shape_.head_dim;
    for (int64_t r = 0; r < rows_; ++r) {
      const float* query = call_.queries + (sequence_.first_query + item_.first_query + r / group_) * call_.query_stride +
                           (item_.first_head + r % group_) * dim;
      for (int64_t d = 0; d < dim; d += 16) {
        store_f32(queries_ + r * width_ + d, mul(load_f32_first(query + d, int(smaller(16, dim - d))), factor));
      }
      rotate_blocks(queries_ + r * width_, dim, kv_key_rotation(shape_));
    }
  }

  void clear_partition() {
    for (int64_t r = 0; r < rows_; r += 16) store_f32(partition_.maxima + r, set_f32(-INFINITY));
    for (int64_t r = 0; r < rows_; ++r) store_f32(lane_sums_ + 16 * r, zero_f32());
    for (int64_t i = 0; i < rows_ * value_width_; i += 16) store_f32(partition_.rows + i, zero_f32());
  }

  void run_partition(int64_t index) {
    clear_partition();
    const bool is_anchors = index < 0;
    window_ = is_anchors ? 0 : call_.sliding_window;
    first_key_ = is_anchors || !window_ ? 0 : call_.anchors;
    end_key_ = is_anchors ? call_.anchors : sequence_.context_len;
    int64_t end = smaller(is_anchors ? end_key_ : (index + 1) * kPartition, first_position_ + item_.num_queries);
    for (int64_t start = larger(index, 0) * kPartition; start < end; start += kKeyTile) run_tile(start);
    for (int64_t r = 0; r < rows_; ++r) partition_.sums[r] = reduce_add(load_f32(lane_sums_ + 16 * r));
  }

  void run_tile(int64_t start) {
    int64_t window = window_, tokens = item_.num_queries, ahead = start - first_position_;
    int64_t first = between(larger(start, first_key_) - first_position_, 0, tokens);   // tokens that see any key of the tile
    int64_t last = window ? between(ahead + kKeyTile + window - 1, 0, tokens) : tokens;
    if (first >= last) return;
    load_tile(start, low(start, first), high(start, last - 1));
    const bool is_cut = start < first_key_ || end_key_ - start < kKeyTile;   // anchors are not a whole tile
    int64_t whole = is_cut ? last : between(ahead + kKeyTile - 1, first, last);   // tokens that see all of it
    int64_t whole_end = window ? between(ahead + window, whole, last) : last;
    int64_t step = larger(1, kRowsAtOnce / group_);
    for (int64_t token = first; token < last; token += step) {
      int64_t end = smaller(token + step, last);
      run_rows(start, token, between(whole, token, end), between(whole_end, token, end), end);
    }
  }

  // Tokens first .. last - 1 against a tile, of which whole .. whole_end - 1 see all of it.
  void run_rows(int64_t start, int64_t first, int64_t whole, int64_t whole_end, int64_t last) {
    score(start, first, last);
    mask(start, first, whole);
    mask(start, whole_end, last);
    softmax(first * group_, last * group_);
    for (int64_t token = first; token < whole; ++token) add_values(start, token);
    add_values(whole * group_, whole_end * group_, 0, kKeyTile);
    for (int64_t token = whole_end; token < last; ++token) add_values(start, token);
  }

  void load_tile(int64_t start, int64_t first_key, int64_t last_key) {
    for (int64_t key = first_key / kPageTokens * kPageTokens; key < last_key; key += kPageTokens) {
      PageHead& head = heads_[key / kPageTokens];
      head = page_of(start + key);
      if (direct()) {
        if (start + key + kKeyTile < sequence_.context_len) head.ahead = page_of(start + key + kKeyTile).keys - head.keys;
        continue;
      }
      load_keys(shape_, head, keys_ + key);
      int64_t first = larger(first_key - key, 0), last = smaller(last_key - key, kPageTokens);
      if (shape_.latent) turn_keys(shape_, keys_, first, last, key, values_);
      else load_values(shape_, head, first, last, key, values_);
    }
  }

  PageHead page_of(int64_t key) const {
    return page_head(call_.pages, sequence_.block_table[key / kPageTokens], item_.kv_head);
  }

  bool direct() const { return rows_ <= kDirectRows && !shape_.latent; }

  template <class Rows>
  void score_block(int64_t row, int64_t rows, int64_t begin, int64_t end, const Rows& keys) {
    multiply(rows, end - begin, queries_ + row * width_, width_, shape_.head_dim, keys.columns(begin), nullptr,
             scores_ + row * kKeyTile + 16 * begin, kKeyTile);
  }

  // Vectors of keys that none of the rows sees are left out: their pages may not be there.
  void score(int64_t start, int64_t first, int64_t last) {
    int64_t rows = direct() ? kDirectRows : LoadedRows::kRows;
    for (int64_t row = first * group_; row < last * group_; row += rows) {
      rows = smaller(rows, last * group_ - row);
      int64_t begin = low(start, row / group_) / 16, end = (high(start, (row + rows - 1) / group_) + 15) / 16;
      if (direct()) {
        with_element(shape_.key_type, [&](auto element) {
          score_block(row, rows, begin, end, PageKeys<decltype(element)>{heads_, kv_blocks(shape_.head_dim)});
        });
      } else {
        score_block(row, rows, begin, end, LoadedRows{keys_, kKeyTile});
      }
    }
    if (call_.softcap == 0) return;
    F32 cap = set_f32(call_.softcap * 1.44269504f);
    for (int64_t i = first * group_ * kKeyTile; i < last * group_ * kKeyTile; i += 16) {
      store_f32(scores_ + i, mul(cap, tanh(load_f32(scores_ + i))));
    }
  }

  // Selects, not sums: what stands in a slot that is not seen may be anything.
  void mask(int64_t start, int64_t first, int64_t last) {
    static const float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F32 hidden = set_f32(-INFINITY);
    for (int64_t row = first * group_; row < last * group_; ++row) {
      F32 begin = set_f32(float(low(start, row / group_))), end = set_f32(float(high(start, row / group_)));
      for (int64_t key = 0; key < kKeyTile; key += 16) {
        float* scores = scores_ + row * kKeyTile + key;
        F32 index = add(load_f32(kLanes), set_f32(float(key)));
        store_f32(scores, select_less(index, begin, hidden, select_less(index, end, load_f32(scores), hidden)));
      }
    }
  }

  // Scores become weights; maxima, sums and what the rows are to be multiplied by follow.
  void softmax(int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float* s = scores_ + r * kKeyTile;
      tile_maxima_[r] = reduce_max(max(max(load_f32(s), load_f32(s + 16)), max(load_f32(s + 32), load_f32(s + 48))));
    }
    for (int64_t r = first; r < last; r += 16) {
      int lanes = int(smaller(16, last - r));
      F32 before = load_f32_first(partition_.maxima + r, lanes);
      F32 now = max(before, load_f32_first(tile_maxima_ + r, lanes));
      store_f32_first(partition_.maxima + r, now, lanes);
      store_f32_first(tile_maxima_ + r, finite_or_zero(now), lanes);
      store_f32_first(factors_ + r, exp2_negative(sub(before, finite_or_zero(now))), lanes);
    }
    for (int64_t r = first; r < last; ++r) {
      float* s = scores_ + r * kKeyTile;
      F32 base = set_f32(tile_maxima_[r]), weights[4];
      for (int i = 0; i < 4; ++i) {
        weights[i] = exp2_negative(sub(load_f32(s + 16 * i), base));
        store_f32(s + 16 * i, weights[i]);
      }
      F32 sum = add(add(weights[0], weights[1]), add(weights[2], weights[3]));
      store_f32(lane_sums_ + 16 * r, fma(load_f32(lane_sums_ + 16 * r), set_f32(factors_[r]), sum));
    }
  }

  // Keys begin .. end - 1 of the tile, weighted, into rows first .. last - 1.
  void add_values(int64_t first, int64_t last, int64_t begin, int64_t end) {
    if (first >= last) return;
    if (direct()) return add_page_values(first, last, begin, end);
    for (int64_t panel = 0; panel < value_width_; panel += 64) {
      int64_t columns = smaller(64, value_width_ - panel);
      LoadedRows values = {values_ + panel * kKeyTile + begin * columns, columns};
      multiply(last - first, columns / 16, scores_ + first * kKeyTile + begin, kKeyTile, end - begin, values,
               factors_ + first, partition_.rows + first * value_width_ + panel, value_width_);
    }
  }

  // The same chain of sums, a page after the other.
  void add_page_values(int64_t first, int64_t last, int64_t begin, int64_t end) {
    static const float kOnes[kDirectRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const float* factors = factors_ + first;
    for (int64_t key = begin; key < end; factors = kOnes) {
      int64_t next = smaller((key / kPageTokens + 1) * kPageTokens, end);
      with_element(shape_.value_type, [&](auto element) {
        auto values = page_values<decltype(element)>(shape_, heads_[key / kPageTokens], key % kPageTokens, values_);
        multiply(last - first, value_width_ / 16, scores_ + first * kKeyTile + key, kKeyTile, next - key, values, factors,
                 partition_.rows + first * value_width_, value_width_);
      });
      key = next;
    }
  }

  void add_values(int64_t start, int64_t token) {
    add_values(token * group_, (token + 1) * group_, low(start, token), high(start, token));
  }

  void merge_partition() {
    for (int64_t r = 0; r < rows_; r += 16) {
      MergeWeights weights = merge_weights(load_f32(total_.maxima + r), load_f32(partition_.maxima + r));
      store_f32(total_.maxima + r, weights.maximum);
      F32 sum = merge_lanes(load_f32(total_.sums + r), weights.first, load_f32(partition_.sums + r), weights.second);
      store_f32(total_.sums + r, sum);
      float first[16], second[16];
      store_f32(first, weights.first);
      store_f32(second, weights.second);
      for (int64_t i = 0; i < smaller(16, rows_ - r); ++i) {
        merge_row(total_.rows + (r + i) * value_width_, first[i], partition_.rows + (r + i) * value_width_, second[i],
                  value_width_);
      }
    }
  }

  void write_partial(float* partial) const {
    for (int64_t r = 0; r < rows_; ++r, partial += attention_partial_floats(shape_)) {
      for (int64_t d = 0; d < value_width_; d += 16) store_f32(partial + d, load_f32(partition_.rows + r * value_width_ + d));
      partial[value_width_] = partition_.maxima[r];
      partial[value_width_ + 1] = partition_.sums[r];
    }
  }

  void write_out() const {
    const int64_t dim = kv_value_dim(shape_);
    for (int64_t r = 0; r < rows_; ++r) {
      int64_t head = item_.first_head + r % group_;
      float* out = call_.out + (sequence_.first_query + item_.first_query + r / group_) * call_.out_stride +
                   head * dim;
      write_row(total_.rows + r * value_width_, row_factor(call_, head, total_.maxima[r], total_.sums[r]), dim, out);
      rotate_blocks(out, dim, kv_value_rotation(shape_));
    }
  }

  const AttentionCall& call_;
  const AttentionItem& item_;
  const KvShape& shape_;
  const AttentionSequence& sequence_;
  const int64_t group_, rows_, width_, value_width_;   // group: heads of the item
  const int64_t first_position_;   // of the block's first token
  int64_t window_ = 0, first_key_ = 0, end_key_ = 0;   // of the partition at hand: its window, and the keys it is about
  PageHead heads_[kKeyTile / kPageTokens];   // the pages of the tile at hand
  float *queries_, *keys_, *values_, *scores_;   // [rows][width], [head_dim][64], panels (load_values), [rows][64]
  Softmax partition_, total_;
  float *lane_sums_, *factors_, *tile_maxima_;   // sums of weights, 16 lanes a row; factor and base of the tile at hand
};

inline void run_item(const AttentionCall& call, const AttentionItem& item, float* scratch, float* partials) {
  ItemRun(call, item, scratch).run(partials);
}

}  // namespace llmctl::LLMCTL_ISA
