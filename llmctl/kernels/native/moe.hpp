// Mixture of experts over the table of kernels: routing, and the products of every token with its own experts.
//
// Tokens are sorted by expert, so that an expert's matrices are read once for all of its tokens. Rows of the experts' matrices
// are shared out among the workers. With few tokens every worker routes, sorts and rounds for itself, and what the experts give
// is added up where it was computed: workers meet twice. With many tokens these steps are shared out, too. Both give the same
// bits, and what is computed for a token depends neither on the others nor on the number of workers: its experts' results are
// added in the order of choice.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "aligned.hpp"
#include "kernels.hpp"
#include "quantized_rows.hpp"
#include "thread_pool.hpp"
#include "work_queue.hpp"

namespace llmctl {

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// As the Python class of this name says.
struct Routing {
  Routing(int64_t num_experts, int64_t top_k, bool renormalize, bool sigmoid, std::vector<float> bias, int64_t num_groups,
          int64_t top_groups, bool group_by_top2, float scale);   // std::invalid_argument where they contradict each other

  int64_t num_experts;
  int64_t top_k;
  bool renormalize;
  bool sigmoid;
  std::vector<float> bias;   // empty: none
  int64_t num_groups;
  int64_t top_groups;
  bool group_by_top2;
  float scale;
};

// One token: logits [num_experts] to experts [top_k], best first, and weights [top_k].
class Router {
 public:
  explicit Router(Routing routing);
  const Routing& routing() const { return routing_; }
  void route(const float* logits, int32_t* experts, float* weights);

 private:
  void score(const float* logits);
  void forbid_groups();

  Routing routing_;
  std::vector<float> scores_, worth_;
};

// One matrix an expert, and where there is one a bias [experts][rows].
struct ExpertMatrices {
  std::vector<PackedMatrix> matrices;
  const float* bias = nullptr;

  const PackedMatrix& operator[](int64_t expert) const { return matrices[expert]; }
  const float* bias_of(int64_t expert) const { return bias ? bias + expert * matrices[0].rows : nullptr; }
};

// What all tokens pass besides: the second matrix of an MLP whose gated activation is computed already. None where down.rows is 0.
struct SharedExpert {
  PackedMatrix down{};
  const float* bias = nullptr;

  bool exists() const { return down.rows != 0; }
};

// One call. y = residual + (the experts' weighted sum + sigmoid(shared_gate) * down(shared)); the pointers of what there is none
// of are null.
struct MoeInput {
  int64_t tokens;
  const float* x;             // [tokens][hidden]
  const float* logits;        // [tokens][num_experts]
  const float* shared;        // [tokens][shared.down.columns]
  const float* shared_gate;   // [tokens]
  const float* residual;      // [tokens][hidden]
  float* y;                   // [tokens][hidden]
};

// Memory that layers share, one after the other.
struct MoeScratch {
  // Who is chosen for what, and the rows that tokens become once they are sorted by expert.
  struct Assignment {
    AlignedArray<int32_t> experts;    // [tokens][top_k]
    AlignedArray<float> weights;      // [tokens][top_k]
    AlignedArray<int64_t> row_of;     // [tokens][top_k]
    AlignedArray<int64_t> choice_of;  // [rows]: token * top_k + rank
    std::vector<int64_t> first;       // [num_experts + 1]: where an expert's rows begin
    std::vector<int64_t> next;
  };
  // Some rows of the sorted list, all of one expert (-1: tokens, of the shared one), times some tiles of its matrices.
  struct Item {
    int64_t expert, first_row, rows, first_tile, last_tile;
  };
  // Rows of activations in the forms that the matrices reading them need.
  struct Rows {
    QuantizedRows codes;
    AlignedArray<float> floats;
  };
  struct Worker {
    Assignment assignment;
    std::vector<Item> items;
    QuantizedRows inputs, hidden, shared;
    AlignedArray<float> up, outputs;
    std::vector<float*> of_token;   // [top_k]
  };

  int64_t bytes() const;

  Assignment assignment;
  Rows inputs, hidden;
  QuantizedRows shared;
  AlignedArray<float> outputs;        // [rows][hidden]
  std::vector<Item> hidden_items, down_items;
  std::vector<Worker> workers;
};

class Moe {
 public:
  // int8: activations of quantized weights are rounded to int8. counts: null, or [experts] to which every run adds the tokens
  // that each of them had.
  Moe(const Kernels* kernels, Routing routing, ExpertMatrices gate, ExpertMatrices up, ExpertMatrices down,
      SharedExpert shared, Activation activation, bool int8, int64_t* counts = nullptr);

  // Before every run, on the calling thread: std::bad_alloc.
  void prepare(MoeScratch& scratch, int workers, const MoeInput& input);
  // On all workers of the pool. poll: called between pieces of work where there is much of it; what it throws ends the run.
  void run(ThreadPool& pool, int worker, const std::function<void()>& poll = {});

  int64_t hidden() const { return down_[0].rows; }
  int64_t num_experts() const { return static_cast<int64_t>(gate_.matrices.size()); }
  int64_t shared_size() const { return shared_.down.columns; }

 private:
  using Assignment = MoeScratch::Assignment;
  using Item = MoeScratch::Item;

  int64_t intermediate() const { return down_[0].columns; }
  bool takes_codes(const PackedMatrix& matrix) const { return int8_ && !is_plain(matrix.layout); }
  Activations rows_of(const QuantizedRows& codes, const float* floats, const PackedMatrix& matrix, int64_t first,
                      int64_t rows) const;

  void reserve(Assignment& assignment, int64_t rows) const;
  void reserve_few(int workers, int64_t rows);
  void reserve_many(int workers, int64_t rows);
  void route(Router& router, Assignment& assignment, int64_t token) const;
  void sort_by_expert(Assignment& assignment) const;
  void count_tokens(const Assignment& assignment);
  void list_items(const Assignment& assignment, std::vector<Item>& items, int64_t tiles, int64_t workers) const;
  // next: the weights that the same worker reads afterwards, or null.
  void compute_hidden(const Item& item, const QuantizedRows& inputs, const float* floats, float* up, const uint8_t* next);
  void compute_down(const Item& item, const QuantizedRows& hidden, float* y, int64_t stride, const uint8_t* next) const;
  void compute_shared(const Item& item, const QuantizedRows& codes, float* y, int64_t stride, const uint8_t* next) const;
  void combine(const Assignment& assignment, int64_t token, float* const* rows, float* shared, int64_t column,
               int64_t width) const;

  void run_few(ThreadPool& pool, int worker);
  void few_hidden(MoeScratch::Worker& mine, int worker);
  void few_down(MoeScratch::Worker& mine, int worker);
  void few_outputs(MoeScratch::Worker& mine, int64_t first_tile, int64_t last_tile, bool is_last);
  const PackedMatrix& down_from(const Assignment& assignment, int64_t expert) const;

  void run_many(ThreadPool& pool, int worker, const std::function<void()>& poll);
  void list_shared_items(std::vector<Item>& items) const;
  void gather(int64_t token);
  void compute_output(const Item& item) const;
  void combine_token(int worker, int64_t token);
  template <class Body>
  void share(int stage, int64_t count, int64_t step, const std::function<void()>& poll, Body body);

  const Kernels* kernels_;
  Routing routing_;
  ExpertMatrices gate_, up_, down_;
  SharedExpert shared_;
  Activation activation_;
  bool int8_;
  int64_t* counts_;
  int64_t top_k_;
  bool inputs_as_codes_ = false, inputs_as_floats_ = false, hidden_as_codes_ = false;
  std::vector<Router> routers_;   // one a worker

  MoeInput input_{};
  MoeScratch* scratch_ = nullptr;
  bool few_ = false;
  WorkQueue hidden_queue_, down_queue_;   // of few tokens
  std::atomic<int64_t> next_[7];          // of every stage that is shared out, of many
};

}  // namespace llmctl
