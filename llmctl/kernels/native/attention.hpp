// Attention over paged keys and values: the pages, what a batch is, how its work is divided.
//
// A page holds 16 tokens of one layer: [kv head][key part | value part], each part a multiple of 64 bytes.
//   keys    transposed, [head_dim][16 tokens]: 16 keys are 16 lanes
//   values  [16 tokens][head_dim padded to 16, the padding 0]
//   Q8_0, Q5_1, Q4_0   blocks of 32 columns of a token's head (attention_elements.inl.hpp) behind their f16 scales:
//           keys f16[1 or 2][blocks][16 tokens], bytes [blocks][32 or 16][16 tokens], fifth bits [blocks][4][16 tokens]
//           values f16[1 or 2][16 tokens][blocks], bytes [16 tokens][blocks][32 or 16], fifth bits [16 tokens][blocks][4]
//   Q4_0    keeps rows that were rotated; queries and results are rotated as well
//   latent  keys alone: the values are their first `latent` columns (DeepSeek-V2's compressed cache)
// The kernels "avx512bf16" and "amx" keep BF16 in another order and as many bytes, see attention_bf16_pages.inl.hpp.
//
// Row invariance: keys are cut into partitions of 512 and tiles of 64 at absolute positions. A partition has an online softmax
// of its own over its tiles, in order; partitions are merged in order, by one formula. Everything that is summed for a
// query (along head_dim, along keys) is one chain in index order over the keys this query sees and no others. So its result
// has the same bits in decode, in a prefill of any chunking, beside any other queries and for any number of threads.
// Anchors, the first tokens that are seen beside a window, are a partition of their own before the others, which leave them out.
// A slot that no visible token was stored to is never part of a product that is kept: pages may hold anything there.
#pragma once

#include <cstdint>
#include <vector>

namespace llmctl {

enum class KvType : int32_t { F32, F16, BF16, FP8, Q8_0, Q5_1, Q4_0 };

constexpr int64_t kPageTokens = 16;
constexpr int64_t kKeyTile = 64;
constexpr int64_t kPartition = 512;
constexpr int64_t kMaxHeadDim = 576;   // head_dim is a multiple of 8

struct KvShape {
  KvType key_type;
  KvType value_type;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t latent = 0;   // > 0: no values are kept, they are so many of the keys' columns
  bool rotates = true;  // Q4_0
};

// One layer's pages: page p begins at data + p * page_stride. `data` and the stride are multiples of 64.
struct KvPages {
  KvShape shape;
  uint8_t* data;
  int64_t page_stride;
};

// Internal linkage: a copy compiled for one instruction set must not serve the others.
static inline int64_t padded_head_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
static inline int64_t kv_value_dim(const KvShape& shape) { return shape.latent ? shape.latent : shape.head_dim; }
static inline int64_t kv_blocks(int64_t head_dim) { return (head_dim + 31) / 32; }
static inline bool kv_is_block(KvType type) { return type >= KvType::Q8_0; }
static inline int64_t kv_scale_bytes(KvType type, int64_t head_dim) {   // of a page's head, one side
  return kv_is_block(type) ? kv_blocks(head_dim) * kPageTokens * (type == KvType::Q5_1 ? 4 : 2) : 0;
}
static inline int64_t kv_code_bytes(KvType type, int64_t columns) {
  switch (type) {
    case KvType::F32: return 4 * columns * kPageTokens;
    case KvType::F16: case KvType::BF16: return 2 * columns * kPageTokens;
    case KvType::FP8: return columns * kPageTokens;
    case KvType::Q8_0: return 32 * kv_blocks(columns) * kPageTokens;
    case KvType::Q5_1: return 20 * kv_blocks(columns) * kPageTokens;
    case KvType::Q4_0: return 16 * kv_blocks(columns) * kPageTokens;
  }
  return 0;
}
static inline int64_t kv_part_bytes(KvType type, int64_t columns) {
  return (kv_scale_bytes(type, columns) + kv_code_bytes(type, columns) + 63) / 64 * 64;
}
static inline int64_t kv_key_bytes(const KvShape& shape) { return kv_part_bytes(shape.key_type, shape.head_dim); }
static inline int64_t kv_head_bytes(const KvShape& shape) {
  return kv_key_bytes(shape) + (shape.latent ? 0 : kv_part_bytes(shape.value_type, padded_head_dim(shape.head_dim)));
}

// Numbers that are rotated together, 0 where rows are kept as they are: 32, or the largest power of two that divides a row, and
// of latent pages its values as well. More would carry an outlier into blocks that have none.
static inline int64_t kv_rotation(int64_t sizes) { return (sizes & -sizes) < 32 ? sizes & -sizes : 32; }
static inline int64_t kv_key_rotation(const KvShape& shape) {
  int64_t sizes = shape.head_dim | shape.latent;
  return shape.rotates && shape.key_type == KvType::Q4_0 ? kv_rotation(sizes) : 0;
}
static inline int64_t kv_value_rotation(const KvShape& shape) {
  if (shape.latent) return kv_key_rotation(shape);
  return shape.rotates && shape.value_type == KvType::Q4_0 ? kv_rotation(shape.head_dim) : 0;
}
static inline int64_t kv_page_bytes(const KvShape& shape) { return shape.kv_heads * kv_head_bytes(shape); }

// num_queries consecutive tokens of a sequence, the last one at position context_len - 1; all keys below context_len are
// stored. Token i of it reads row first_query + i of the queries. The table holds ceil(context_len / 16) pages.
struct AttentionSequence {
  int64_t first_query;
  int64_t num_queries;
  int64_t context_len;
  const int64_t* block_table;
};

// Query head h reads kv head h / (num_heads / kv_heads).
struct AttentionCall {
  KvPages pages;
  const AttentionSequence* sequences;
  int64_t num_heads;
  float scale;              // on the scores
  float softcap;            // scores become softcap * tanh(scores / softcap); 0: as they are
  int64_t sliding_window;   // a query at p sees p - window + 1 .. p; 0: all up to p
  const float* queries;     // [tokens][num_heads][head_dim], tokens query_stride apart
  int64_t query_stride;
  float* out;               // [tokens][num_heads][kv_value_dim], tokens out_stride apart
  int64_t out_stride;
  const float* sinks = nullptr;   // [num_heads]: one more score for every query of a head, whose value is 0; null: none
  int64_t anchors = 0;            // so many first tokens, at most a page, are seen beside the window
};

// A block of queries of one sequence in query heads that share a kv head, over partitions first .. last - 1 of its keys, and
// before them the anchors.
struct AttentionItem {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_head;       // of the query heads
  int32_t num_heads;
  int64_t first_query;      // within the sequence
  int64_t num_queries;
  int64_t first_partition;
  int64_t last_partition;
  int64_t partial;          // first partial row to write (one a query and head); -1: writes `out`
  bool anchors;

  int64_t parts() const { return last_partition - first_partition + anchors; }
  // The partition that part `i` is; -1: the anchors.
  int64_t partition(int64_t i) const { return anchors && i == 0 ? -1 : first_partition + i - anchors; }
};

struct AttentionKernels;

// One query head whose partitions were computed by several items: partial rows partial, partial + stride, ...
struct AttentionMerge {
  int32_t sequence;
  int32_t head;
  int64_t query;
  int64_t partial;
  int64_t stride;
  int64_t count;
};

// The weights that the last queries of a sequence give to its tokens. Query head h reads kv head h / (num_heads / kv_heads).
struct VoteCall {
  KvPages pages;
  const int64_t* block_table;
  int64_t length;           // tokens
  int64_t num_queries;      // the last of them
  int64_t num_heads;
  const float* queries;     // [num_queries][num_heads][head_dim]
  float scale, softcap;     // as in AttentionCall
  const float* sinks;
  const AttentionKernels* kernels;   // whose layout the pages have
};

// Rows (query x head of the group) first .. first + count - 1 of one kv head.
struct VoteItem { int64_t kv_head, first, count; };

constexpr int64_t kVoteRows = 96;

// Floats of an item's scratch, 64-byte aligned.
static inline int64_t vote_scratch_floats(const KvShape& shape, int64_t length) {
  return kVoteRows * ((length + kKeyTile - 1) / kKeyTile * kKeyTile + 2 * padded_head_dim(shape.head_dim)) +
         kKeyTile * shape.head_dim;
}

struct AttentionKernels {
  // One token's key and value [head_dim] of one kv head, rounded to nearest even; slot = page * 16 + offset, -1: nothing.
  // key or value may be null: the other is stored alone. Latent pages take no values.
  void (*store)(const KvPages& pages, int64_t kv_head, int64_t slot, const float* key, const float* value);
  // The same, read back.
  void (*load)(const KvPages& pages, int64_t kv_head, int64_t slot, float* key, float* value);
  // Any number of threads at once, each with its own scratch.
  void (*run)(const AttentionCall& call, const AttentionItem& item, float* scratch, float* partials);
  // After all items: independent of each other as well.
  void (*merge)(const AttentionCall& call, const AttentionMerge& merge, const float* partials);
  // A token's key and value of one kv head as they are stored, bit for bit, to another slot.
  void (*move)(const KvPages& pages, int64_t kv_head, int64_t source, int64_t target);
  // The keys of a page's 16 tokens: out[d * kKeyTile + token], rotated where the pages are.
  void (*load_keys)(const KvPages& pages, int64_t page, int64_t kv_head, float* out);
  // attention_votes.inl.hpp.
  void (*vote)(const VoteCall& call, const VoteItem& item, float* scratch, float* votes);
};

// attention_bf16.inl.hpp: rows at a time, and what one row of scores takes, padded so that rows do not share cache sets.
constexpr int64_t kBlockRows = 32;
constexpr int64_t kScoreFloats = kPartition + 16;

// Query rows (tokens x heads) an item holds at most.
static inline int64_t attention_max_rows(int64_t num_heads, const KvShape& shape) {
  int64_t rows = shape.head_dim <= 256 ? 192 : 96, group = num_heads / shape.kv_heads;
  return rows < group ? group : rows;
}

// Floats of one partial row: kv_value_dim padded, then the maximum and the sum.
static inline int64_t attention_partial_floats(const KvShape& shape) { return padded_head_dim(kv_value_dim(shape)) + 16; }

// Floats of one thread's scratch, 64-byte aligned.
static inline int64_t attention_scratch_floats(int64_t num_heads, const KvShape& shape) {
  int64_t rows = attention_max_rows(num_heads, shape), lanes = (rows + 15) / 16 * 16, width = padded_head_dim(shape.head_dim);
  int64_t floats = rows * (3 * width + kKeyTile + 16) + kKeyTile * (shape.head_dim + width) + 6 * lanes;
  if (shape.key_type != KvType::BF16 || shape.value_type != KvType::BF16) return floats;
  int64_t tiles = kBlockRows * (kScoreFloats + width + 2) + (rows + kPartition) * width / 2 + rows * width + 2 * lanes;
  return floats < tiles ? tiles : floats;   // the latter for attention_bf16.inl.hpp
}

// The work of one step, the same for all layers of one shape and window; kept and filled anew, so that it stops allocating.
struct AttentionPlan {
  std::vector<AttentionItem> items;      // the longest first
  std::vector<AttentionMerge> merges;    // after all items
  int64_t partial_rows = 0;
};

// Sequences of at most kSplitQueries queries are divided by partitions of their keys too, where there are threads to spare.
// How the work is divided never changes a bit of the result.
constexpr int64_t kSplitQueries = 8;
void plan_attention(const AttentionSequence* sequences, int64_t num_sequences, int64_t num_heads, const KvShape& shape,
                    int64_t sliding_window, int64_t anchors, int64_t threads, AttentionPlan& plan);

// Partial rows no plan exceeds whose contexts are at most `max_context` long.
int64_t attention_max_partial_rows(int64_t max_context, int64_t num_heads, const KvShape& shape, int64_t threads);

}  // namespace llmctl
