// How the attention of a batch is divided into items.
#include "attention.hpp"

#include <algorithm>

namespace llmctl {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kItemsPerThread = 4;   // enough to even out blocks of unequal length
constexpr int64_t kFewestRows = 24;      // below, loading a tile costs more than using it
constexpr int64_t kFewestHeads = 8;      // the same for the heads that share a kv head

class Planner {
 public:
  Planner(const AttentionSequence* sequences, int64_t num_sequences, int64_t num_heads, const KvShape& shape, int64_t window,
          int64_t anchors, int64_t threads, AttentionPlan& plan)
      : sequences_(sequences), num_sequences_(num_sequences), kv_heads_(shape.kv_heads), group_(num_heads / shape.kv_heads),
        max_rows_(attention_max_rows(num_heads, shape)), window_(window), anchors_(window ? anchors : 0), threads_(threads), plan_(plan) {}

  void run() {
    plan_.items.clear();
    plan_.merges.clear();
    plan_.partial_rows = 0;
    int64_t tokens = block_tokens();
    parts_ = head_parts(tokens);
    bool split = num_sequences_ * kv_heads_ < kItemsPerThread * threads_;
    for (int64_t s = 0; s < num_sequences_; ++s) {
      const AttentionSequence& sequence = sequences_[s];
      for (int64_t query = 0; query < sequence.num_queries; query += tokens) {
        add_block(s, query, std::min(tokens, sequence.num_queries - query), split && sequence.num_queries <= kSplitQueries);
      }
    }
    std::sort(plan_.items.begin(), plan_.items.end(), [](const AttentionItem& a, const AttentionItem& b) {
      return a.parts() * a.num_queries * a.num_heads > b.parts() * b.num_queries * b.num_heads;
    });
  }

 private:
  // Tokens of a query block: as many as an item may hold, fewer while threads would be idle.
  int64_t block_tokens() const {
    int64_t tokens = std::max<int64_t>(1, max_rows_ / group_);
    while (tokens * group_ >= 2 * kFewestRows && tokens > 1 && count_blocks(tokens) * kv_heads_ < kItemsPerThread * threads_) {
      tokens = ceil_div(tokens, 2);
    }
    return tokens;
  }

  // Items that the heads of a group are divided into while threads would be idle.
  int64_t head_parts(int64_t tokens) const {
    int64_t blocks = std::max<int64_t>(1, count_blocks(tokens)) * kv_heads_;
    return std::clamp<int64_t>(ceil_div(threads_, blocks), 1, std::max<int64_t>(1, group_ / kFewestHeads));
  }

  int64_t count_blocks(int64_t tokens) const {
    int64_t blocks = 0;
    for (int64_t s = 0; s < num_sequences_; ++s) blocks += ceil_div(sequences_[s].num_queries, tokens);
    return blocks;
  }

  void add_block(int64_t s, int64_t query, int64_t tokens, bool split) {
    int64_t position = sequences_[s].context_len - sequences_[s].num_queries + query;
    int64_t first = window_ ? std::max<int64_t>(0, position - window_ + 1) / kPartition : 0;
    int64_t last = ceil_div(position + tokens, kPartition);
    for (int64_t part = 0; part < kv_heads_ * parts_; ++part) {
      int64_t head = part / parts_, begin = group_ * (part % parts_) / parts_, end = group_ * (part % parts_ + 1) / parts_;
      AttentionItem item = {int32_t(s), int32_t(head), int32_t(head * group_ + begin), int32_t(end - begin), query, tokens,
                            first, last, -1, anchors_ > 0};
      if (split && item.parts() > 1) {
        add_split(item);
      } else {
        plan_.items.push_back(item);
      }
    }
  }

  void add_split(const AttentionItem& item) {
    int64_t rows = item.num_queries * item.num_heads, count = item.parts();
    for (int64_t row = 0; row < rows; ++row) {
      int32_t head = int32_t(item.first_head + row % item.num_heads);
      plan_.merges.push_back({item.sequence, head, item.first_query + row / item.num_heads, plan_.partial_rows + row, rows, count});
    }
    for (int64_t part = 0; part < count; ++part) {
      AttentionItem one = item;
      one.anchors = item.partition(part) < 0;
      one.first_partition = one.anchors ? 0 : item.partition(part);
      one.last_partition = one.anchors ? 0 : one.first_partition + 1;
      one.partial = plan_.partial_rows;
      plan_.items.push_back(one);
      plan_.partial_rows += rows;
    }
  }

  const AttentionSequence* sequences_;
  int64_t num_sequences_, kv_heads_, group_, max_rows_, window_, anchors_, threads_, parts_ = 1;
  AttentionPlan& plan_;
};

}  // namespace

void plan_attention(const AttentionSequence* sequences, int64_t num_sequences, int64_t num_heads, const KvShape& shape,
                    int64_t sliding_window, int64_t anchors, int64_t threads, AttentionPlan& plan) {
  Planner(sequences, num_sequences, num_heads, shape, sliding_window, anchors, threads, plan).run();
}

int64_t attention_max_partial_rows(int64_t max_context, int64_t num_heads, const KvShape& shape, int64_t threads) {
  int64_t sequences = (kItemsPerThread * threads - 1) / shape.kv_heads;
  return sequences * kSplitQueries * num_heads * (ceil_div(max_context, kPartition) + 1);
}

}  // namespace llmctl
