// Mixture-of-experts phases: routing and the chosen experts' products, of moe.hpp.
#include "moe.hpp"
#include "phases.hpp"

namespace llmctl {

struct Program::MoePhase : Program::Phase {
  int x, logits, out;
  std::unique_ptr<Moe> moe;
  int64_t num_rows = 0;

  void prepare(Program& program) override {
    num_rows = program.rows_of(program.buffers_[out].domain);
    moe->prepare(program.pool_->size(), num_rows, program.data(x), program.data(logits), program.buffers_[out].data.get());
  }

  void run(Program& program, int number) override {
    if (num_rows == 0) return;   // a chunk inside a prompt asks for no logits
    Stopwatch watch = program.stopwatch(*this, number);
    moe->run(*program.pool_, number);
    watch.mark(&PhaseTime::work);
  }

  // Which experts' weights it begins with is not known before it has routed.
  bool prefetch(int) const override { return true; }
};

void Program::add_moe_phase(int x, int logits, int out, std::unique_ptr<Moe> moe) {
  auto phase = std::make_unique<MoePhase>();
  phase->x = x;
  phase->logits = logits;
  phase->out = out;
  phase->moe = std::move(moe);
  add_phase(std::move(phase));
}

}  // namespace llmctl
