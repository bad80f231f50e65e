// Programs for Python: plan.py builds them, NativeOps runs them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "kv_memory.hpp"
#include "packed_weight.hpp"
#include "program.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// What the layers of one group have in common. window: the most tokens any of them sees, 0 where one sees all, -1 where none
// attends.
struct Group {
  int64_t num_pages = kUnlimited;   // that all of the memories have
  int64_t window = -1;
  int64_t anchors = 0;

  int64_t num_slots() const { return num_pages == kUnlimited ? kUnlimited : num_pages * kPageTokens; }
  void see(int64_t tokens) { window = tokens == 0 || window == 0 ? 0 : std::max(window, tokens); }
};

// What is kept alive for a program: weights, vectors, pages.
struct Owner {
  std::vector<nb::object> owners;
  std::vector<Group> groups;

  Group& limits(int number) {
    require(number >= 0, "a group has a number from 0 on");
    groups.resize(std::max(groups.size(), static_cast<size_t>(number) + 1));
    return groups[number];
  }
  void adopt(const Owner& other) {
    owners.insert(owners.end(), other.owners.begin(), other.owners.end());
    for (size_t i = 0; i < other.groups.size(); i++) {
      Group& own = limits(static_cast<int>(i));
      own.num_pages = std::min(own.num_pages, other.groups[i].num_pages);
    }
  }
};

// A program with everything it points to, and what a step may ask of it.
struct OwningProgram : Owner {
  Program program;
  int64_t vocabulary = kUnlimited;   // ids that every embedding has a row for
  int64_t positions = kUnlimited;    // the same of embedded positions
  std::vector<int64_t> halves;       // of the frequencies, source by source; 0: not read
  std::vector<bool> is_rows;         // buffer by buffer
  std::atomic<bool> running{false};
  const bool int8;
  OwningProgram(std::shared_ptr<ThreadPool> pool, bool int8) : program(std::move(pool), active_kernels(), int8), int8(int8) {}

  void limit_by(const RowOp& op) {
    if (op.kind == RowKind::Embedding) {
      int64_t& limit = op.source ? positions : vocabulary;
      limit = std::min(limit, op.table.rows);
    }
    if (op.kind != RowKind::Angles) return;
    halves.resize(std::max(halves.size(), static_cast<size_t>(op.source) + 1));
    halves[op.source] = program.width(op.out);
  }
};

struct OwningRowOp : RowOp, Owner {
  int64_t order_size = 0;
  explicit OwningRowOp(RowKind kind) : RowOp{kind} {}
};

struct OwningSegment : Segment, Owner {};

// A program computes one step at a time: the GIL, free meanwhile, does not keep a second thread away.
class Exclusive {
 public:
  explicit Exclusive(std::atomic<bool>& running) : running_(running) {
    if (running_.exchange(true)) throw std::runtime_error("the program is running already, in another thread");
  }
  ~Exclusive() { running_.store(false); }

 private:
  std::atomic<bool>& running_;
};

// Of float32 already: a converted copy would be gone when the program runs.
template <class T>
const float* vector_of(T& holder, const nb::object& array) {
  const float* numbers = nb::cast<Numbers>(array, false).data();
  holder.owners.push_back(array);
  return numbers;
}

// A permutation: whatever the buffers' widths, nothing outside a row of as many elements is read.
const int32_t* order_of(OwningRowOp& holder, const nb::object& array) {
  const auto order = nb::cast<nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(array, false);
  const auto count = static_cast<int64_t>(order.size());
  std::vector<bool> seen(order.size());
  for (int64_t i = 0; i < count; i++) {
    const int32_t place = order.data()[i];
    require(place >= 0 && place < count && !seen[place], "an order names every element once");
    seen[place] = true;
  }
  holder.order_size = count;
  holder.owners.push_back(array);
  return order.data();
}

template <class T>
PackedMatrix matrix_of(T& holder, const nb::object& weight, int64_t index = 0) {
  holder.owners.push_back(weight);
  return nb::cast<const PackedWeight&>(weight).matrix(index);
}

template <class T>
const KvPages* pages_of(T& holder, const nb::object& pages, int group) {
  const KvMemory& memory = nb::cast<const KvMemory&>(pages);
  holder.owners.push_back(pages);
  Group& known = holder.limits(group);
  known.num_pages = std::min(known.num_pages, memory.num_pages());
  return &memory.pages();
}

void add_matrix_phase(OwningProgram& self, bool is_rows, const std::vector<OwningRowOp*>& before, int input,
                      const std::vector<OwningSegment*>& segments) {
  std::vector<RowOp> ops;
  std::vector<Segment> parts;
  for (OwningRowOp* op : before) {
    require(op->kind != RowKind::Gather || (op->a >= 0 && op->out >= 0 && self.program.width(op->a) == op->order_size &&
                                            self.program.width(op->out) == op->order_size),
            "an order is as long as the rows it is for");
    require((op->kind != RowKind::RmsNorm && op->kind != RowKind::LayerNorm) ||
                (op->width > 0 && op->num_weights > 0 && op->num_weights % op->width == 0),
            "a norm has weights for as many elements as it is over");
    ops.push_back(*op);
    self.adopt(*op);
    self.limit_by(*op);
  }
  for (OwningSegment* segment : segments) {
    parts.push_back(*segment);
    self.adopt(*segment);
  }
  self.program.add_matrix_phase(is_rows ? Domain::Rows : Domain::Tokens, std::move(ops), input, std::move(parts));
}

// One of gate, up and down: a list of weights, each of one or more experts, and their biases, an array or None.
ExpertMatrices experts_of(OwningProgram& self, const std::vector<nb::object>& weights, const nb::object& bias) {
  ExpertMatrices experts;
  for (const nb::object& object : weights) {
    const PackedWeight& weight = nb::cast<const PackedWeight&>(object);
    for (int64_t i = 0; i < weight.matrices(); i++) experts.matrices.push_back(weight.matrix(i));
    self.owners.push_back(object);
  }
  if (bias.is_none()) return experts;
  const auto numbers = nb::cast<Numbers>(bias, false);
  require(!experts.matrices.empty() &&
              static_cast<int64_t>(numbers.size()) == static_cast<int64_t>(experts.matrices.size()) * experts[0].rows,
          "one bias a row of the experts' matrices is needed");
  experts.bias = vector_of(self, bias);
  return experts;
}

SharedExpert shared_of(OwningProgram& self, const nb::object& down, const nb::object& bias) {
  SharedExpert shared;
  if (!down.is_none()) shared.down = matrix_of(self, down);
  if (bias.is_none()) return shared;
  require(static_cast<int64_t>(nb::cast<Numbers>(bias, false).size()) == shared.down.rows, "one bias a row is needed");
  shared.bias = vector_of(self, bias);
  return shared;
}

void require_widths(const OwningProgram& self, const MoeBuffers& buffers, const Moe& moe) {
  auto fits = [&](int buffer, int64_t width) { return buffer < 0 || self.program.width(buffer) == width; };
  require(buffers.x >= 0 && buffers.logits >= 0 && buffers.out >= 0 && (buffers.shared >= 0) == (moe.shared_size() > 0),
          "a mixture of experts lacks a buffer");
  require(fits(buffers.x, moe.hidden()) && fits(buffers.out, moe.hidden()) && fits(buffers.residual, moe.hidden()) &&
              fits(buffers.logits, moe.num_experts()) && fits(buffers.shared, moe.shared_size()) && fits(buffers.shared_gate, 1),
          "the buffers are not as wide as the experts");
}

// experts: gate, up and down. shared: None, or the second matrix of the expert that all tokens pass. counts: int64 [experts], to
// which every run adds.
void add_moe_phase(OwningProgram& self, const MoeBuffers& buffers, const std::vector<std::vector<nb::object>>& experts,
                   const std::vector<nb::object>& biases, const nb::object& shared, const nb::object& shared_bias,
                   const Routing& routing, Activation activation, const nb::object& counts) {
  require(experts.size() == 3 && biases.size() == 3, "gate, up and down are needed");
  auto counters = nb::cast<nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(counts, false);
  require(static_cast<int64_t>(counters.size()) == routing.num_experts, "one counter an expert is needed");
  self.owners.push_back(counts);
  auto moe = std::make_unique<Moe>(active_kernels(), routing, experts_of(self, experts[0], biases[0]),
                                   experts_of(self, experts[1], biases[1]), experts_of(self, experts[2], biases[2]),
                                   shared_of(self, shared, shared_bias), activation, self.int8, counters.data());
  require_widths(self, buffers, *moe);
  self.program.add_moe_phase(buffers, std::move(moe));
}

void require_range(const int64_t* values, int64_t count, int64_t lowest, int64_t end, const char* what) {
  for (int64_t i = 0; i < count; i++)
    if (values[i] < lowest || values[i] >= end)
      throw std::invalid_argument(std::string(what) + " must be " + std::to_string(lowest) + " to " + std::to_string(end - 1) +
                                  ", found " + std::to_string(values[i]));
}

void require_range(const Ids& values, int64_t lowest, int64_t end, const char* what) {
  require_range(values.data(), static_cast<int64_t>(values.size()), lowest, end, what);
}

std::vector<AttentionSequence> sequences_of(const std::vector<int64_t>& cu_seqlens_q, const std::vector<int64_t>& context_lens,
                                            const std::vector<Ids>& tables, int64_t tokens, const Group& group) {
  const size_t count = context_lens.size();
  require(cu_seqlens_q.size() == count + 1 && tables.size() == count, "one range and one block table a sequence");
  require(cu_seqlens_q.front() == 0 && cu_seqlens_q.back() == tokens, "cu_seqlens_q must cover the tokens");
  std::vector<AttentionSequence> sequences;
  for (size_t s = 0; s < count; s++) {
    const int64_t queries = cu_seqlens_q[s + 1] - cu_seqlens_q[s], pages = (context_lens[s] + kPageTokens - 1) / kPageTokens;
    require(queries >= 0 && queries <= context_lens[s], "a sequence has more queries than keys");
    require(static_cast<int64_t>(tables[s].size()) >= pages, "a block table is too short");
    // What no query sees is never read: its page may be gone.
    const int64_t first = group.window > 0 ? std::max<int64_t>(0, context_lens[s] - queries - group.window + 1) : 0;
    const int64_t gone = group.window < 0 ? pages : first / kPageTokens, anchors = std::min<int64_t>(gone, group.anchors > 0);
    require_range(tables[s].data(), group.window < 0 ? 0 : anchors, 0, group.num_pages, "a page of a block table");
    require_range(tables[s].data() + gone, pages - gone, 0, group.num_pages, "a page of a block table");
    sequences.push_back({cu_seqlens_q[s], queries, context_lens[s], tables[s].data()});
  }
  return sequences;
}

std::vector<PageMap> maps_of(const Owner& self, const std::vector<Ids>& slots, const std::vector<int64_t>& cu_seqlens_q,
                             const std::vector<std::vector<int64_t>>& context_lens, const std::vector<std::vector<Ids>>& tables,
                             int64_t tokens) {
  const size_t count = slots.size();
  require(count >= self.groups.size() && context_lens.size() == count && tables.size() == count,
          "slots, context lengths and block tables of every group are needed");
  std::vector<PageMap> maps;
  for (size_t i = 0; i < count; i++) {
    const Group group = i < self.groups.size() ? self.groups[i] : Group{};
    require(static_cast<int64_t>(slots[i].size()) == tokens, "one slot a token");
    require_range(slots[i], -1, group.num_slots(), "a slot");
    maps.push_back({slots[i].data(), sequences_of(cu_seqlens_q, context_lens[i], tables[i], tokens, group)});
  }
  return maps;
}

std::vector<Frequencies> frequencies_of(const OwningProgram& self, const std::vector<Numbers>& inv_freqs, int64_t tokens) {
  require(inv_freqs.size() >= self.halves.size(), "frequencies of every rope are needed");
  std::vector<Frequencies> frequencies;
  for (size_t source = 0; source < inv_freqs.size(); source++) {
    const Numbers& values = inv_freqs[source];
    require(values.ndim() == 1 || values.ndim() == 2, "frequencies have one or two axes");
    const bool per_token = values.ndim() == 2;
    const int64_t half = static_cast<int64_t>(values.shape(values.ndim() - 1));
    require(!per_token || static_cast<int64_t>(values.shape(0)) == tokens, "one row of frequencies a token");
    require(source >= self.halves.size() || self.halves[source] == 0 || self.halves[source] == half,
            "frequencies are not as many as the rope turns pairs");
    frequencies.push_back({values.data(), half, per_token});
  }
  return frequencies;
}

// What a program asks every now and then: Python's signal handlers, which may raise, then `poll`, which may as well.
std::function<void()> with_signals(const nb::object& poll) {
  if (poll.is_none()) return {};
  return [&poll] {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    poll();
  };
}

// Runs a step; the buffer `result` as an array [rows, width], valid until the next run. poll: None, or what is called every
// now and then; an exception of it ends the step.
// slots, context_lens and tables: group by group.
Logits run(nb::handle_t<OwningProgram> handle, const Ids& token_ids, const Ids& positions, const std::vector<Ids>& slots,
           const Ids& rows, const std::vector<int64_t>& cu_seqlens_q, const std::vector<std::vector<int64_t>>& context_lens,
           const std::vector<std::vector<Ids>>& tables, const std::vector<Numbers>& inv_freqs, int result,
           const nb::object& poll) {
  OwningProgram& self = nb::cast<OwningProgram&>(handle);
  const Exclusive entered(self.running);
  const int64_t tokens = static_cast<int64_t>(token_ids.size());
  require(positions.size() == token_ids.size(), "one position a token");
  require(result >= 0 && result < static_cast<int>(self.is_rows.size()), "the result is none of the buffers");
  require(self.is_rows[result] || static_cast<int64_t>(rows.size()) <= tokens, "more rows than tokens are asked for");
  require_range(token_ids, 0, self.vocabulary, "a token id");
  require_range(positions, 0, self.positions, "a position");
  require_range(rows, 0, tokens, "a row of logits");
  StepInput input{tokens, token_ids.data(), positions.data(), static_cast<int64_t>(rows.size()), rows.data(),
                  maps_of(self, slots, cu_seqlens_q, context_lens, tables, tokens), frequencies_of(self, inv_freqs, tokens)};
  {
    nb::gil_scoped_release release;
    self.program.run(input, with_signals(poll));
  }
  return Logits(const_cast<float*>(self.program.data(result)), {rows.size(), static_cast<size_t>(self.program.width(result))},
                handle);
}

}  // namespace

void bind_program(nb::module_& m) {
  nb::enum_<Activation>(m, "Activation")
      .value("Silu", Activation::Silu)
      .value("GeluTanh", Activation::GeluTanh)
      .value("Gelu", Activation::Gelu)
      .value("ClampedSwiglu", Activation::ClampedSwiglu);
  nb::enum_<RowKind>(m, "RowKind")
      .value("Embedding", RowKind::Embedding)
      .value("Angles", RowKind::Angles)
      .value("RmsNorm", RowKind::RmsNorm)
      .value("LayerNorm", RowKind::LayerNorm)
      .value("Rotary", RowKind::Rotary)
      .value("Gated", RowKind::Gated)
      .value("Sigmoid", RowKind::Sigmoid)
      .value("Add", RowKind::Add)
      .value("Scale", RowKind::Scale)
      .value("Growth", RowKind::Growth)
      .value("Softcap", RowKind::Softcap)
      .value("Take", RowKind::Take)
      .value("Store", RowKind::Store)
      .value("Fit", RowKind::Fit)
      .value("Join", RowKind::Join)
      .value("Gather", RowKind::Gather);
  nb::class_<KvMemory>(m, "KvPages")
      .def("__init__",   // value_type: None for that of the keys
           [](KvMemory* self, int64_t num_pages, int64_t kv_heads, int64_t head_dim, const std::string& type, int64_t latent,
              const std::optional<std::string>& value_type, bool rotates) {
             new (self) KvMemory(num_pages, kv_heads, head_dim, type, value_type.value_or(type), latent, rotates);
           }, nb::arg("num_pages"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("type"), nb::arg("latent") = 0,
           nb::arg("value_type") = nb::none(), nb::arg("rotates") = true)
      .def_prop_ro("head_dim", [](const KvMemory& self) { return self.pages().shape.head_dim; })
      .def_prop_ro("latent", [](const KvMemory& self) { return self.pages().shape.latent; })
      .def("copy_page", &KvMemory::copy_page, nb::arg("source"), nb::arg("target"))
      .def("page",
           [](const KvMemory& self, int64_t index) {
             return nb::bytes(reinterpret_cast<const char*>(self.page(index)), size_t(self.pages().page_stride));
           }, nb::arg("index"))
      .def("set_page",
           [](KvMemory& self, int64_t index, const nb::bytes& bytes) {
             if (int64_t(bytes.size()) != self.pages().page_stride) throw nb::value_error("not the bytes of one page");
             self.set_page(index, static_cast<const uint8_t*>(bytes.data()));
           }, nb::arg("index"), nb::arg("bytes"))
      .def_prop_ro("nbytes", &KvMemory::bytes);
  nb::class_<OwningRowOp>(m, "RowOp")
      .def("__init__", [](OwningRowOp* self, RowKind kind) { new (self) OwningRowOp(kind); })
      .def_rw("out", &OwningRowOp::out)
      .def_rw("out2", &OwningRowOp::out2)
      .def_rw("a", &OwningRowOp::a)
      .def_rw("b", &OwningRowOp::b)
      .def_rw("c", &OwningRowOp::c)
      .def_rw("source", &OwningRowOp::source)
      .def_rw("width", &OwningRowOp::width)
      .def_rw("factor", &OwningRowOp::factor)
      .def_rw("activation", &OwningRowOp::activation)
      .def("set_weight",
           [](OwningRowOp& self, const nb::object& array) {
             self.weight = vector_of(self, array);
             self.num_weights = static_cast<int64_t>(nb::cast<Numbers>(array, false).size());
           })
      .def("set_bias", [](OwningRowOp& self, const nb::object& array) { self.bias = vector_of(self, array); })
      .def("set_order", [](OwningRowOp& self, const nb::object& array) { self.order = order_of(self, array); })
      .def("set_table", [](OwningRowOp& self, const nb::object& weight) { self.table = matrix_of(self, weight); })
      .def("set_pages", [](OwningRowOp& self, const nb::object& pages, int group) {
        self.pages = pages_of(self, pages, group);
        self.group = group;
      });
  nb::class_<OwningSegment>(m, "Segment")
      .def(nb::init<>())
      .def_rw("activation", &OwningSegment::activation)
      .def_rw("activated", &OwningSegment::activated)
      .def_rw("scale", &OwningSegment::scale)
      .def_rw("softcap", &OwningSegment::softcap)
      .def_rw("head_dim", &OwningSegment::head_dim)
      .def_rw("cos", &OwningSegment::cos)
      .def_rw("sin", &OwningSegment::sin)
      .def_rw("residual", &OwningSegment::residual)
      .def_rw("out", &OwningSegment::out)
      .def_rw("head", &OwningSegment::head)
      .def_rw("out_column", &OwningSegment::out_column)
      .def_rw("head_stride", &OwningSegment::head_stride)
      .def("set_matrix",
           [](OwningSegment& self, const nb::object& weight, int64_t index) { self.matrix = matrix_of(self, weight, index); },
           nb::arg("weight"), nb::arg("index") = 0)
      .def("set_bias", [](OwningSegment& self, const nb::object& array) { self.bias = vector_of(self, array); })
      .def("set_up",
           [](OwningSegment& self, const nb::object& weight, const nb::object& bias) {
             self.gated = true;
             self.up = matrix_of(self, weight);
             if (!bias.is_none()) self.up_bias = vector_of(self, bias);
           }, nb::arg("weight"), nb::arg("bias").none())
      .def("set_head_norm",
           [](OwningSegment& self, const nb::object& weight, float eps, bool takes_mean) {
             self.head_norm = vector_of(self, weight);
             self.num_norms = static_cast<int64_t>(nb::cast<Numbers>(weight, false).size());
             self.eps = eps;
             self.takes_mean = takes_mean;
           })
      .def("set_pages", [](OwningSegment& self, const nb::object& pages, int group, bool is_value) {
        self.pages = pages_of(self, pages, group);
        self.group = group;
        self.is_value = is_value;
      });
  nb::class_<MoeBuffers>(m, "MoeBuffers")
      .def(nb::init<>())
      .def_rw("x", &MoeBuffers::x)
      .def_rw("logits", &MoeBuffers::logits)
      .def_rw("shared", &MoeBuffers::shared)
      .def_rw("shared_gate", &MoeBuffers::shared_gate)
      .def_rw("residual", &MoeBuffers::residual)
      .def_rw("out", &MoeBuffers::out);
  nb::class_<OwningProgram>(m, "Program")
      .def(nb::init<std::shared_ptr<ThreadPool>, bool>(), nb::arg("pool"), nb::arg("int8"))
      .def("add_buffer",
           [](OwningProgram& self, int64_t width, bool is_rows) {
             self.is_rows.push_back(is_rows);
             return self.program.add_buffer(width, is_rows ? Domain::Rows : Domain::Tokens);
           })
      .def("add_matrix_phase", &add_matrix_phase)
      .def("add_moe_phase", &add_moe_phase, nb::arg("buffers"), nb::arg("experts"), nb::arg("biases"),
           nb::arg("shared").none(), nb::arg("shared_bias").none(), nb::arg("routing"), nb::arg("activation"), nb::arg("counts"))
      .def("add_attention_phase",
           [](OwningProgram& self, int queries, int out, const nb::object& pages, int group, int64_t num_heads, float scale,
              int64_t window, float softcap, const nb::object& sinks, int64_t anchors) {
             require(anchors >= 0 && anchors <= kPageTokens, "anchors are at most a page");
             require(sinks.is_none() || nb::cast<Numbers>(sinks, false).size() == static_cast<size_t>(num_heads),
                     "one sink a query head");
             const float* numbers = sinks.is_none() ? nullptr : vector_of(self, sinks);
             const KvPages* memory = pages_of(self, pages, group);
             self.limits(group).see(window);
             self.limits(group).anchors = std::max(self.limits(group).anchors, anchors);
             self.program.add_attention_phase(queries, out, memory, group, num_heads, scale, window, softcap, numbers, anchors);
           }, nb::arg("queries"), nb::arg("out"), nb::arg("pages"), nb::arg("group"), nb::arg("num_heads"), nb::arg("scale"),
           nb::arg("window"), nb::arg("softcap"), nb::arg("sinks") = nb::none(), nb::arg("anchors") = 0)
      .def("run", &run, nb::arg("token_ids"), nb::arg("positions"), nb::arg("slots"), nb::arg("rows"), nb::arg("cu_seqlens_q"),
           nb::arg("context_lens"), nb::arg("block_tables"), nb::arg("inv_freqs"), nb::arg("result"),
           nb::arg("poll") = nb::none())
      .def("time_phases", [](OwningProgram& self, bool on) { self.program.time_phases(on); })
      .def_prop_ro("times",
                   [](const OwningProgram& self) {   // (row operations, work, waiting) of every phase, in seconds
                     std::vector<std::vector<double>> times;
                     for (const auto& t : self.program.times()) times.push_back({t.rows, t.work, t.wait});
                     return times;
                   })
      .def_prop_ro("nbytes", [](const OwningProgram& self) { return self.program.bytes(); });
}

}  // namespace llmctl
