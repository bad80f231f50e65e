// Mixture-of-experts phases: routing and the chosen experts' products, of moe.hpp.
#include "moe.hpp"
#include "phases.hpp"

namespace llmctl {

struct Program::MoePhase : Program::Phase {
  MoeBuffers buffers;
  std::unique_ptr<Moe> moe;
  int64_t num_rows = 0;

  void prepare(Program& program) override {
    auto at = [&](int buffer) { return buffer < 0 ? nullptr : program.data(buffer); };
    num_rows = program.rows_of(program.buffers_[buffers.out].domain);
    moe->prepare(program.moe_scratch_, program.pool_->size(),
                 {num_rows, at(buffers.x), at(buffers.logits), at(buffers.shared), at(buffers.shared_gate), at(buffers.residual),
                  program.buffers_[buffers.out].data.get()});
  }

  void run(Program& program, int number) override {
    if (num_rows == 0) return;   // a chunk inside a prompt asks for no logits
    Stopwatch watch = program.stopwatch(*this, number);
    moe->run(*program.pool_, number, [&] { program.poll(*program.workers_[number]); });
    watch.mark(&PhaseTime::work);
  }

  // Which experts' weights it begins with is not known before it has routed.
  bool prefetch(int) const override { return true; }
};

void Program::add_moe_phase(const MoeBuffers& buffers, std::unique_ptr<Moe> moe) {
  auto phase = std::make_unique<MoePhase>();
  phase->buffers = buffers;
  phase->moe = std::move(moe);
  add_phase(std::move(phase));
}

}  // namespace llmctl
