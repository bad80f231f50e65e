// Matrix phases: row operations, then the products that share their result.
#include <cmath>
#include <cstring>

#include "phases.hpp"

namespace llmctl {
namespace {

constexpr int64_t kCodesInCache = 1 << 20;   // bytes of activations that stay in a core's second-level cache
constexpr int64_t kChunksPerWorker = 8;
constexpr int64_t kMostTiles = 64;           // tiles in one chunk of work
constexpr int64_t kPrefillTiles = 16;        // the same where many tokens share it

}  // namespace

struct Program::MatrixPhase : Program::Phase {
  Domain domain;
  std::vector<RowOp> before;
  int input;
  int64_t heads = 1;          // equal parts of an input row, each with segments of its own
  std::vector<Segment> segments;
  bool needs_codes = false;
  std::vector<int> outputs;   // buffers that `before` fills

  int64_t num_rows = -1, columns = 0, block = 0;   // columns: of one head
  bool own_rows = false;
  struct Chunk {
    int segment;
    int64_t first_tile, last_tile;
  };
  std::vector<Chunk> chunks;
  std::atomic<int64_t> next_rows{0}, next_item{0};
  WorkQueue queue;   // of chunks, where the rows are few

  void prepare(Program& program) override {
    next_rows.store(0, std::memory_order_relaxed);
    next_item.store(0, std::memory_order_relaxed);
    if (num_rows != program.rows_of(domain)) {
      try {
        fit(program);
      } catch (...) {
        num_rows = -1;   // there is no room for them: the next run must not believe it
        throw;
      }
    }
    if (own_rows) queue.restart(program.pool_->size());
  }

  // Makes room for another number of rows, and divides the work for it.
  void fit(Program& program) {
    num_rows = program.rows_of(domain);
    columns = input < 0 ? 0 : program.buffers_[input].width / heads;
    int64_t widest = columns * heads;
    for (int output : outputs) widest = std::max(widest, program.buffers_[output].width);
    own_rows = num_rows * widest <= kOwnRows;
    block = num_rows;
    if (input >= 0) {
      block = std::max<int64_t>(64, kCodesInCache / padded_columns(columns) / 16 * 16);
      block = std::min(block, std::max<int64_t>(num_rows, 1));
      if (needs_codes && !own_rows) program.quantized_.reserve(heads * num_rows, columns);
      list_chunks(program);
    }
    for (auto& worker : program.workers_) reserve(program, *worker);
  }

  void reserve(Program& program, Worker& worker) {
    if (own_rows) {
      int64_t elements = 0;
      for (int output : outputs) elements += num_rows * (program.buffers_[output].width + 16);
      worker.rows.reserve(elements);
      if (needs_codes) worker.quantized.reserve(heads * num_rows, columns);
    }
    int64_t widest = 0;
    bool gated = false;
    for (const Chunk& chunk : chunks) {
      widest = std::max(widest, (chunk.last_tile - chunk.first_tile) * kTileRows);
      gated = gated || segments[chunk.segment].gated;
    }
    worker.chunk.reserve(block * widest);
    if (gated) worker.chunk_up.reserve(block * widest);
  }

  // Tiles in a piece, so that every worker gets as many pieces of a size and none is larger than kPrefillTiles.
  static int64_t even_step(int64_t tiles, int64_t workers) {
    const int64_t rounds = (tiles + workers * kPrefillTiles - 1) / (workers * kPrefillTiles);
    return std::max<int64_t>(1, (tiles + workers * rounds - 1) / (workers * rounds));
  }

  // Splits the segments' tiles into pieces of work. More tokens make a tile heavier, so pieces become smaller.
  void list_chunks(const Program& program) {
    chunks.clear();
    int64_t total = 0;
    for (const Segment& segment : segments) total += segment.matrix.tiles();
    const int64_t pieces = kChunksPerWorker * program.pool_->size();
    const int64_t wanted = std::clamp<int64_t>(total / pieces, 1, kMostTiles);
    for (size_t i = 0; i < segments.size(); i++) {
      const int64_t unit = std::max<int64_t>(1, segments[i].head_dim / kTileRows);
      const int64_t even = even_step(segments[i].matrix.tiles(), program.pool_->size());
      const int64_t step = std::max<int64_t>(1, (num_rows > 8 ? even : wanted) / unit) * unit;
      for (int64_t tile = 0; tile < segments[i].matrix.tiles(); tile += step)
        chunks.push_back({static_cast<int>(i), tile, std::min(tile + step, segments[i].matrix.tiles())});
    }
  }

  void run(Program& program, int number) override {
    if (num_rows == 0) return;   // a chunk inside a prompt asks for no logits
    Worker& worker = *program.workers_[number];
    Stopwatch watch = program.stopwatch(*this, number);
    if (own_rows) {
      compute_own_rows(program, worker, number);
    } else if (!before.empty() || needs_codes) {
      share_rows(program, worker);
      program.pool_->barrier();
    }
    watch.mark(&PhaseTime::rows);
    if (input >= 0 && own_rows) run_own_chunks(program, worker);
    if (input >= 0 && !own_rows) run_chunks(program, worker);
    if (own_rows) restore_view(program, worker);
    program.prefetch_after(*this, number);
    watch.mark(&PhaseTime::work);
    program.pool_->barrier();
    watch.mark(&PhaseTime::wait);
  }

  void restore_view(Program& program, Worker& worker) {
    for (int output : outputs) worker.view[output] = program.buffers_[output].data.get();
  }

  void compute_own_rows(Program& program, Worker& worker, int number) {
    if (number != 0) {   // worker 0 writes what later phases read
      float* p = worker.rows.get();
      for (int output : outputs) {
        worker.view[output] = p;
        p += num_rows * ((program.buffers_[output].width + 15) / 16 * 16);
      }
    }
    for (int64_t row = 0; row < num_rows; row++) compute_row(program, worker, row, number == 0, worker.quantized);
  }

  void share_rows(Program& program, Worker& worker) {
    const int64_t step = std::clamp<int64_t>(num_rows / (8 * program.pool_->size()), 1, 16);
    for (int64_t first; (first = next_rows.fetch_add(step)) < num_rows;) {
      program.poll(worker);
      for (int64_t row = first; row < std::min(first + step, num_rows); row++)
        compute_row(program, worker, row, true, program.quantized_);
    }
  }

  void compute_row(Program& program, Worker& worker, int64_t row, bool stores, QuantizedRows& codes) {
    for (const RowOp& op : before)
      if (op.kind != RowKind::Store || stores) program_row(program, worker, op, row);
    if (!needs_codes) return;
    const float* values = worker.view[input] + row * heads * columns;
    for (int64_t head = 0; head < heads; head++)   // a head's rows lie together
      codes.quantize(*program.kernels_, values + head * columns, head * num_rows + row, columns);
  }

  void run_own_chunks(Program& program, Worker& worker) {
    int helped = 0;
    const auto items = static_cast<int64_t>(chunks.size());
    for (int64_t item; (item = queue.take(items, worker.number, helped)) >= 0;)
      run_chunk(program, worker, chunks[item], 0, num_rows, queue.is_last(items, item) ? nullptr : weights_of(chunks[item + 1]));
  }

  // Blocks of tokens whose activations stay in the cache, one after the other; within each all chunks.
  void run_chunks(Program& program, Worker& worker) {
    const int64_t blocks = (num_rows + block - 1) / block, per_block = static_cast<int64_t>(chunks.size());
    for (int64_t item; (item = next_item.fetch_add(1)) < blocks * per_block;) {
      program.poll(worker);
      const int64_t first = item / per_block * block;
      run_chunk(program, worker, chunks[item % per_block], first, std::min(block, num_rows - first), nullptr);
    }
  }

  Activations activations(Program& program, Worker& worker, const Segment& segment, const PackedMatrix& matrix, int64_t first,
                          int64_t count) {
    if (program.int8_ && !is_plain(matrix.layout))
      return (own_rows ? worker.quantized : program.quantized_).rows(segment.head * num_rows + first, count, columns);
    const float* values = worker.view[input] + (first * heads + segment.head) * columns;
    return {count, columns, padded_columns(columns), values, heads * columns, nullptr, nullptr, nullptr};
  }

  const uint8_t* weights_of(const Chunk& chunk) const { return segments[chunk.segment].matrix.tile(chunk.first_tile); }

  // next: the weights that this worker reads after those of the chunk, or null.
  void run_chunk(Program& program, Worker& worker, const Chunk& chunk, int64_t first, int64_t count, const uint8_t* next) {
    const Segment& segment = segments[chunk.segment];
    const Kernels& kernels = *program.kernels_;
    const int64_t first_column = chunk.first_tile * kTileRows;
    const int64_t width = std::min(chunk.last_tile * kTileRows, segment.matrix.rows) - first_column;
    int64_t stride = (chunk.last_tile - chunk.first_tile) * kTileRows;
    float* y = worker.chunk.get();
    if (stays_in_place(segment)) {
      stride = program.buffers_[segment.out].width;
      y = worker.view[segment.out] + first * stride + segment.out_column + first_column;
    }
    const TileRange tiles = {segment.matrix, chunk.first_tile, chunk.last_tile,
                             segment.gated ? segment.up.tile(chunk.first_tile) : next};
    kernels.linear(tiles, activations(program, worker, segment, segment.matrix, first, count), y, stride);
    if (segment.gated)
      kernels.linear({segment.up, chunk.first_tile, chunk.last_tile, next},
                     activations(program, worker, segment, segment.up, first, count), worker.chunk_up.get(), stride);
    for (int64_t t = 0; t < count; t++)
      finish_row(program, worker, segment, first + t, first_column, width, y + t * stride,
                 segment.gated ? worker.chunk_up.get() + t * stride : nullptr);
  }

  // True where the products go to their buffer at once: nothing else is to be read there, and they are no heads for other places.
  static bool stays_in_place(const Segment& segment) {
    return !segment.gated && segment.residual < 0 && !segment.pages && !segment.head_stride;
  }

  // What follows on `width` outputs of one token, from column `first` on; the last step writes to where they belong.
  void finish_row(Program& program, Worker& worker, const Segment& segment, int64_t row, int64_t first, int64_t width,
                  float* y, float* up) {
    const Kernels& kernels = *program.kernels_;
    const int64_t out_width = segment.pages ? 0 : program.buffers_[segment.out].width;
    float* out = segment.pages ? y : worker.view[segment.out] + row * out_width + first;
    if (segment.bias) kernels.add(y, segment.bias + first, width, y);
    if (segment.gated) {
      if (segment.up_bias) kernels.add(up, segment.up_bias + first, width, up);
      float* target = segment.residual < 0 ? out : y;
      kernels.gated_activation(y, up, segment.activation, width, target);
      y = target;
    }
    if (segment.activated) kernels.gated_activation(y, nullptr, segment.activation, width, y);
    if (segment.scale != 1.0f) kernels.scale(y, segment.scale, width, y);
    if (segment.softcap != 0.0f) kernels.softcap(y, segment.softcap, width, y);
    if (segment.head_dim) finish_heads(program, worker, segment, row, first, width, y);
    if (segment.residual >= 0) {
      const int64_t stride = program.buffers_[segment.residual].width;
      kernels.add(worker.view[segment.residual] + row * stride + first, y, width, out);
    }
  }

  void finish_heads(Program& program, Worker& worker, const Segment& segment, int64_t row, int64_t first, int64_t width,
                    float* y) {
    const Kernels& kernels = *program.kernels_;
    for (int64_t offset = 0; offset < width; offset += segment.head_dim) {
      float* head = y + offset;
      if (segment.head_norm) {
        const float* weight = segment.head_norm + (first + offset) % segment.num_norms;
        if (segment.takes_mean) kernels.layer_norm(head, weight, nullptr, segment.eps, segment.head_dim, head);
        else kernels.rms_norm(head, weight, segment.eps, segment.head_dim, head);
      }
      if (segment.cos >= 0) rotate(program, worker, kernels, segment.cos, segment.sin, row, head);
      const int64_t head_number = (first + offset) / segment.head_dim;
      if (segment.pages) {
        kernels.attention->store(*segment.pages, head_number, program.input_->maps[segment.group].slots[row],
                                 segment.is_value ? nullptr : head, segment.is_value ? head : nullptr);
      }
      if (segment.head_stride) {
        float* out = worker.view[segment.out] + row * program.buffers_[segment.out].width + segment.out_column;
        std::memcpy(out + head_number * segment.head_stride, head, segment.head_dim * sizeof(float));
      }
    }
  }

  // The weights this worker begins with: memory fetches them while the workers meet and compute their rows.
  bool prefetch(int worker) const override {
    if (!own_rows || input < 0 || chunks.empty()) return true;
    const auto items = static_cast<int64_t>(chunks.size());
    const Chunk& chunk = chunks[std::min(queue.begin(items, worker), items - 1)];
    prefetch_tiles(segments[chunk.segment].matrix, chunk.first_tile, chunk.last_tile);
    return true;
  }

  static void rotate(Program& program, Worker& worker, const Kernels& kernels, int cos, int sin, int64_t row, float* head) {
    const int64_t half = program.buffers_[cos].width;
    kernels.rotary(head, worker.view[cos] + row * half, worker.view[sin] + row * half, half);
  }

  static void program_row(Program& program, Worker& worker, const RowOp& op, int64_t row);
};

void Program::MatrixPhase::program_row(Program& program, Worker& worker, const RowOp& op, int64_t row) {
  const Kernels& kernels = *program.kernels_;
  const StepInput& step = *program.input_;
  auto at = [&](int buffer, int64_t r) { return worker.view[buffer] + r * program.buffers_[buffer].width; };
  float* out = op.out < 0 ? nullptr : at(op.out, row);
  const int64_t width = op.out < 0 ? 0 : program.buffers_[op.out].width;
  switch (op.kind) {
    case RowKind::Embedding:
      kernels.dequantize_row(op.table, (op.source ? step.positions : step.token_ids)[row], out);
      if (op.factor != 1.0f) kernels.scale(out, op.factor, width, out);
      break;
    case RowKind::Angles: {
      const Frequencies& f = step.frequencies[op.source];
      const float* inverse = f.values + (f.per_token ? row * f.half : 0);
      const float position = static_cast<float>(step.positions[row]);
      float* sin = at(op.out2, row);
      for (int64_t i = 0; i < f.half; i++) {
        const float angle = position * inverse[i];
        out[i] = std::cos(angle) * op.factor;
        sin[i] = std::sin(angle) * op.factor;
      }
      break;
    }
    case RowKind::RmsNorm:
      for (int64_t i = 0; i < width; i += op.width)
        kernels.rms_norm(at(op.a, row) + i, op.weight + i % op.num_weights, op.factor, op.width, out + i);
      break;
    case RowKind::LayerNorm:
      for (int64_t i = 0; i < width; i += op.width)
        kernels.layer_norm(at(op.a, row) + i, op.weight + i % op.num_weights, op.bias, op.factor, op.width, out + i);
      break;
    case RowKind::Rotary:
      std::memcpy(out, at(op.a, row), width * sizeof(float));
      for (int64_t i = 0; i < width; i += op.width) rotate(program, worker, kernels, op.b, op.c, row, out + i);
      break;
    case RowKind::Gated:
      kernels.gated_activation(at(op.a, row), op.b < 0 ? nullptr : at(op.b, row), op.activation, width, out);
      break;
    case RowKind::Sigmoid: kernels.scale(at(op.a, row), sigmoid(*at(op.b, row)), width, out); break;
    case RowKind::Add: kernels.add(at(op.a, row), at(op.b, row), width, out); break;
    case RowKind::Scale: kernels.scale(at(op.a, row), op.factor, width, out); break;
    case RowKind::Growth: {
      const double lengths = static_cast<double>(step.positions[row] / op.width);
      kernels.scale(at(op.a, row), static_cast<float>(1.0 + op.factor * std::log1p(lengths)), width, out);
      break;
    }
    case RowKind::Softcap: kernels.softcap(at(op.a, row), op.factor, width, out); break;
    case RowKind::Gather: {
      const float* from = at(op.a, row);
      for (int64_t i = 0; i < width; i++) out[i] = from[op.order[i]];
      break;
    }
    case RowKind::Take: std::memcpy(out, at(op.a, step.rows[row]), width * sizeof(float)); break;
    case RowKind::Fit: {
      const int64_t heads = program.buffers_[op.a].width / op.width, fitted = width / heads;
      const int64_t kept = std::min(op.width, fitted);
      std::memset(out, 0, width * sizeof(float));
      for (int64_t head = 0; head < heads; head++)
        std::memcpy(out + head * fitted, at(op.a, row) + head * op.width, kept * sizeof(float));
      break;
    }
    case RowKind::Join: {
      const int64_t heads = program.buffers_[op.a].width / op.width, joined = width / heads, rest = joined - op.width;
      for (int64_t head = 0; head < heads; head++) {
        std::memcpy(out + head * joined, at(op.a, row) + head * op.width, op.width * sizeof(float));
        std::memcpy(out + head * joined + op.width, at(op.b, row) + head * rest, rest * sizeof(float));
      }
      break;
    }
    case RowKind::Store: {
      const int64_t heads = program.buffers_[op.a].width / op.width;
      for (int64_t head = 0; head < heads; head++) {
        const int64_t first = head * op.width;
        const float* value = op.b < 0 ? nullptr : at(op.b, row) + first;
        kernels.attention->store(*op.pages, head, step.maps[op.group].slots[row], at(op.a, row) + first, value);
      }
      break;
    }
  }
}

void Program::add_matrix_phase(Domain domain, std::vector<RowOp> before, int input, std::vector<Segment> segments) {
  auto phase = std::make_unique<MatrixPhase>();
  phase->domain = domain;
  phase->input = input;
  for (const RowOp& op : before)
    for (int output : {op.out, op.out2})
      if (output >= 0) phase->outputs.push_back(output);
  for (const Segment& segment : segments) {
    phase->heads = std::max(phase->heads, segment.head + 1);
    phase->needs_codes |= int8_ && !is_plain(segment.matrix.layout);
    if (segment.gated) phase->needs_codes |= int8_ && !is_plain(segment.up.layout);
  }
  phase->before = std::move(before);
  phase->segments = std::move(segments);
  add_phase(std::move(phase));
}

}  // namespace llmctl
