#include "moe.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace llmctl {
namespace {

constexpr int64_t kFewElements = 32768;      // up to which every worker computes all rows for itself
constexpr int64_t kRowsPerItem = 256;        // tokens of one expert that share a piece of work
constexpr int64_t kManyRows = 8;             // from here on a tile is work enough for small pieces
constexpr int64_t kManyRowsTiles = 16;
constexpr int64_t kMostTiles = 64;           // tiles in one piece
constexpr int64_t kPiecesPerWorker = 8;
constexpr int64_t kShared = -1;              // in place of an expert's number
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

int64_t MoeScratch::bytes() const {
  auto of = [](const Assignment& a) { return a.experts.bytes() + a.weights.bytes() + a.row_of.bytes() + a.choice_of.bytes(); };
  int64_t total = of(assignment) + inputs.codes.bytes() + inputs.floats.bytes() + hidden.codes.bytes() + hidden.floats.bytes() +
                  shared.bytes() + outputs.bytes();
  for (const Worker& w : workers)
    total += of(w.assignment) + w.inputs.bytes() + w.hidden.bytes() + w.shared.bytes() + w.up.bytes() + w.outputs.bytes();
  return total;
}

Moe::Moe(const Kernels* kernels, Routing routing, ExpertMatrices gate, ExpertMatrices up, ExpertMatrices down,
         SharedExpert shared, Activation activation, bool int8, int64_t* counts)
    : kernels_(kernels), routing_(std::move(routing)), gate_(std::move(gate)), up_(std::move(up)), down_(std::move(down)),
      shared_(shared), activation_(activation), int8_(int8), counts_(counts), top_k_(routing_.top_k) {
  const auto experts = static_cast<size_t>(routing_.num_experts);
  for (const ExpertMatrices* part : {&gate_, &up_, &down_})
    check(part->matrices.size() == experts, "one matrix an expert is needed");
  for (size_t e = 0; e < experts; e++) {
    check(gate_[e].columns == hidden() && up_[e].columns == hidden() && down_[e].rows == hidden(),
          "the experts' matrices are not of one hidden size");
    check(gate_[e].rows == intermediate() && up_[e].rows == intermediate() && down_[e].columns == intermediate(),
          "the experts' matrices are not of one intermediate size");
    for (const PackedMatrix* matrix : {&gate_[e], &up_[e]})
      (takes_codes(*matrix) ? inputs_as_codes_ : inputs_as_floats_) = true;
    hidden_as_codes_ |= takes_codes(down_[e]);
  }
  check(!shared_.exists() || shared_.down.rows == hidden(), "the shared expert is not of the experts' hidden size");
}

void Moe::prepare(MoeScratch& scratch, int workers, const MoeInput& input) {
  input_ = input;
  scratch_ = &scratch;
  const int64_t rows = input.tokens * top_k_;
  while (static_cast<int>(routers_.size()) < workers) routers_.emplace_back(routing_);
  if (static_cast<int>(scratch.workers.size()) < workers) scratch.workers.resize(workers);
  for (MoeScratch::Worker& worker : scratch.workers) worker.of_token.resize(top_k_);
  few_ = rows * std::max(hidden(), intermediate()) + input.tokens * shared_size() <= kFewElements;
  scratch.hidden.floats.reserve(rows * intermediate());
  few_ ? reserve_few(workers, rows) : reserve_many(workers, rows);
  hidden_queue_.restart(workers);
  down_queue_.restart(workers);
  for (auto& next : next_) next.store(0, std::memory_order_relaxed);
}

void Moe::reserve(Assignment& assignment, int64_t rows) const {
  assignment.experts.reserve(rows);
  assignment.weights.reserve(rows);
  assignment.row_of.reserve(rows);
  assignment.choice_of.reserve(rows);
  assignment.first.resize(num_experts() + 1);
  assignment.next.resize(num_experts());
}

void Moe::reserve_few(int workers, int64_t rows) {
  const int64_t widest = kMostTiles * kTileRows;
  if (inputs_as_floats_) scratch_->inputs.floats.reserve(workers * rows * hidden());
  for (int i = 0; i < workers; i++) {
    MoeScratch::Worker& mine = scratch_->workers[i];
    reserve(mine.assignment, rows);
    if (inputs_as_codes_) mine.inputs.reserve(rows, hidden());
    if (hidden_as_codes_) mine.hidden.reserve(rows, intermediate());
    if (shared_.exists() && takes_codes(shared_.down)) mine.shared.reserve(input_.tokens, shared_size());
    mine.up.reserve(rows * widest);
    mine.outputs.reserve((rows + input_.tokens) * widest);
  }
}

void Moe::reserve_many(int workers, int64_t rows) {
  reserve(scratch_->assignment, rows);
  if (inputs_as_codes_) scratch_->inputs.codes.reserve(rows, hidden());
  if (inputs_as_floats_) scratch_->inputs.floats.reserve(rows * hidden());
  if (hidden_as_codes_) scratch_->hidden.codes.reserve(rows, intermediate());
  if (shared_.exists() && takes_codes(shared_.down)) scratch_->shared.reserve(input_.tokens, shared_size());
  scratch_->outputs.reserve(rows * hidden());
  for (int i = 0; i < workers; i++)
    scratch_->workers[i].up.reserve(std::min(rows, kRowsPerItem) * kMostTiles * kTileRows);
}

void Moe::run(ThreadPool& pool, int worker, const std::function<void()>& poll) {
  few_ ? run_few(pool, worker) : run_many(pool, worker, poll);
}

// ---------------------------------------------------------------------------------------------------------------------------
// What both ways have in common.

void Moe::route(Router& router, Assignment& assignment, int64_t token) const {
  router.route(input_.logits + token * num_experts(), assignment.experts.get() + token * top_k_,
               assignment.weights.get() + token * top_k_);
}

void Moe::sort_by_expert(Assignment& assignment) const {
  const int64_t rows = input_.tokens * top_k_;
  const int32_t* experts = assignment.experts.get();
  std::vector<int64_t>& first = assignment.first;
  std::fill(first.begin(), first.end(), 0);
  for (int64_t i = 0; i < rows; i++) first[experts[i] + 1]++;
  for (int64_t e = 0; e < num_experts(); e++) first[e + 1] += first[e];
  std::copy(first.begin(), first.end() - 1, assignment.next.begin());
  for (int64_t i = 0; i < rows; i++) {
    const int64_t row = assignment.next[experts[i]]++;
    assignment.choice_of.get()[row] = i;
    assignment.row_of.get()[i] = row;
  }
}

void Moe::count_tokens(const Assignment& assignment) {
  if (!counts_) return;
  for (int64_t e = 0; e < num_experts(); e++) counts_[e] += assignment.first[e + 1] - assignment.first[e];
}

void Moe::list_items(const Assignment& assignment, std::vector<Item>& items, int64_t tiles, int64_t workers) const {
  items.clear();
  int64_t total = 0;
  for (int64_t e = 0; e < num_experts(); e++) total += assignment.first[e + 1] > assignment.first[e] ? tiles : 0;
  const int64_t share = std::clamp<int64_t>(total / (kPiecesPerWorker * workers), 1, kMostTiles);
  for (int64_t e = 0; e < num_experts(); e++) {
    const int64_t end = assignment.first[e + 1];
    for (int64_t row = assignment.first[e]; row < end; row += kRowsPerItem) {
      const int64_t rows = std::min(kRowsPerItem, end - row), step = rows > kManyRows ? std::min(share, kManyRowsTiles) : share;
      for (int64_t tile = 0; tile < tiles; tile += step) items.push_back({e, row, rows, tile, std::min(tile + step, tiles)});
    }
  }
}

Activations Moe::rows_of(const QuantizedRows& codes, const float* floats, const PackedMatrix& matrix, int64_t first,
                         int64_t rows) const {
  if (takes_codes(matrix)) return codes.rows(first, rows, matrix.columns);
  const float* values = floats + first * matrix.columns;
  return {rows, matrix.columns, padded_columns(matrix.columns), values, matrix.columns, nullptr, nullptr, nullptr};
}

// Gate, up and their gated activation, into the sorted rows of the hidden floats. The inputs of a single token are one row.
void Moe::compute_hidden(const Item& item, const QuantizedRows& inputs, const float* floats, float* up, const uint8_t* next) {
  const PackedMatrix &gate = gate_[item.expert], &other = up_[item.expert];
  const int64_t column = item.first_tile * kTileRows, width = std::min(item.last_tile * kTileRows, gate.rows) - column;
  const int64_t first = input_.tokens == 1 ? 0 : item.first_row;
  float* y = scratch_->hidden.floats.get() + item.first_row * gate.rows + column;
  kernels_->linear({gate, item.first_tile, item.last_tile, other.tile(item.first_tile)},
                   rows_of(inputs, floats, gate, first, item.rows), y, gate.rows);
  kernels_->linear({other, item.first_tile, item.last_tile, next}, rows_of(inputs, floats, other, first, item.rows), up, width);
  for (int64_t r = 0; r < item.rows; r++) {
    float *row = y + r * gate.rows, *up_row = up + r * width;
    if (gate_.bias) kernels_->add(row, gate_.bias_of(item.expert) + column, width, row);
    if (up_.bias) kernels_->add(up_row, up_.bias_of(item.expert) + column, width, up_row);
    kernels_->gated_activation(row, up_row, activation_, width, row);
  }
}

namespace {

void add_bias(const Kernels& kernels, const float* bias, const MoeScratch::Item& item, const PackedMatrix& matrix, float* y,
              int64_t stride) {
  if (!bias) return;
  const int64_t column = item.first_tile * kTileRows, width = std::min(item.last_tile * kTileRows, matrix.rows) - column;
  for (int64_t r = 0; r < item.rows; r++) kernels.add(y + r * stride, bias + column, width, y + r * stride);
}

}  // namespace

void Moe::compute_down(const Item& item, const QuantizedRows& hidden, float* y, int64_t stride, const uint8_t* next) const {
  const PackedMatrix& down = down_[item.expert];
  const Activations x = rows_of(hidden, scratch_->hidden.floats.get(), down, item.first_row, item.rows);
  kernels_->linear({down, item.first_tile, item.last_tile, next}, x, y, stride);
  add_bias(*kernels_, down_.bias_of(item.expert), item, down, y, stride);
}

void Moe::compute_shared(const Item& item, const QuantizedRows& codes, float* y, int64_t stride, const uint8_t* next) const {
  const Activations x = rows_of(codes, input_.shared, shared_.down, item.first_row, item.rows);
  kernels_->linear({shared_.down, item.first_tile, item.last_tile, next}, x, y, stride);
  add_bias(*kernels_, shared_.bias, item, shared_.down, y, stride);
}

// `width` outputs of a token from `column` on. rows: its experts' results, in the order of choice, which are overwritten; shared:
// the shared one's, or null.
void Moe::combine(const Assignment& assignment, int64_t token, float* const* rows, float* shared, int64_t column,
                  int64_t width) const {
  const float* weights = assignment.weights.get() + token * top_k_;
  float *sum = rows[0], *y = input_.y + token * hidden() + column;
  for (int64_t k = 0; k < top_k_; k++) {
    kernels_->scale(rows[k], weights[k], width, rows[k]);
    if (k > 0) kernels_->add(sum, rows[k], width, sum);
  }
  if (shared) {
    if (input_.shared_gate) kernels_->scale(shared, sigmoid(input_.shared_gate[token]), width, shared);
    kernels_->add(sum, shared, width, sum);
  }
  if (input_.residual) {
    kernels_->add(input_.residual + token * hidden() + column, sum, width, y);
  } else if (y != sum) {
    std::memcpy(y, sum, width * sizeof(float));
  }
}

// ---------------------------------------------------------------------------------------------------------------------------
// Few tokens.

void Moe::run_few(ThreadPool& pool, int worker) {
  MoeScratch::Worker& mine = scratch_->workers[worker];
  for (int64_t t = 0; t < input_.tokens; t++) route(routers_[worker], mine.assignment, t);
  sort_by_expert(mine.assignment);
  if (worker == 0) count_tokens(mine.assignment);
  few_hidden(mine, worker);
  pool.barrier();
  few_down(mine, worker);
  pool.barrier();
}

void Moe::few_hidden(MoeScratch::Worker& mine, int worker) {
  list_items(mine.assignment, mine.items, gate_[0].tiles(), static_cast<int64_t>(routers_.size()));
  const auto items = static_cast<int64_t>(mine.items.size());
  if (items == 0) return;   // of no tokens
  const Item& begin = mine.items[std::min(hidden_queue_.begin(items, worker), items - 1)];
  prefetch_tiles(gate_[begin.expert], begin.first_tile, begin.last_tile);
  const int64_t rows = input_.tokens == 1 ? 1 : input_.tokens * top_k_;
  float* floats = scratch_->inputs.floats.get() + worker * input_.tokens * top_k_ * hidden();
  for (int64_t row = 0; row < rows; row++) {
    const float* x = input_.x + mine.assignment.choice_of.get()[row] / top_k_ * hidden();
    if (inputs_as_codes_) mine.inputs.quantize(*kernels_, x, row, hidden());
    if (inputs_as_floats_) std::memcpy(floats + row * hidden(), x, hidden() * sizeof(float));
  }
  int helped = 0;
  for (int64_t i; (i = hidden_queue_.take(items, worker, helped)) >= 0;) {
    const Item& following = mine.items[std::min(i + 1, items - 1)];
    const uint8_t* next = hidden_queue_.is_last(items, i) ? nullptr : gate_[following.expert].tile(following.first_tile);
    compute_hidden(mine.items[i], mine.inputs, floats, mine.up.get(), next);
  }
}

// Pieces are tiles of the output: of each, all that is added up to it.
void Moe::few_down(MoeScratch::Worker& mine, int worker) {
  const int64_t tiles = down_[0].tiles(), workers = static_cast<int64_t>(routers_.size());
  const int64_t step = std::clamp<int64_t>(tiles / (kPiecesPerWorker * workers), 1, kMostTiles);
  const int64_t pieces = (tiles + step - 1) / step, begin = std::min(down_queue_.begin(pieces, worker) * step, tiles - 1);
  prefetch_tiles(down_from(mine.assignment, 0), begin, std::min(begin + step, tiles));
  for (int64_t row = 0; hidden_as_codes_ && row < input_.tokens * top_k_; row++)
    mine.hidden.quantize(*kernels_, scratch_->hidden.floats.get() + row * intermediate(), row, intermediate());
  for (int64_t t = 0; shared_.exists() && takes_codes(shared_.down) && t < input_.tokens; t++)
    mine.shared.quantize(*kernels_, input_.shared + t * shared_size(), t, shared_size());
  int helped = 0;
  for (int64_t i; (i = down_queue_.take(pieces, worker, helped)) >= 0;)
    few_outputs(mine, i * step, std::min((i + 1) * step, tiles), down_queue_.is_last(pieces, i));
}

// The matrix of the first expert from `expert` on that has tokens; of the shared one if there is none; else any.
const PackedMatrix& Moe::down_from(const Assignment& assignment, int64_t expert) const {
  while (expert < num_experts() && assignment.first[expert] == assignment.first[expert + 1]) expert++;
  if (expert < num_experts()) return down_[expert];
  return shared_.exists() ? shared_.down : down_[0];
}

void Moe::few_outputs(MoeScratch::Worker& mine, int64_t first_tile, int64_t last_tile, bool is_last) {
  const Assignment& assignment = mine.assignment;
  const int64_t stride = (last_tile - first_tile) * kTileRows, column = first_tile * kTileRows;
  const int64_t width = std::min(last_tile * kTileRows, hidden()) - column, rows = input_.tokens * top_k_;
  const uint8_t* after = is_last ? nullptr : down_from(assignment, 0).tile(last_tile);
  for (int64_t e = 0; e < num_experts(); e++) {
    const int64_t first = assignment.first[e], count = assignment.first[e + 1] - first;
    if (count == 0) continue;
    const uint8_t* next = first + count < rows || shared_.exists() ? down_from(assignment, e + 1).tile(first_tile) : after;
    compute_down({e, first, count, first_tile, last_tile}, mine.hidden, mine.outputs.get() + first * stride, stride, next);
  }
  float* shared = shared_.exists() ? mine.outputs.get() + rows * stride : nullptr;
  if (shared) compute_shared({kShared, 0, input_.tokens, first_tile, last_tile}, mine.shared, shared, stride, after);
  std::vector<float*>& of_token = mine.of_token;
  for (int64_t t = 0; t < input_.tokens; t++) {
    for (int64_t k = 0; k < top_k_; k++) of_token[k] = mine.outputs.get() + assignment.row_of.get()[t * top_k_ + k] * stride;
    combine(assignment, t, of_token.data(), shared ? shared + t * stride : nullptr, column, width);
  }
}

// ---------------------------------------------------------------------------------------------------------------------------
// Many tokens.

void Moe::run_many(ThreadPool& pool, int worker, const std::function<void()>& poll) {
  MoeScratch& all = *scratch_;
  share(kRoute, input_.tokens, 4, poll, [&](int64_t t) { route(routers_[worker], all.assignment, t); });
  pool.barrier();
  if (worker == 0) {
    sort_by_expert(all.assignment);
    count_tokens(all.assignment);
    list_items(all.assignment, all.hidden_items, gate_[0].tiles(), pool.size());
    list_items(all.assignment, all.down_items, down_[0].tiles(), pool.size());
    list_shared_items(all.down_items);
  }
  pool.barrier();
  share(kGather, input_.tokens, 4, poll, [&](int64_t t) { gather(t); });
  pool.barrier();
  share(kHidden, static_cast<int64_t>(all.hidden_items.size()), 1, poll, [&](int64_t i) {
    compute_hidden(all.hidden_items[i], all.inputs.codes, all.inputs.floats.get(), all.workers[worker].up.get(), nullptr);
  });
  pool.barrier();
  if (hidden_as_codes_) {
    share(kQuantize, input_.tokens * top_k_, 4, poll, [&](int64_t row) {
      all.hidden.codes.quantize(*kernels_, all.hidden.floats.get() + row * intermediate(), row, intermediate());
    });
    pool.barrier();
  }
  share(kDown, static_cast<int64_t>(all.down_items.size()), 1, poll, [&](int64_t i) { compute_output(all.down_items[i]); });
  pool.barrier();
  share(kCombine, input_.tokens, 4, poll, [&](int64_t t) { combine_token(worker, t); });
  pool.barrier();
}

// body(i) for all i below count, by whichever worker is free, `step` at a time.
template <class Body>
void Moe::share(int stage, int64_t count, int64_t step, const std::function<void()>& poll, Body body) {
  for (int64_t first; (first = next_[stage].fetch_add(step)) < count;) {
    if (poll) poll();
    for (int64_t i = first; i < std::min(first + step, count); i++) body(i);
  }
}

void Moe::list_shared_items(std::vector<Item>& items) const {
  if (!shared_.exists()) return;
  for (int64_t row = 0; row < input_.tokens; row += kRowsPerItem) {
    const int64_t rows = std::min(kRowsPerItem, input_.tokens - row), tiles = shared_.down.tiles();
    for (int64_t tile = 0; tile < tiles; tile += kManyRowsTiles)
      items.push_back({kShared, row, rows, tile, std::min(tile + kManyRowsTiles, tiles)});
  }
}

// A token's row is rounded once, and copied to the rows of its experts.
void Moe::gather(int64_t token) {
  const float* x = input_.x + token * hidden();
  const int64_t* rows = scratch_->assignment.row_of.get() + token * top_k_;
  QuantizedRows& codes = scratch_->inputs.codes;
  if (inputs_as_codes_) codes.quantize(*kernels_, x, rows[0], hidden());
  for (int64_t k = 0; k < top_k_; k++) {
    if (inputs_as_codes_ && k > 0) codes.copy_row(rows[0], rows[k], hidden());
    if (inputs_as_floats_) std::memcpy(scratch_->inputs.floats.get() + rows[k] * hidden(), x, hidden() * sizeof(float));
  }
  if (shared_.exists() && takes_codes(shared_.down))
    scratch_->shared.quantize(*kernels_, input_.shared + token * shared_size(), token, shared_size());
}

// The shared expert's outputs wait where the token's own will be.
void Moe::compute_output(const Item& item) const {
  const int64_t offset = item.first_row * hidden() + item.first_tile * kTileRows;
  if (item.expert == kShared) {
    compute_shared(item, scratch_->shared, input_.y + offset, hidden(), nullptr);
  } else {
    compute_down(item, scratch_->hidden.codes, scratch_->outputs.get() + offset, hidden(), nullptr);
  }
}

void Moe::combine_token(int worker, int64_t token) {
  const Assignment& assignment = scratch_->assignment;
  std::vector<float*>& rows = scratch_->workers[worker].of_token;
  for (int64_t k = 0; k < top_k_; k++)
    rows[k] = scratch_->outputs.get() + assignment.row_of.get()[token * top_k_ + k] * hidden();
  combine(assignment, token, rows.data(), shared_.exists() ? input_.y + token * hidden() : nullptr, 0, hidden());
}

}  // namespace llmctl
