#include "moe.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace llmctl {
namespace {

constexpr int64_t kRowsPerItem = 256;        // tokens of one expert that share a piece of work
constexpr int64_t kManyRows = 8;             // from here on a tile is work enough for small pieces
constexpr int64_t kManyRowsTiles = 4;
constexpr int64_t kPiecesPerWorker = 4;
constexpr float kForbidden = -std::numeric_limits<float>::infinity();

enum Stage { kRoute, kGather, kHidden, kQuantize, kDown, kCombine };

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// The place of the largest number, of equal ones the first.
int64_t argmax(const float* values, int64_t count) { return std::max_element(values, values + count) - values; }

float sum_of_two_best(const float* values, int64_t count) {
  float best = kForbidden, second = kForbidden;
  for (int64_t i = 0; i < count; i++) {
    second = std::max(second, std::min(best, values[i]));
    best = std::max(best, values[i]);
  }
  return best + second;
}

}  // namespace

Routing::Routing(int64_t num_experts, int64_t top_k, bool renormalize, bool sigmoid, std::vector<float> bias,
                 int64_t num_groups, int64_t top_groups, bool group_by_top2, float scale)
    : num_experts(num_experts), top_k(top_k), renormalize(renormalize), sigmoid(sigmoid), bias(std::move(bias)),
      num_groups(num_groups), top_groups(top_groups), group_by_top2(group_by_top2), scale(scale) {
  check(num_experts >= 1 && num_groups >= 1 && num_experts % num_groups == 0, "the experts do not split into so many groups");
  check(top_groups >= 1 && top_groups <= num_groups, "so many groups cannot be chosen");
  check(top_k >= 1 && top_k <= num_experts / num_groups * top_groups, "so many experts cannot be chosen");
  check(this->bias.empty() || static_cast<int64_t>(this->bias.size()) == num_experts, "one bias an expert is needed");
}

Router::Router(Routing routing)
    : routing_(std::move(routing)), scores_(routing_.num_experts), worth_(routing_.num_experts) {}

void Router::score(const float* logits) {
  const int64_t count = routing_.num_experts;
  if (routing_.sigmoid) {
    for (int64_t e = 0; e < count; e++) scores_[e] = llmctl::sigmoid(logits[e]);
    return;
  }
  const float largest = logits[argmax(logits, count)];
  float sum = 0.0f;
  for (int64_t e = 0; e < count; e++) sum += scores_[e] = std::exp(logits[e] - largest);
  for (float& score : scores_) score /= sum;
}

void Router::forbid_groups() {
  const int64_t size = routing_.num_experts / routing_.num_groups;
  std::vector<float> groups(routing_.num_groups);
  for (int64_t g = 0; g < routing_.num_groups; g++) {
    const float* worth = worth_.data() + g * size;
    groups[g] = routing_.group_by_top2 ? sum_of_two_best(worth, size) : worth[argmax(worth, size)];
  }
  std::vector<bool> allowed(routing_.num_groups);
  for (int64_t i = 0; i < routing_.top_groups; i++) {
    const int64_t best = argmax(groups.data(), routing_.num_groups);
    allowed[best] = true;
    groups[best] = kForbidden;
  }
  for (int64_t e = 0; e < routing_.num_experts; e++)
    if (!allowed[e / size]) worth_[e] = kForbidden;
}

void Router::route(const float* logits, int32_t* experts, float* weights) {
  score(logits);
  worth_ = scores_;
  for (size_t e = 0; e < routing_.bias.size(); e++) worth_[e] += routing_.bias[e];
  if (routing_.num_groups > 1) forbid_groups();
  float sum = 0.0f;
  for (int64_t k = 0; k < routing_.top_k; k++) {
    const int64_t best = argmax(worth_.data(), routing_.num_experts);
    experts[k] = static_cast<int32_t>(best);
    weights[k] = scores_[best];
    sum += scores_[best];
    worth_[best] = kForbidden;
  }
  for (int64_t k = 0; k < routing_.top_k; k++) {
    if (routing_.renormalize) weights[k] /= sum;
    weights[k] *= routing_.scale;
  }
}

Moe::Moe(const Kernels* kernels, Routing routing, ExpertMatrices gate, ExpertMatrices up, ExpertMatrices down,
         Activation activation, bool int8, int64_t* counts)
    : kernels_(kernels), gate_(std::move(gate)), up_(std::move(up)), down_(std::move(down)), activation_(activation),
      int8_(int8), counts_(counts), top_k_(routing.top_k) {
  const auto experts = static_cast<size_t>(routing.num_experts);
  for (const ExpertMatrices* part : {&gate_, &up_, &down_})
    check(part->matrices.size() == experts, "one matrix an expert is needed");
  for (size_t e = 0; e < experts; e++) {
    check(gate_[e].columns == hidden() && up_[e].columns == hidden() && down_[e].rows == hidden(),
          "the experts' matrices are not of one hidden size");
    check(gate_[e].rows == down_[0].columns && up_[e].rows == down_[0].columns && down_[e].columns == down_[0].columns,
          "the experts' matrices are not of one intermediate size");
    for (const PackedMatrix* matrix : {&gate_[e], &up_[e]}) {
      (takes_codes(*matrix) ? inputs_.as_codes : inputs_.as_floats) = true;
    }
    (takes_codes(down_[e]) ? hidden_.as_codes : hidden_.as_floats) = true;
  }
  hidden_.as_floats = true;   // what the gated activation writes
  workers_.push_back({Router(std::move(routing)), {}});
  first_.resize(experts + 1);
}

bool Moe::takes_codes(const PackedMatrix& matrix) const { return int8_ && !is_plain(matrix.layout); }

void Moe::reserve(Rows& rows, int64_t count, int64_t columns) {
  if (rows.as_codes) rows.codes.reserve(count, columns);
  if (rows.as_floats) rows.floats.reserve(count * columns);
}

void Moe::prepare(int workers, int64_t tokens, const float* x, const float* logits, float* y) {
  tokens_ = tokens;
  x_ = x;
  logits_ = logits;
  y_ = y;
  const int64_t rows = tokens * top_k_;
  while (static_cast<int>(workers_.size()) < workers) workers_.push_back({Router(workers_[0].router.routing()), {}});
  for (Worker& worker : workers_) worker.up.reserve(std::min(rows, kRowsPerItem) * down_[0].columns);
  experts_.reserve(rows);
  weights_.reserve(rows);
  token_of_.reserve(rows);
  row_of_.reserve(rows);
  reserve(inputs_, rows, hidden());
  reserve(hidden_, rows, down_[0].columns);
  outputs_.reserve(rows * hidden());
  for (auto& next : next_) next.store(0, std::memory_order_relaxed);
}

void Moe::run(ThreadPool& pool, int worker) {
  Worker& mine = workers_[worker];
  route_tokens(mine);
  pool.barrier();
  if (worker == 0) sort_by_expert();
  pool.barrier();
  gather_inputs();
  pool.barrier();
  compute_hidden(mine);
  pool.barrier();
  if (hidden_.as_codes) {
    quantize_hidden();
    pool.barrier();
  }
  compute_down();
  pool.barrier();
  combine();
  pool.barrier();
}

// body(i) for all i below count, by whichever worker is free, `step` at a time.
template <class Body>
void Moe::share(int stage, int64_t count, int64_t step, Body body) {
  for (int64_t first; (first = next_[stage].fetch_add(step)) < count;)
    for (int64_t i = first; i < std::min(first + step, count); i++) body(i);
}

void Moe::route_tokens(Worker& worker) {
  share(kRoute, tokens_, 4, [&](int64_t t) {
    worker.router.route(logits_ + t * num_experts(), experts_.get() + t * top_k_, weights_.get() + t * top_k_);
  });
}

void Moe::sort_by_expert() {
  const int64_t rows = tokens_ * top_k_;
  const int32_t* experts = experts_.get();
  std::fill(first_.begin(), first_.end(), 0);
  for (int64_t i = 0; i < rows; i++) first_[experts[i] + 1]++;
  for (int64_t e = 0; counts_ && e < num_experts(); e++) counts_[e] += first_[e + 1];
  for (size_t e = 1; e < first_.size(); e++) first_[e] += first_[e - 1];
  std::vector<int64_t> next(first_.begin(), first_.end() - 1);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t row = next[experts[i]]++;
    token_of_.get()[row] = i / top_k_;
    row_of_.get()[i] = row;
  }
  list_items(hidden_items_, gate_[0].tiles());
  list_items(down_items_, down_[0].tiles());
}

void Moe::list_items(std::vector<Item>& items, int64_t tiles) const {
  items.clear();
  int64_t total = 0;
  for (int64_t e = 0; e < num_experts(); e++) total += first_[e + 1] > first_[e] ? tiles : 0;
  const int64_t share = total / (kPiecesPerWorker * static_cast<int64_t>(workers_.size()));
  for (int64_t e = 0; e < num_experts(); e++) {
    for (int64_t row = first_[e]; row < first_[e + 1]; row += kRowsPerItem) {
      const int64_t rows = std::min(kRowsPerItem, first_[e + 1] - row);
      const int64_t step = rows > kManyRows ? kManyRowsTiles : std::clamp<int64_t>(share, 1, 64);
      for (int64_t tile = 0; tile < tiles; tile += step) items.push_back({e, row, rows, tile, std::min(tile + step, tiles)});
    }
  }
}

void Moe::gather_inputs() {
  const int64_t columns = hidden();
  share(kGather, tokens_ * top_k_, 4, [&](int64_t row) {
    const float* x = x_ + token_of_.get()[row] * columns;
    if (inputs_.as_codes) inputs_.codes.quantize(*kernels_, x, row, columns);
    if (inputs_.as_floats) std::memcpy(inputs_.floats.get() + row * columns, x, columns * sizeof(float));
  });
}

Activations Moe::activations(const Rows& rows, const PackedMatrix& matrix, const Item& item) const {
  if (takes_codes(matrix)) return rows.codes.rows(item.first_row, item.rows, matrix.columns);
  const float* values = rows.floats.get() + item.first_row * matrix.columns;
  return {item.rows, matrix.columns, padded_columns(matrix.columns), values, matrix.columns, nullptr, nullptr, nullptr};
}

void Moe::compute_hidden(Worker& worker) {
  share(kHidden, static_cast<int64_t>(hidden_items_.size()), 1, [&](int64_t i) {
    const Item& item = hidden_items_[i];
    const PackedMatrix &gate = gate_[item.expert], &up = up_[item.expert];
    const int64_t column = item.first_tile * kTileRows, width = std::min(item.last_tile * kTileRows, gate.rows) - column;
    float* y = hidden_.floats.get() + item.first_row * gate.rows + column;
    kernels_->linear(gate, item.first_tile, item.last_tile, activations(inputs_, gate, item), y, gate.rows);
    kernels_->linear(up, item.first_tile, item.last_tile, activations(inputs_, up, item), worker.up.get(), width);
    for (int64_t r = 0; r < item.rows; r++) {
      float *row = y + r * gate.rows, *up_row = worker.up.get() + r * width;
      if (gate_.bias) kernels_->add(row, gate_.bias_of(item.expert) + column, width, row);
      if (up_.bias) kernels_->add(up_row, up_.bias_of(item.expert) + column, width, up_row);
      kernels_->gated_activation(row, up_row, activation_, width, row);
    }
  });
}

void Moe::quantize_hidden() {
  const int64_t columns = down_[0].columns;
  share(kQuantize, tokens_ * top_k_, 4, [&](int64_t row) {
    hidden_.codes.quantize(*kernels_, hidden_.floats.get() + row * columns, row, columns);
  });
}

void Moe::compute_down() {
  share(kDown, static_cast<int64_t>(down_items_.size()), 1, [&](int64_t i) {
    const Item& item = down_items_[i];
    const PackedMatrix& down = down_[item.expert];
    float* y = outputs_.get() + item.first_row * down.rows + item.first_tile * kTileRows;
    kernels_->linear(down, item.first_tile, item.last_tile, activations(hidden_, down, item), y, down.rows);
    if (!down_.bias) return;
    const int64_t column = item.first_tile * kTileRows, width = std::min(item.last_tile * kTileRows, down.rows) - column;
    for (int64_t r = 0; r < item.rows; r++)
      kernels_->add(y + r * down.rows, down_.bias_of(item.expert) + column, width, y + r * down.rows);
  });
}

void Moe::combine() {
  const int64_t columns = hidden();
  share(kCombine, tokens_, 4, [&](int64_t t) {
    float* y = y_ + t * columns;
    for (int64_t k = 0; k < top_k_; k++) {
      const int64_t i = t * top_k_ + k;
      float* row = outputs_.get() + row_of_.get()[i] * columns;
      kernels_->scale(row, weights_.get()[i], columns, k == 0 ? y : row);
      if (k > 0) kernels_->add(y, row, columns, y);
    }
  });
}

}  // namespace llmctl
