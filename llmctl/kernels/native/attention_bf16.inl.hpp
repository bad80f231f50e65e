// Attention over pages of bf16: queries and weights are rounded to bf16 as well, scores and sums are float32. Products of pairs
// come from the tile unit (attention_amx.inl.hpp) or from dot products (attention_dots.inl.hpp). Other pages go to the AVX-512
// kernels.
//
// A row's softmax over a partition has one maximum; scores of 32 rows with all keys of the partition lie side by side, become
// weights in place and are multiplied with the values without ever being rescaled.
//
// Row invariance: columns of the factors cut at absolute positions always fall into the same product, whose sums of a row are its
// own, and a key that a row does not see has weight 0: to add 0 times a finite value changes no sum. (The sign of a zero may
// differ; write_row removes it.) Values that are not finite are set to 0 for the rows that do not see them.
#pragma once

#include "attention_bf16_pages.inl.hpp"
#include "kernels.hpp"

namespace llmctl {

namespace avx512 {
extern const Kernels kKernels;
}

namespace LLMCTL_ISA {

constexpr int64_t kScoreBytes = kScoreFloats * 4;   // of a row: the weights that replace scores as well
constexpr int64_t kAskedBytes = 512;
constexpr int64_t kPartitionPages = kPartition / kPageTokens;

inline uint8_t* score_row(float* scores, int64_t row) { return (uint8_t*)scores + row * kScoreBytes; }

// 2^x, a relative error of 7.5e-5 (a weight in bf16 has 3.9e-3); 0 at minus infinity.
inline F32 exp2_weight(F32 x) {
  __m512 part = _mm512_reduce_ps(x.v, 0x09);   // x - floor(x)
  F32 sum = set_f32(7.802452e-2f);
  sum = fma(sum, {part}, set_f32(0.22606716f));
  sum = fma(sum, {part}, set_f32(0.69583356f));
  sum = fma(sum, {part}, set_f32(0.9999252f));
  return {_mm512_scalef_ps(sum.v, x.v)};       // * 2^floor(x)
}

// 32 scores from `scores` on to 32 weights in bf16 at `weights`, which may overlap what has been read; sum += pairs of them.
inline void weigh(const float* scores, F32 factor, F32 base, uint8_t* weights, __m512& sum) {
  F32 first = exp2_weight(fma(load_f32(scores), factor, base)), second = exp2_weight(fma(load_f32(scores + 16), factor, base));
  __m512bh pair = _mm512_cvtne2ps_pbh(second.v, first.v);
  _mm512_storeu_si512(weights, (__m512i)pair);
  sum = _mm512_dpbf16_ps(sum, pair, (__m512bh)_mm512_set1_epi16(0x3F80));   // times 1
}

// Keys [begin, end) of a row, multiples of 64; of a key that it does not see the score is minus infinity. The maximum is that
// of score * factor, the sum that of the weights as they were rounded.
inline void softmax_row(float* scores, int64_t begin, int64_t end, float factor, float* maximum, float* sum) {
  F32 most[4] = {set_f32(-INFINITY), set_f32(-INFINITY), set_f32(-INFINITY), set_f32(-INFINITY)};
  for (int64_t key = begin; key < end; key += kKeyTile) {
    for (int i = 0; i < 4; ++i) most[i] = max(most[i], load_f32(scores + key + 16 * i));
  }
  *maximum = reduce_max(max(max(most[0], most[1]), max(most[2], most[3]))) * factor;
  F32 base = sub(zero_f32(), finite_or_zero(set_f32(*maximum)));
  __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t key = begin; key < end; key += kKeyTile) {
    weigh(scores + key, set_f32(factor), base, (uint8_t*)scores + 2 * key, sums[0]);
    weigh(scores + key + 32, set_f32(factor), base, (uint8_t*)scores + 2 * key + 64, sums[1]);
  }
  *sum = reduce_add(add(F32{sums[0]}, F32{sums[1]}));
}

inline void hide(float* scores, int64_t first, int64_t last) {   // keys first .. last - 1
  for (int64_t key = first; key < last; key = (key / 16 + 1) * 16) {
    __mmask16 lanes = __mmask16((1u << (smaller(last, key / 16 * 16 + 16) - key)) - 1);
    _mm512_mask_storeu_ps(scores + key, lanes, _mm512_set1_ps(-INFINITY));
  }
}

struct Range { int64_t low, high; };   // keys of the partition

// One item at work. Products derives from it and offers, for `rows` rows from `row` on and the keys [all.low, all.high):
//   begin_values()                  a partition begins
//   begin_block(rows)               a block of rows begins
//   score(row, rows, all)           scores_ of these rows with the tiles of 64 keys that hold any of them, softcap aside
//   add_values(row, rows, all, to)  to.rows = weights times values
//   add_values_alone(row, rows, to) the same, where each row must read nothing but what it sees
//   values_read(all)                the keys whose values add_values multiplies
template <class Products>
class BlockRun {
 public:
  BlockRun(const AttentionCall& call, const AttentionItem& item, float* scratch)
      : call_(call),
        item_(item),
        sequence_(call.sequences[item.sequence]),
        dim_(call.pages.shape.head_dim),
        value_dim_(kv_value_dim(call.pages.shape)),
        latent_(call.pages.shape.latent > 0),
        group_(item.num_heads),
        rows_(item.num_queries * group_),
        first_position_(sequence_.context_len - sequence_.num_queries + item.first_query),
        factor_(call.softcap != 0 || call.scale == 0 ? 1.0f : fabsf(call.scale) * kLog2E) {
    int64_t most = attention_max_rows(call.num_heads, call.pages.shape), lanes = (most + 15) / 16 * 16;
    auto take = [&scratch](int64_t floats) { float* p = scratch; scratch += floats; return p; };
    scores_ = take(kBlockRows * kScoreFloats);
    queries_ = (uint8_t*)take(most * dim_ / 2);
    values_ = (uint8_t*)take(kPartition * value_dim_ / 2);
    block_ = {take(kBlockRows), take(kBlockRows), take(kBlockRows * value_dim_), value_dim_};
    total_ = {take(lanes), take(lanes), take(most * value_dim_), value_dim_};
  }

  void run(float* partials) {
    load_queries();
    for (int64_t part = 0; part < item_.parts(); ++part) {
      begin_partition(item_.partition(part));
      for (int64_t row = 0; row < rows_; row += kBlockRows) run_block(part, row, smaller(kBlockRows, rows_ - row), partials);
    }
    if (item_.partial < 0) write_out();
  }

 protected:
  struct Softmax { float *maxima, *sums, *rows; int64_t stride; };   // rows [][stride]: not yet divided by the sum

  // What the token of a row sees.
  Range seen(int64_t row) const {
    int64_t position = first_position_ + row / group_ - start_;
    int64_t low = window_ ? larger(larger(position - window_ + 1, first_key_ - start_), 0) : 0;
    return {smaller(low, kPartition), between(smaller(position + 1, end_key_ - start_), 0, kPartition)};
  }

  // A query's sign takes that of the scale (0: all scores are 0), so that the largest score has the largest weight.
  void load_queries() {
    F32 sign = set_f32(call_.softcap != 0 ? 1.0f : call_.scale < 0 ? -1.0f : call_.scale == 0 ? 0.0f : 1.0f);
    for (int64_t r = 0; r < rows_; ++r) {
      const float* query = call_.queries + (sequence_.first_query + item_.first_query + r / group_) * call_.query_stride +
                           (item_.first_head + r % group_) * dim_;
      for (int64_t d = 0; d < dim_; d += 16) {
        __m256bh rounded = _mm512_cvtneps_pbh(mul(load_f32(query + d), sign).v);
        _mm256_storeu_si256((__m256i*)(queries_ + (r * dim_ + d) * 2), (__m256i)rounded);
      }
    }
  }

  void begin_partition(int64_t index) {
    const bool is_anchors = index < 0;
    start_ = larger(index, 0) * kPartition;
    window_ = is_anchors ? 0 : call_.sliding_window;
    first_key_ = is_anchors || !window_ ? 0 : call_.anchors;
    end_key_ = is_anchors ? call_.anchors : sequence_.context_len;
    item_range_ = {seen(0).low, seen(rows_ - 1).high};
    for (int64_t page = 0; page < kPartitionPages; ++page) {   // beside what is seen: any page that is there
      int64_t nearest = between(page, item_range_.low / kPageTokens, (item_range_.high - 1) / kPageTokens);
      PageHead head = page_head(call_.pages, sequence_.block_table[start_ / kPageTokens + nearest], item_.kv_head);
      key_pages_[page] = head.keys;
      value_pages_[page] = latent_ ? head.keys : head.values;
    }
    products().begin_values();
  }

  void run_block(int64_t part, int64_t row, int64_t rows, float* partials) {
    Range all = {seen(row).low, seen(row + rows - 1).high};
    if (all.low >= all.high) all = {0, 0};
    bool alone = part == 0;   // merged with nothing yet
    Softmax to = alone ? Softmax{total_.maxima + row, total_.sums + row, total_.rows + row * value_dim_, value_dim_} : block_;
    int64_t partial_floats = attention_partial_floats(call_.pages.shape);
    float* partial = nullptr;
    if (item_.partial >= 0) {
      partial = partials + (item_.partial + part * rows_ + row) * partial_floats;
      to = {block_.maxima, block_.sums, partial, partial_floats};
    }
    products().begin_block(rows);
    products().score(row, rows, all);
    if (call_.softcap != 0) cap(rows, tiles(all));
    weigh_rows(row, rows, all, to);
    if (spoilt(row, rows, products().values_read(all))) products().add_values_alone(row, rows, to);
    else products().add_values(row, rows, all, to);
    if (item_.partial >= 0) {
      for (int64_t r = 0; r < rows; ++r, partial += partial_floats) {
        partial[value_dim_] = to.maxima[r];
        partial[value_dim_ + 1] = to.sums[r];
      }
    } else if (!alone) {
      merge_block(row, rows);
    }
  }

  // Tiles of 64 keys that hold any of [low, high).
  static Range tiles(Range keys) {
    return keys.low < keys.high ? Range{keys.low / kKeyTile * kKeyTile, (keys.high + kKeyTile - 1) / kKeyTile * kKeyTile} : Range{0, 0};
  }

  // The pages of 64 keys, a tile before they are read. Their beginning is enough for the machine to go on by itself; to ask
  // for all of them takes the places that it would use.
  void ask_for(const uint8_t* const* pages, int64_t key, int64_t end) const {
    for (int64_t page = key / kPageTokens; page < (key + kKeyTile) / kPageTokens && page * kPageTokens < end; ++page) {
      for (int64_t byte = 0; byte < kAskedBytes; byte += 64) prefetch(pages[page] + byte);
    }
  }

  void cap(int64_t rows, Range keys) {
    F32 inside = set_f32(call_.scale / call_.softcap), outside = set_f32(call_.softcap * kLog2E);
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = (float*)score_row(scores_, r);
      for (int64_t key = keys.low; key < keys.high; key += 16) {
        store_f32(scores + key, mul(outside, tanh(mul(load_f32(scores + key), inside))));
      }
    }
  }

  void weigh_rows(int64_t row, int64_t rows, Range all, const Softmax& to) {
    Range keys = tiles(all);
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = (float*)score_row(scores_, r);
      Range mine = seen(row + r);
      hide(scores, keys.low, smaller(mine.low, keys.high));
      hide(scores, larger(mine.high, keys.low), keys.high);
      softmax_row(scores, keys.low, keys.high, factor_, to.maxima + r, to.sums + r);
    }
  }

  // Whether a value of the keys `read` that not all of the rows see is not finite.
  bool spoilt(int64_t row, int64_t rows, Range read) const {
    Range first = seen(row), last = seen(row + rows - 1);
    return not_finite(read.low, smaller(last.low, read.high)) || not_finite(larger(first.high, read.low), read.high);
  }

  bool not_finite(int64_t begin, int64_t end) const {   // by pairs, where values have pages of their own
    for (int64_t key = begin; key < end; key = (key / kPageTokens + 1) * kPageTokens) {
      int64_t page = key / kPageTokens, first = key % kPageTokens, last = smaller(end - page * kPageTokens, kPageTokens);
      if (latent_ ? any_key_not_finite(value_pages_[page], value_dim_, first, last)
                  : any_not_finite(value_pages_[page], dim_ * 4, first / 2, (last + 1) / 2)) return true;
    }
    return false;
  }

  void merge_block(int64_t row, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      float* maximum = total_.maxima + row + r;
      float* sum = total_.sums + row + r;
      MergeWeights weights = merge_weights(set_f32(*maximum), set_f32(block_.maxima[r]));
      float lanes[3][16];
      store_f32(lanes[0], weights.first);
      store_f32(lanes[1], weights.second);
      store_f32(lanes[2], merge_lanes(set_f32(*sum), weights.first, set_f32(block_.sums[r]), weights.second));
      *sum = lanes[2][0];
      merge_row(total_.rows + (row + r) * value_dim_, lanes[0][0], block_.rows + r * value_dim_, lanes[1][0], value_dim_);
      store_f32(lanes[0], weights.maximum);
      *maximum = lanes[0][0];
    }
  }

  void write_out() const {
    for (int64_t r = 0; r < rows_; ++r) {
      int64_t head = item_.first_head + r % group_;
      float* out = call_.out + (sequence_.first_query + item_.first_query + r / group_) * call_.out_stride + head * value_dim_;
      write_row(total_.rows + r * value_dim_, row_factor(call_, head, total_.maxima[r], total_.sums[r]), value_dim_, out);
    }
  }

  Products& products() { return static_cast<Products&>(*this); }

  const AttentionCall& call_;
  const AttentionItem& item_;
  const AttentionSequence& sequence_;
  const int64_t dim_, value_dim_;
  const bool latent_;
  const int64_t group_, rows_;   // group: heads of the item
  const int64_t first_position_;   // of the block's first token
  const float factor_;             // scores times this are in powers of two
  int64_t start_;                  // the partition's first key
  int64_t window_, first_key_, end_key_;   // its window, and the keys it is about
  Range item_range_;               // keys of the partition that any row sees
  const uint8_t *key_pages_[kPartitionPages], *value_pages_[kPartitionPages];   // of latent pages the same
  float* scores_;                  // [32][kScoreFloats]
  uint8_t *queries_, *values_;     // bf16 [rows][head_dim]; for the products, kPartition * kv_value_dim
  Softmax block_, total_;
};

// Run::serves(shape): whether pages are in its own layout.
template <class Run>
inline void run_pairs(const AttentionCall& call, const AttentionItem& item, float* scratch, float* partials) {
  if (!Run::serves(call.pages.shape)) return avx512::kKernels.attention->run(call, item, scratch, partials);
  Run(call, item, scratch).run(partials);
}

template <class Run>
inline void store_pairs(const KvPages& pages, int64_t kv_head, int64_t slot, const float* key, const float* value) {
  if (!Run::serves(pages.shape)) return avx512::kKernels.attention->store(pages, kv_head, slot, key, value);
  if (slot < 0) return;
  PageHead head = page_head(pages, slot / kPageTokens, kv_head);
  if (key) store_pair_key(pages.shape, head, slot % kPageTokens, key);
  if (value) store_pair_value(pages.shape, head, slot % kPageTokens, value);
}

template <class Run>
inline void load_pairs(const KvPages& pages, int64_t kv_head, int64_t slot, float* key, float* value) {
  if (!Run::serves(pages.shape)) return avx512::kKernels.attention->load(pages, kv_head, slot, key, value);
  load_pair_row(pages.shape, page_head(pages, slot / kPageTokens, kv_head), slot % kPageTokens, key, value);
}

template <class Run>
inline void move_pairs(const KvPages& pages, int64_t kv_head, int64_t source, int64_t target) {
  if (!Run::serves(pages.shape)) return avx512::kKernels.attention->move(pages, kv_head, source, target);
  const PageHead from = page_head(pages, source / kPageTokens, kv_head), to = page_head(pages, target / kPageTokens, kv_head);
  move_pair_row(pages.shape, from, source % kPageTokens, to, target % kPageTokens);
}

template <class Run>
inline void load_pair_keys(const KvPages& pages, int64_t page, int64_t kv_head, float* out) {
  if (!Run::serves(pages.shape)) return avx512::kKernels.attention->load_keys(pages, page, kv_head, out);
  unfold_pair_keys(pages.shape, page_head(pages, page, kv_head), out);
}

inline void vote_pairs(const VoteCall& call, const VoteItem& item, float* scratch, float* votes) {
  avx512::kKernels.attention->vote(call, item, scratch, votes);
}

// The partial rows are those of AVX-512, so that they are merged by its kernel.
inline void merge_pairs(const AttentionCall& call, const AttentionMerge& merge, const float* partials) {
  avx512::kKernels.attention->merge(call, merge, partials);
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl
