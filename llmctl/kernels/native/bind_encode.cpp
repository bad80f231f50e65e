// Encoders for Python: rows of a numpy array into rows of block bytes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bind_isa.hpp"
#include "encode.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

using Stored = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;   // rows may lie apart, bytes of a row may not
using Blocks = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Importance = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

PlainType plain_type(const std::string& name) {
  if (name == "F32") return PlainType::F32;
  if (name == "F16") return PlainType::F16;
  if (name == "BF16") return PlainType::BF16;
  throw std::invalid_argument("numbers to encode must be F32, F16 or BF16");
}

// stored: the bytes of numbers of `type`. Returns the first row that cannot be encoded, None if all were.
std::optional<int64_t> encode(ThreadPool& pool, const std::string& format, const std::string& type, const Stored& stored,
                              const Blocks& blocks, const std::optional<Importance>& importance,
                              const std::optional<std::string>& isa) {
  const Encoder& encoder = encoder_named(format, isa ? kernels_named(*isa).name : active_kernels()->name);
  EncodeTask task{plain_type(type), stored.data(), stored.stride(0), static_cast<int64_t>(stored.shape(0)), 0, nullptr,
                  blocks.data(), static_cast<int64_t>(blocks.shape(1))};
  const int64_t size = task.type == PlainType::F32 ? 4 : 2, bytes = static_cast<int64_t>(stored.shape(1));
  task.columns = bytes / size;
  check(bytes == 0 || stored.stride(1) == 1, "the bytes of a row must lie side by side");
  check(bytes % size == 0 && task.columns % encoder.elements_per_block == 0, "rows must be whole blocks");
  check(blocks.shape(0) == stored.shape(0) && task.row_bytes == task.columns / encoder.elements_per_block * encoder.bytes_per_block,
        "blocks must have the bytes that these rows need");
  if (importance) {
    check(static_cast<int64_t>(importance->shape(0)) == task.columns, "one weight a column is needed");
    task.importance = importance->data();
  }
  if (task.rows == 0 || task.columns == 0) return std::nullopt;
  int64_t done;
  {
    nb::gil_scoped_release release;
    done = encode_all(encoder, task, pool);
  }
  return done < task.rows ? std::optional(done) : std::nullopt;
}

}  // namespace

void bind_encode(nb::module_& m) {
  m.def("encode", &encode, nb::arg("pool"), nb::arg("format"), nb::arg("type"), nb::arg("stored"), nb::arg("blocks"),
        nb::arg("importance") = nb::none(), nb::arg("isa") = nb::none());
}

}  // namespace llmctl
