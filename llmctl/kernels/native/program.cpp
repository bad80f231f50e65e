#include "program.hpp"

#include <algorithm>

#include "phases.hpp"

namespace llmctl {
namespace {

constexpr std::chrono::milliseconds kPollInterval{50};

}  // namespace

struct Program::AttentionPhase : Program::Phase {
  int queries, out, plan, group;
  const KvPages* pages;
  int64_t num_heads;
  float scale;
  int64_t window;
  float softcap;
  const float* sinks;
  int64_t anchors;
  std::atomic<int64_t> next_item{0}, next_merge{0};

  void prepare(Program& program) override {
    next_item.store(0, std::memory_order_relaxed);
    next_merge.store(0, std::memory_order_relaxed);
    for (auto& worker : program.workers_) worker->attention.reserve(attention_scratch_floats(num_heads, pages->shape));
    program.partials_.reserve(program.plans_[plan].plan.partial_rows * attention_partial_floats(pages->shape));
  }

  void run(Program& program, int number) override {
    const AttentionPlan& work = program.plans_[plan].plan;
    const AttentionKernels& kernels = *program.kernels_->attention;
    const AttentionCall call = describe(program);
    Worker& worker = *program.workers_[number];
    Stopwatch watch = program.stopwatch(*this, number);
    for (int64_t i; (i = next_item.fetch_add(1)) < static_cast<int64_t>(work.items.size());) {
      program.poll(worker);
      kernels.run(call, work.items[i], worker.attention.get(), program.partials_.get());
    }
    program.prefetch_after(*this, number);
    watch.mark(&PhaseTime::work);
    program.pool_->barrier();
    watch.mark(&PhaseTime::wait);
    if (work.merges.empty()) return;
    for (int64_t i; (i = next_merge.fetch_add(1)) < static_cast<int64_t>(work.merges.size());)
      kernels.merge(call, work.merges[i], program.partials_.get());
    watch.mark(&PhaseTime::work);
    program.pool_->barrier();
    watch.mark(&PhaseTime::wait);
  }

  AttentionCall describe(Program& program) const {
    return {*pages,         program.input_->maps[group].sequences.data(), num_heads,
            scale,          softcap,                          window,
            program.data(queries), program.width(queries),    program.buffers_[out].data.get(),
            program.width(out), sinks,                        anchors};
  }
};

Program::Program(std::shared_ptr<ThreadPool> pool, const Kernels* kernels, bool int8)
    : pool_(std::move(pool)), kernels_(kernels), int8_(int8) {
  for (int i = 0; i < pool_->size(); i++) {
    workers_.push_back(std::make_unique<Worker>());
    workers_.back()->number = i;
  }
}

Program::~Program() = default;

void Program::time_phases(bool on) {
  timed_ = on;
  times_.assign(phases_.size(), {});
}

void Program::prefetch_after(const Phase& phase, int worker) const {
  for (size_t next = phase.number + 1; next < phases_.size(); next++)
    if (phases_[next]->prefetch(worker)) return;
}

Stopwatch Program::stopwatch(const Phase& phase, int worker) {
  return Stopwatch(timed_ && worker == 0 ? &times_[phase.number] : nullptr);
}

void Program::add_phase(std::unique_ptr<Phase> phase) {
  phase->number = static_cast<int>(phases_.size());
  phases_.push_back(std::move(phase));
}

int Program::add_buffer(int64_t width, Domain domain) {
  buffers_.push_back({width, domain, {}});
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::shared_plan(const KvShape& shape, int group, int64_t num_heads, int64_t window, int64_t anchors) {
  for (size_t i = 0; i < plans_.size(); i++) {
    const SharedPlan& p = plans_[i];
    const bool same = p.shape.key_type == shape.key_type && p.shape.value_type == shape.value_type &&
                      p.shape.latent == shape.latent && p.shape.kv_heads == shape.kv_heads && p.shape.head_dim == shape.head_dim;
    if (same && p.group == group && p.num_heads == num_heads && p.window == window && p.anchors == anchors)
      return static_cast<int>(i);
  }
  plans_.push_back({shape, group, num_heads, window, anchors, {}});
  return static_cast<int>(plans_.size()) - 1;
}

void Program::add_attention_phase(int queries, int out, const KvPages* pages, int group, int64_t num_heads, float scale,
                                  int64_t window, float softcap, const float* sinks, int64_t anchors) {
  auto phase = std::make_unique<AttentionPhase>();
  phase->queries = queries;
  phase->out = out;
  phase->pages = pages;
  phase->group = group;
  phase->num_heads = num_heads;
  phase->scale = scale;
  phase->window = window;
  phase->softcap = softcap;
  phase->sinks = sinks;
  phase->anchors = anchors;
  phase->plan = shared_plan(pages->shape, group, num_heads, window, anchors);
  add_phase(std::move(phase));
}

void Program::prepare() {
  for (Buffer& buffer : buffers_) buffer.data.reserve(std::max<int64_t>(1, rows_of(buffer.domain)) * buffer.width);
  for (auto& worker : workers_) {
    worker->view.resize(buffers_.size());
    for (size_t i = 0; i < buffers_.size(); i++) worker->view[i] = buffers_[i].data.get();
  }
  for (SharedPlan& p : plans_) {
    const std::vector<AttentionSequence>& sequences = input_->maps[p.group].sequences;
    plan_attention(sequences.data(), static_cast<int64_t>(sequences.size()), p.num_heads, p.shape, p.window, p.anchors,
                   pool_->size(), p.plan);
  }
  for (auto& phase : phases_) phase->prepare(*this);
}

void Program::run(const StepInput& input, const std::function<void()>& poll) {
  input_ = &input;
  poll_ = poll ? &poll : nullptr;
  next_poll_ = std::chrono::steady_clock::now() + kPollInterval;
  prepare();
  pool_->run([this](int worker) {
    for (auto& phase : phases_) phase->run(*this, worker);
  });
}

// Between two pieces of work: the calling thread polls, the others see whether that ended the run.
void Program::poll(const Worker& worker) {
  if (worker.number != 0) return pool_->check();
  if (!poll_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_poll_) return;
  next_poll_ = now + kPollInterval;
  (*poll_)();
}

int64_t Program::bytes() const {
  int64_t total = partials_.bytes() + quantized_.bytes() + moe_scratch_.bytes();
  for (const Buffer& buffer : buffers_) total += buffer.data.bytes();
  for (const auto& w : workers_)
    total += w->rows.bytes() + w->quantized.bytes() + w->chunk.bytes() + w->chunk_up.bytes() + w->attention.bytes();
  return total;
}

}  // namespace llmctl
