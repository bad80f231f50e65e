// Pages of keys and values, and attention over them by name of instruction set: for tests and for looking into a cache.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "aligned.hpp"
#include "attention.hpp"
#include "bind_isa.hpp"
#include "kv_memory.hpp"
#include "thread_pool.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

using Rows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;        // [tokens, heads, head_dim]
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewRows = nb::ndarray<nb::numpy, float, nb::ndim<3>>;

NewRows new_rows(size_t tokens, int64_t heads, int64_t head_dim) {
  float* data = new float[tokens * size_t(heads * head_dim)];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return NewRows(data, {tokens, size_t(heads), size_t(head_dim)}, owner);
}

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

void require_slots(const KvMemory& memory, const Integers& slots, int64_t lowest) {
  for (size_t t = 0; t < slots.size(); ++t) {
    require(slots(t) >= lowest && slots(t) < memory.num_pages() * kPageTokens, "a slot is outside the pages");
  }
}

void require_rows(const KvMemory& memory, const Rows& rows, size_t tokens) {
  const KvShape& shape = memory.pages().shape;
  require(rows.shape(0) == tokens && int64_t(rows.shape(1)) == shape.kv_heads && int64_t(rows.shape(2)) == shape.head_dim,
          "keys and values must be [slots, kv heads, head_dim]");
}

// 0xFF everywhere is a NaN in every type (of Q8_0: in the scales), so that a read of what was never stored shows.
void fill_pages(KvMemory& memory, uint8_t byte) { std::memset(memory.pages().data, byte, size_t(memory.bytes())); }

void store_rows(const std::string& isa, KvMemory& memory, const Rows& keys, const std::optional<Rows>& values,
                const Integers& slots) {
  require_rows(memory, keys, slots.size());
  require(values.has_value() != (memory.pages().shape.latent > 0), "latent pages take no values, others need them");
  if (values) require_rows(memory, *values, slots.size());
  require_slots(memory, slots, -1);
  const KvShape& shape = memory.pages().shape;
  for (size_t t = 0; t < slots.size(); ++t) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      int64_t row = (int64_t(t) * shape.kv_heads + head) * shape.head_dim;
      kernels_named(isa).attention->store(memory.pages(), head, slots(t), keys.data() + row, values ? values->data() + row : nullptr);
    }
  }
}

nb::tuple load_rows(const std::string& isa, const KvMemory& memory, const Integers& slots) {
  require_slots(memory, slots, 0);
  const KvShape& shape = memory.pages().shape;
  NewRows keys = new_rows(slots.size(), shape.kv_heads, shape.head_dim);
  NewRows values = new_rows(slots.size(), shape.kv_heads, kv_value_dim(shape));
  for (size_t t = 0; t < slots.size(); ++t) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      int64_t row = int64_t(t) * shape.kv_heads + head;
      kernels_named(isa).attention->load(memory.pages(), head, slots(t), keys.data() + row * shape.head_dim,
                                         values.data() + row * kv_value_dim(shape));
    }
  }
  return nb::make_tuple(keys, values);
}

std::vector<AttentionSequence> sequences_of(const std::vector<int64_t>& cu_seqlens_q, const std::vector<int64_t>& context_lens,
                                            const std::vector<Integers>& tables, int64_t tokens, int64_t pages) {
  size_t count = context_lens.size();
  require(cu_seqlens_q.size() == count + 1 && tables.size() == count, "one context length, one table and one range a sequence");
  require(cu_seqlens_q.front() == 0 && cu_seqlens_q.back() == tokens, "cu_seqlens_q must go from 0 to the number of tokens");
  std::vector<AttentionSequence> sequences;
  for (size_t s = 0; s < count; ++s) {
    int64_t queries = cu_seqlens_q[s + 1] - cu_seqlens_q[s], length = context_lens[s];
    require(queries >= 0 && queries <= length, "a sequence has more queries than keys");
    require(int64_t(tables[s].size()) >= (length + kPageTokens - 1) / kPageTokens, "a table has too few pages");
    for (size_t i = 0; i < tables[s].size(); ++i) {
      require(tables[s](i) >= 0 && tables[s](i) < pages, "a page is outside the pages");
    }
    sequences.push_back({cu_seqlens_q[s], queries, length, tables[s].data()});
  }
  return sequences;
}

// All items, then all merges; workers take the next one that is left.
void run_plan(const AttentionKernels& kernels, const AttentionCall& call, const AttentionPlan& plan, int threads) {
  int64_t scratch_floats = attention_scratch_floats(call.num_heads, call.pages.shape);
  AlignedArray<float> scratch, partials;
  scratch.reserve(threads * scratch_floats);
  partials.reserve(plan.partial_rows * attention_partial_floats(call.pages.shape));
  std::atomic<size_t> next_item{0}, next_merge{0};
  ThreadPool pool(threads);
  pool.run([&](int worker) {
    float* own = scratch.get() + worker * scratch_floats;
    for (size_t i; (i = next_item++) < plan.items.size();) kernels.run(call, plan.items[i], own, partials.get());
    pool.barrier();
    for (size_t i; (i = next_merge++) < plan.merges.size();) kernels.merge(call, plan.merges[i], partials.get());
  });
}

NewRows bound_attention(const std::string& isa, const KvMemory& memory, const Rows& queries,
                        const std::vector<int64_t>& cu_seqlens_q, const std::vector<int64_t>& context_lens,
                        const std::vector<Integers>& block_tables, float scale, int64_t sliding_window, float softcap,
                        int threads, const std::optional<Vector>& sinks, int64_t anchors) {
  const KvShape& shape = memory.pages().shape;
  int64_t tokens = int64_t(queries.shape(0)), heads = int64_t(queries.shape(1)), row = heads * shape.head_dim;
  require(int64_t(queries.shape(2)) == shape.head_dim && heads % shape.kv_heads == 0,
          "queries must be [tokens, a multiple of the kv heads, head_dim]");
  require(sliding_window >= 0 && softcap >= 0 && threads > 0, "window and softcap are 0 or positive, threads positive");
  require(anchors >= 0 && anchors <= kPageTokens, "anchors are at most a page");
  require(!sinks || int64_t(sinks->size()) == heads, "one sink a query head");
  auto sequences = sequences_of(cu_seqlens_q, context_lens, block_tables, tokens, memory.num_pages());
  NewRows out = new_rows(queries.shape(0), heads, kv_value_dim(shape));
  AttentionCall call = {memory.pages(), sequences.data(), heads, scale, softcap, sliding_window, queries.data(), row,
                        out.data(), heads * kv_value_dim(shape), sinks ? sinks->data() : nullptr, anchors};
  AttentionPlan plan;
  plan_attention(sequences.data(), int64_t(sequences.size()), heads, shape, sliding_window, anchors, threads, plan);
  const AttentionKernels& kernels = *kernels_named(isa).attention;
  nb::gil_scoped_release release;
  run_plan(kernels, call, plan, threads);
  return out;
}

// Rows (query x head of a group) of all kv heads, a few at a time.
std::vector<VoteItem> vote_items(int64_t kv_heads, int64_t rows) {
  std::vector<VoteItem> items;
  for (int64_t head = 0; head < kv_heads; ++head) {
    for (int64_t first = 0; first < rows; first += kVoteRows) items.push_back({head, first, std::min(kVoteRows, rows - first)});
  }
  return items;
}

// Each item has votes of its own, which are added in order: the sums do not depend on who came first.
void count_votes(ThreadPool& pool, const VoteCall& call, float* votes) {
  const KvShape& shape = call.pages.shape;
  const auto items = vote_items(shape.kv_heads, call.num_queries * (call.num_heads / shape.kv_heads));
  const int64_t floats = vote_scratch_floats(shape, call.length);
  AlignedArray<float> scratch;
  scratch.reserve(pool.size() * floats);
  std::vector<float> parts(items.size() * size_t(call.length), 0.0f);
  std::atomic<size_t> next{0};
  pool.run([&](int worker) {
    for (size_t i; (i = next++) < items.size();)
      call.kernels->vote(call, items[i], scratch.get() + worker * floats, parts.data() + i * size_t(call.length));
  });
  std::fill(votes, votes + shape.kv_heads * call.length, 0.0f);
  for (size_t i = 0; i < items.size(); ++i) {
    float* sum = votes + items[i].kv_head * call.length;
    for (int64_t t = 0; t < call.length; ++t) sum[t] += parts[i * size_t(call.length) + size_t(t)];
  }
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> bound_votes(const std::string& isa, ThreadPool& pool, const KvMemory& memory,
                                                       const Rows& queries, const Integers& table, int64_t length, float scale, float softcap,
                                                       const std::optional<Vector>& sinks) {
  const KvShape& shape = memory.pages().shape;
  const int64_t count = int64_t(queries.shape(0)), heads = int64_t(queries.shape(1));
  require(int64_t(queries.shape(2)) == shape.head_dim && heads % shape.kv_heads == 0,
          "queries must be [tokens, a multiple of the kv heads, head_dim]");
  require(count > 0 && count <= length && (length + kPageTokens - 1) / kPageTokens <= int64_t(table.size()),
          "there must be as many tokens as queries, and a page for each");
  require(!sinks || int64_t(sinks->size()) == heads, "one sink a query head");
  for (size_t i = 0; i < table.size(); ++i) {
    require(table(i) >= 0 && table(i) < memory.num_pages(), "a page is outside the pages");
  }
  float* votes = new float[size_t(shape.kv_heads * length)];
  nb::capsule owner(votes, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  const VoteCall call = {memory.pages(), table.data(), length, count, heads, queries.data(), scale, softcap,
                         sinks ? sinks->data() : nullptr, kernels_named(isa).attention};
  {
    nb::gil_scoped_release release;
    count_votes(pool, call, votes);
  }
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(votes, {size_t(shape.kv_heads), size_t(length)}, owner);
}

using Slots = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;   // [kv heads, tokens]

void move_tokens(const std::string& isa, ThreadPool& pool, KvMemory& memory, const Slots& sources, const Integers& targets) {
  const AttentionKernels& kernels = *kernels_named(isa).attention;
  const int64_t heads = memory.pages().shape.kv_heads, count = int64_t(targets.size());
  require(int64_t(sources.shape(0)) == heads && int64_t(sources.shape(1)) == count, "sources must be [kv heads, targets]");
  require_slots(memory, targets, 0);
  for (int64_t i = 0; i < heads * count; ++i) {
    require(sources.data()[i] >= 0 && sources.data()[i] < memory.num_pages() * kPageTokens, "a slot is outside the pages");
  }
  nb::gil_scoped_release release;
  std::atomic<int64_t> next{0};
  pool.run([&](int) {
    for (int64_t head; (head = next++) < heads;) {
      for (int64_t i = 0; i < count; ++i) {
        kernels.move(memory.pages(), head, sources.data()[head * count + i], targets(size_t(i)));
      }
    }
  });
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attention_votes", &bound_votes, nb::arg("isa"), nb::arg("pool"), nb::arg("pages"), nb::arg("queries"),
        nb::arg("block_table"), nb::arg("length"), nb::arg("scale"), nb::arg("softcap") = 0.0f, nb::arg("sinks") = nb::none());
  m.def("move_tokens", &move_tokens, nb::arg("isa"), nb::arg("pool"), nb::arg("pages"), nb::arg("sources"), nb::arg("targets"));
  m.def("fill_pages", &fill_pages, nb::arg("pages"), nb::arg("byte"));
  m.def("store_kv", &store_rows, nb::arg("isa"), nb::arg("pages"), nb::arg("keys"), nb::arg("values").none(),
        nb::arg("slots"));
  m.def("load_kv", &load_rows, nb::arg("isa"), nb::arg("pages"), nb::arg("slots"));
  m.def("attention", &bound_attention, nb::arg("isa"), nb::arg("pages"), nb::arg("queries"), nb::arg("cu_seqlens_q"),
        nb::arg("context_lens"), nb::arg("block_tables"), nb::arg("scale"), nb::arg("sliding_window") = 0,
        nb::arg("softcap") = 0.0f, nb::arg("threads") = 1, nb::arg("sinks") = nb::none(), nb::arg("anchors") = 0);
}

}  // namespace llmctl
