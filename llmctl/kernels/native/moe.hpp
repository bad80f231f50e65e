// Mixture of experts over the table of kernels: routing, and the products of every token with its own experts.
//
// Tokens are sorted by expert, so that an expert's matrices are read once for all of its tokens; with one token this is a
// matrix-vector product a chosen expert. Rows of the experts' matrices are shared out among the workers. What is computed for
// a token depends neither on the others nor on the number of workers: its experts' results are added in the order of choice.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

#include "aligned.hpp"
#include "kernels.hpp"
#include "quantized_rows.hpp"
#include "thread_pool.hpp"

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

class Moe {
 public:
  // int8: activations of quantized weights are rounded to int8. counts: null, or [experts] to which every run adds the tokens
  // that each of them had.
  Moe(const Kernels* kernels, Routing routing, ExpertMatrices gate, ExpertMatrices up, ExpertMatrices down,
      Activation activation, bool int8, int64_t* counts = nullptr);

  // x, y float32 [tokens][hidden]; logits [tokens][num_experts]. Before every run, on the calling thread: std::bad_alloc.
  void prepare(int workers, int64_t tokens, const float* x, const float* logits, float* y);
  // On all workers of the pool.
  void run(ThreadPool& pool, int worker);

  int64_t hidden() const { return down_[0].rows; }
  int64_t num_experts() const { return static_cast<int64_t>(gate_.matrices.size()); }

 private:
  // Some rows of the sorted list, all of one expert, times some tiles of its matrices.
  struct Item {
    int64_t expert, first_row, rows, first_tile, last_tile;
  };
  // Rows of activations in the forms that the matrices reading them need.
  struct Rows {
    bool as_codes = false, as_floats = false;
    QuantizedRows codes;
    AlignedArray<float> floats;
  };
  struct Worker {
    Router router;
    AlignedArray<float> up;
  };

  void reserve(Rows& rows, int64_t count, int64_t columns);
  Activations activations(const Rows& rows, const PackedMatrix& matrix, const Item& item) const;
  bool takes_codes(const PackedMatrix& matrix) const;

  void route_tokens(Worker& worker);
  void sort_by_expert();
  void list_items(std::vector<Item>& items, int64_t tiles) const;
  void gather_inputs();
  void compute_hidden(Worker& worker);
  void quantize_hidden();
  void compute_down();
  void combine();
  template <class Body>
  void share(int stage, int64_t count, int64_t step, Body body);

  const Kernels* kernels_;
  ExpertMatrices gate_, up_, down_;
  Activation activation_;
  bool int8_;
  int64_t* counts_;
  int64_t top_k_;
  std::vector<Worker> workers_;

  int64_t tokens_ = 0;
  const float* x_ = nullptr;
  const float* logits_ = nullptr;
  float* y_ = nullptr;
  AlignedArray<int32_t> experts_;     // [tokens][top_k]
  AlignedArray<float> weights_;       // [tokens][top_k]
  std::vector<int64_t> first_;        // [num_experts + 1]: where an expert's rows begin in the sorted list
  AlignedArray<int64_t> token_of_;    // [rows]
  AlignedArray<int64_t> row_of_;      // [tokens][top_k]
  Rows inputs_, hidden_;
  AlignedArray<float> outputs_;       // [rows][hidden]
  std::vector<Item> hidden_items_, down_items_;
  std::atomic<int64_t> next_[6];      // of every stage that is shared out
};

}  // namespace llmctl
