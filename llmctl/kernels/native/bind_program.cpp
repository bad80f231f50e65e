// Programs for Python: plan.py builds them, NativeOps runs them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
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

// A program with everything it points to: weights, vectors and pages stay alive as long as it does.
struct OwningProgram {
  Program program;
  std::vector<nb::object> owners;
  int64_t vocabulary = std::numeric_limits<int64_t>::max();   // ids that every embedding has a row for
  std::vector<int64_t> halves;                                // of the frequencies, source by source; 0: not read
  OwningProgram(std::shared_ptr<ThreadPool> pool, bool int8) : program(std::move(pool), active_kernels(), int8) {}
};

struct OwningRowOp : RowOp {
  std::vector<nb::object> owners;
};

struct OwningSegment : Segment {
  std::vector<nb::object> owners;
};

// Of float32 already: a converted copy would be gone when the program runs.
template <class T>
const float* vector_of(T& holder, const nb::object& array) {
  const float* numbers = nb::cast<Numbers>(array, false).data();
  holder.owners.push_back(array);
  return numbers;
}

template <class T>
PackedMatrix matrix_of(T& holder, const nb::object& weight) {
  holder.owners.push_back(weight);
  return nb::cast<const PackedWeight&>(weight).matrix();
}

template <class T>
const KvPages* pages_of(T& holder, const nb::object& pages) {
  holder.owners.push_back(pages);
  return &nb::cast<const KvMemory&>(pages).pages();
}

void add_matrix_phase(OwningProgram& self, bool is_rows, const std::vector<OwningRowOp*>& before, int input,
                      const std::vector<OwningSegment*>& segments) {
  std::vector<RowOp> ops;
  std::vector<Segment> parts;
  auto keep = [&](const std::vector<nb::object>& owners) {
    self.owners.insert(self.owners.end(), owners.begin(), owners.end());
  };
  for (OwningRowOp* op : before) {
    ops.push_back(*op);
    keep(op->owners);
  }
  for (OwningSegment* segment : segments) {
    parts.push_back(*segment);
    keep(segment->owners);
  }
  self.program.add_matrix_phase(is_rows ? Domain::Rows : Domain::Tokens, std::move(ops), input, std::move(parts));
}

std::vector<AttentionSequence> sequences_of(const std::vector<int64_t>& cu_seqlens_q, const std::vector<int64_t>& context_lens,
                                            const std::vector<Ids>& tables, int64_t tokens) {
  const size_t count = context_lens.size();
  require(cu_seqlens_q.size() == count + 1 && tables.size() == count, "one range and one block table a sequence");
  require(cu_seqlens_q.front() == 0 && cu_seqlens_q.back() == tokens, "cu_seqlens_q must cover the tokens");
  std::vector<AttentionSequence> sequences;
  for (size_t s = 0; s < count; s++) {
    const int64_t queries = cu_seqlens_q[s + 1] - cu_seqlens_q[s], pages = (context_lens[s] + kPageTokens - 1) / kPageTokens;
    require(queries >= 0 && queries <= context_lens[s], "a sequence has more queries than keys");
    require(static_cast<int64_t>(tables[s].size()) >= pages, "a block table is too short");
    sequences.push_back({cu_seqlens_q[s], queries, context_lens[s], tables[s].data()});
  }
  return sequences;
}

// Runs a step; the buffer `result` as an array [rows, width], valid until the next run.
Logits run(nb::handle_t<OwningProgram> handle, const Ids& token_ids, const Ids& positions, const Ids& slots, const Ids& rows,
           const std::vector<int64_t>& cu_seqlens_q, const std::vector<int64_t>& context_lens, const std::vector<Ids>& tables,
           const std::vector<Numbers>& inv_freqs, int result) {
  OwningProgram& self = nb::cast<OwningProgram&>(handle);
  const int64_t tokens = static_cast<int64_t>(token_ids.size());
  require(positions.size() == token_ids.size() && slots.size() == token_ids.size(), "one position and one slot a token");
  require(std::all_of(rows.data(), rows.data() + rows.size(), [&](int64_t row) { return row >= 0 && row < tokens; }),
          "a row that is none of the tokens is asked for");
  StepInput input{tokens, token_ids.data(), positions.data(), slots.data(), static_cast<int64_t>(rows.size()), rows.data(),
                  sequences_of(cu_seqlens_q, context_lens, tables, tokens), {}};
  for (const Numbers& values : inv_freqs) {
    require(values.ndim() == 1 || values.ndim() == 2, "frequencies have one or two axes");
    const bool per_token = values.ndim() == 2;
    require(!per_token || static_cast<int64_t>(values.shape(0)) == tokens, "one row of frequencies a token");
    input.frequencies.push_back({values.data(), static_cast<int64_t>(values.shape(values.ndim() - 1)), per_token});
  }
  {
    nb::gil_scoped_release release;
    self.program.run(input);
  }
  return Logits(const_cast<float*>(self.program.data(result)), {rows.size(), static_cast<size_t>(self.program.width(result))},
                handle);
}

}  // namespace

void bind_program(nb::module_& m) {
  nb::enum_<Activation>(m, "Activation")
      .value("Silu", Activation::Silu)
      .value("GeluTanh", Activation::GeluTanh)
      .value("Gelu", Activation::Gelu);
  nb::enum_<RowKind>(m, "RowKind")
      .value("Embedding", RowKind::Embedding)
      .value("Angles", RowKind::Angles)
      .value("RmsNorm", RowKind::RmsNorm)
      .value("Rotary", RowKind::Rotary)
      .value("Gated", RowKind::Gated)
      .value("Add", RowKind::Add)
      .value("Scale", RowKind::Scale)
      .value("Softcap", RowKind::Softcap)
      .value("Take", RowKind::Take)
      .value("Store", RowKind::Store);
  nb::class_<KvMemory>(m, "KvPages")
      .def(nb::init<int64_t, int64_t, int64_t, const std::string&>(), nb::arg("num_pages"), nb::arg("kv_heads"),
           nb::arg("head_dim"), nb::arg("type"))
      .def_prop_ro("nbytes", &KvMemory::bytes);
  nb::class_<OwningRowOp>(m, "RowOp")
      .def("__init__", [](OwningRowOp* self, RowKind kind) { new (self) OwningRowOp{{kind}, {}}; })
      .def_rw("out", &OwningRowOp::out)
      .def_rw("out2", &OwningRowOp::out2)
      .def_rw("a", &OwningRowOp::a)
      .def_rw("b", &OwningRowOp::b)
      .def_rw("c", &OwningRowOp::c)
      .def_rw("source", &OwningRowOp::source)
      .def_rw("width", &OwningRowOp::width)
      .def_rw("factor", &OwningRowOp::factor)
      .def_rw("activation", &OwningRowOp::activation)
      .def("set_weight", [](OwningRowOp& self, const nb::object& array) { self.weight = vector_of(self, array); })
      .def("set_table", [](OwningRowOp& self, const nb::object& weight) { self.table = matrix_of(self, weight); })
      .def("set_pages", [](OwningRowOp& self, const nb::object& pages) { self.pages = pages_of(self, pages); });
  nb::class_<OwningSegment>(m, "Segment")
      .def(nb::init<>())
      .def_rw("activation", &OwningSegment::activation)
      .def_rw("scale", &OwningSegment::scale)
      .def_rw("softcap", &OwningSegment::softcap)
      .def_rw("head_dim", &OwningSegment::head_dim)
      .def_rw("cos", &OwningSegment::cos)
      .def_rw("sin", &OwningSegment::sin)
      .def_rw("residual", &OwningSegment::residual)
      .def_rw("out", &OwningSegment::out)
      .def("set_matrix", [](OwningSegment& self, const nb::object& weight) { self.matrix = matrix_of(self, weight); })
      .def("set_bias", [](OwningSegment& self, const nb::object& array) { self.bias = vector_of(self, array); })
      .def("set_up",
           [](OwningSegment& self, const nb::object& weight, const nb::object& bias) {
             self.gated = true;
             self.up = matrix_of(self, weight);
             if (!bias.is_none()) self.up_bias = vector_of(self, bias);
           }, nb::arg("weight"), nb::arg("bias").none())
      .def("set_head_norm",
           [](OwningSegment& self, const nb::object& weight, float eps) {
             self.head_norm = vector_of(self, weight);
             self.eps = eps;
           })
      .def("set_pages", [](OwningSegment& self, const nb::object& pages, bool is_value) {
        self.pages = pages_of(self, pages);
        self.is_value = is_value;
      });
  nb::class_<OwningProgram>(m, "Program")
      .def(nb::init<std::shared_ptr<ThreadPool>, bool>(), nb::arg("pool"), nb::arg("int8"))
      .def("add_buffer",
           [](OwningProgram& self, int64_t width, bool is_rows) {
             return self.program.add_buffer(width, is_rows ? Domain::Rows : Domain::Tokens);
           })
      .def("add_matrix_phase", &add_matrix_phase)
      .def("add_attention_phase",
           [](OwningProgram& self, int queries, int out, const nb::object& pages, int64_t num_heads, float scale,
              int64_t window, float softcap) {
             self.program.add_attention_phase(queries, out, pages_of(self, pages), num_heads, scale, window, softcap);
           })
      .def("run", &run)
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
