// A forward pass recorded once and replayed by one call, for any number of tokens.
//
// A program is a list of phases. All workers run every phase together and meet at its end. A matrix phase is
//   1. row operations: everything that needs one token's row alone (norms, additions, activations, embedding …);
//   2. the quantization of its input row to int8;
//   3. segments: matrix products that share this input, each with what follows on its outputs while they are hot (bias,
//      residual, gated activation, head norm, rotary embedding, writing the KV page).
// With few tokens every worker does 1 and 2 for itself, which is cheaper than meeting; with many the rows are shared out.
// Both give the same bits, and so does any number of workers: rows of a matrix are split, never columns.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "aligned.hpp"
#include "attention.hpp"
#include "kernels.hpp"
#include "moe.hpp"
#include "quantized_rows.hpp"
#include "thread_pool.hpp"

namespace llmctl {

// Rows a buffer or a phase has: one per token of the batch, or one per row of logits asked for.
enum class Domain : int32_t { Tokens, Rows };

enum class RowKind : int32_t {
  Embedding, Angles, RmsNorm, LayerNorm, Rotary, Gated, Sigmoid, Add, Scale, Growth, Softcap, Take, Store, Fit, Join, Gather
};

// One operation on a row. Numbers are buffers (-1: none); their widths are known to the program.
//   Embedding  out = table[token id, or position where source is 1] * factor
//   Angles     out, out2 = cos, sin of position * frequencies[source], times factor
//   RmsNorm    every `width` elements of a by themselves, times weight: `num_weights` numbers, from the first again after them
//   LayerNorm  the same of elements without their mean, plus bias where there is one
//   Rotary     heads of `width` elements, turned by the angles b (cos) and c (sin)
//   Gated      activation(a) * b, or alone where there is no b
//   Sigmoid    a times the sigmoid of b, which is one number
//   Add        a + b                Scale, Softcap   of a by factor
//   Growth     a times 1 + factor * log(1 + position / width), the quotient a whole number
//   Take       the row of a that the batch asks logits for
//   Store      keys a and values b (none for latent pages) into the pages, at the token's slot
//   Fit        heads of `width` elements become as many of out's width: cut, or filled up with zeros
//   Join       heads of `width` elements of a, each followed by one of b
//   Gather     the elements of a in the order given, as the columns of a weight that was reordered
struct RowOp {
  RowKind kind;
  int out = -1, out2 = -1, a = -1, b = -1, c = -1;
  int source = 0;
  int64_t width = 0;
  float factor = 1.0f;
  Activation activation = Activation::Silu;
  const float* weight = nullptr;
  int64_t num_weights = 0;
  const float* bias = nullptr;
  const int32_t* order = nullptr;
  PackedMatrix table{};
  const KvPages* pages = nullptr;
  int group = 0;
};

// One matrix product and what follows on its outputs, in this order: bias; activation, gated with `up`; scale; softcap; head
// norm; rotary; residual; then to `out`, or into the pages as keys or values.
struct Segment {
  PackedMatrix matrix{};
  const float* bias = nullptr;
  bool activated = false;            // without `up`
  bool gated = false;
  PackedMatrix up{};
  const float* up_bias = nullptr;
  Activation activation = Activation::Silu;
  float scale = 1.0f;
  float softcap = 0.0f;
  int64_t head_dim = 0;              // > 0: outputs are heads, and chunks of work are whole heads
  const float* head_norm = nullptr;  // one vector for all heads, or one for each
  int64_t num_norms = 0;             // its numbers
  bool takes_mean = false;           // a LayerNorm
  float eps = 0.0f;
  int cos = -1, sin = -1;
  int residual = -1;
  int out = -1;
  int64_t head = 0;         // where the phase's input row is equal parts, one for each of as many matrices: the number of the part
  int64_t out_column = 0;   // of such a product, and of spread heads: where its outputs begin in a row of `out`
  int64_t head_stride = 0;  // > 0: outputs are heads spread over a row of `out`, which begin so many numbers apart
  const KvPages* pages = nullptr;
  int group = 0;
  bool is_value = false;
};

// Buffers of one domain that a mixture of experts reads and writes: those of MoeInput, -1 for what there is none of.
struct MoeBuffers {
  int x = -1, logits = -1, shared = -1, shared_gate = -1, residual = -1, out = -1;
};

// Where the layers of one group keep a step's tokens: a slot a token, and sequences as in attention.hpp.
struct PageMap {
  const int64_t* slots;
  std::vector<AttentionSequence> sequences;
};

// One step's tokens. rows: numbers of the tokens whose logits are wanted; frequencies: for every source inverse frequencies
// [half], or [tokens][half] where they differ.
struct Frequencies {
  const float* values;
  int64_t half;
  bool per_token;
};

struct StepInput {
  int64_t tokens;
  const int64_t* token_ids;
  const int64_t* positions;
  int64_t num_rows;
  const int64_t* rows;
  std::vector<PageMap> maps;   // group by group
  std::vector<Frequencies> frequencies;
};

class Stopwatch;

class Program {
 public:
  // int8: activations of quantized weights are rounded to int8; otherwise everything is float32.
  Program(std::shared_ptr<ThreadPool> pool, const Kernels* kernels, bool int8);
  ~Program();

  int add_buffer(int64_t width, Domain domain);
  void add_matrix_phase(Domain domain, std::vector<RowOp> before, int input, std::vector<Segment> segments);
  void add_attention_phase(int queries, int out, const KvPages* pages, int group, int64_t num_heads, float scale,
                           int64_t window, float softcap, const float* sinks = nullptr, int64_t anchors = 0);

  void add_moe_phase(const MoeBuffers& buffers, std::unique_ptr<Moe> moe);

  // Runs all phases. Afterwards `data` of a buffer holds its rows. Errors: std::bad_alloc.
  // poll: where not empty, called by the calling thread every kPollInterval or so, between two pieces of work. What it throws
  // ends the run: buffers then hold nothing of use, and any of the step's keys and values may be stored.
  void run(const StepInput& input, const std::function<void()>& poll = {});
  const float* data(int buffer) const { return buffers_[buffer].data.get(); }
  int64_t width(int buffer) const { return buffers_[buffer].width; }
  int64_t bytes() const;   // of buffers and scratch

  // Seconds worker 0 spent since `time_phases(true)`, phase by phase: in row operations, in products or attention, and waiting
  // for the other workers.
  struct PhaseTime {
    double rows = 0, work = 0, wait = 0;
  };
  void time_phases(bool on);
  const std::vector<PhaseTime>& times() const { return times_; }

  struct Buffer {
    int64_t width;
    Domain domain;
    AlignedArray<float> data;
  };
  struct Phase;
  struct MatrixPhase;
  struct AttentionPhase;
  struct MoePhase;
  struct Worker;

 private:
  // Layers of one shape, window and group divide their work alike: it is planned once a step.
  struct SharedPlan {
    KvShape shape;
    int group;
    int64_t num_heads, window, anchors;
    AttentionPlan plan;
  };
  int shared_plan(const KvShape& shape, int group, int64_t num_heads, int64_t window, int64_t anchors);

  void add_phase(std::unique_ptr<Phase> phase);
  void prefetch_after(const Phase& phase, int worker) const;
  Stopwatch stopwatch(const Phase& phase, int worker);
  int64_t rows_of(Domain domain) const { return domain == Domain::Tokens ? input_->tokens : input_->num_rows; }
  void prepare();
  void poll(const Worker& worker);

  std::shared_ptr<ThreadPool> pool_;
  const Kernels* kernels_;
  bool int8_;
  const StepInput* input_ = nullptr;
  const std::function<void()>* poll_ = nullptr;
  std::chrono::steady_clock::time_point next_poll_;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<Phase>> phases_;
  std::vector<SharedPlan> plans_;
  AlignedArray<float> partials_;
  MoeScratch moe_scratch_;
  QuantizedRows quantized_;   // the phase at hand's, where the workers share its rows
  std::vector<std::unique_ptr<Worker>> workers_;
  bool timed_ = false;
  std::vector<PhaseTime> times_;
};

}  // namespace llmctl
