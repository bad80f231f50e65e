// PackedWeight for Python: made empty, filled with stored rows, and read back as they were stored.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "packed_weight.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

template <class Number, int kAxes>
using Array = nb::ndarray<const Number, nb::ndim<kAxes>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;   // rows may lie apart, bytes of a row may not
using Order = std::optional<Array<int64_t, 1>>;

Layout layout_by_name(const std::string& name) {
  for (int i = 0; i < static_cast<int>(Layout::Count); ++i) {
    if (name == layout_info(static_cast<Layout>(i)).name) return static_cast<Layout>(i);
  }
  throw std::invalid_argument("no native layout is called " + name);
}

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Number of rows to be packed, every index of theirs checked.
int64_t rows_to_pack(const Order& order, int64_t stored_rows) {
  if (!order) return stored_rows;
  for (size_t i = 0; i < order->shape(0); ++i) {
    const int64_t row = (*order)(i);
    check(row >= 0 && row < stored_rows, "the row order names a row that is not stored");
  }
  return static_cast<int64_t>(order->shape(0));
}

StoredRows stored_rows(const PackedMatrix& matrix, const Bytes& stored, const Order& order) {
  check(static_cast<int64_t>(stored.shape(1)) == stored_row_bytes(matrix.layout, matrix.columns),
        "the stored rows are not of the length this layout and number of columns need");
  check(stored.stride(1) == 1, "the bytes of a stored row must lie side by side");
  return {stored.data(), stored.stride(0), order ? order->data() : nullptr};
}

void store(PackedWeight& weight, const Bytes& stored, int64_t first_row, int64_t matrix, const Order& order,
           ThreadPool* pool) {
  check(weight.matrix().group_size == 0, "packed integers are stored with their scales");
  const StoredRows source = stored_rows(weight.matrix(), stored, order);
  const int64_t rows = rows_to_pack(order, static_cast<int64_t>(stored.shape(0)));
  nb::gil_scoped_release release;
  weight.store(matrix, first_row, rows, source, pool);
}

void store_groups(PackedWeight& weight, const Bytes& codes, const Array<float, 2>& scales,
                  const std::optional<Array<uint8_t, 2>>& zeros, int64_t first_row, int64_t matrix, const Order& order,
                  ThreadPool* pool) {
  const PackedMatrix whole = weight.matrix();
  check(whole.group_size != 0, "only packed integers have scales of their own");
  StoredRows source = stored_rows(whole, codes, order);
  const size_t rows = codes.shape(0), groups = static_cast<size_t>(whole.columns / whole.group_size);
  check(scales.shape(0) == rows && scales.shape(1) == groups, "one scale a row and group is needed");
  check(!zeros || (zeros->shape(0) == rows && zeros->shape(1) == groups), "one zero point a row and group is needed");
  source.scales = scales.data();
  source.zeros = zeros ? zeros->data() : nullptr;
  const int64_t packed = rows_to_pack(order, static_cast<int64_t>(rows));
  nb::gil_scoped_release release;
  weight.store(matrix, first_row, packed, source, pool);
}

// A new numpy array [rows][columns].
template <class Number>
nb::ndarray<nb::numpy, Number, nb::ndim<2>> new_array(int64_t rows, int64_t columns) {
  auto* data = new Number[rows * columns];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<Number*>(p); });
  return {data, {static_cast<size_t>(rows), static_cast<size_t>(columns)}, owner};
}

nb::object to_blocks(const PackedWeight& weight, ThreadPool* pool) {
  const PackedMatrix whole = weight.matrix();
  check(whole.group_size == 0, "packed integers are read back with to_groups");
  const int64_t row_bytes = stored_row_bytes(whole.layout, whole.columns);
  auto blocks = new_array<uint8_t>(weight.matrices() * whole.rows, row_bytes);
  {
    nb::gil_scoped_release release;
    for (int64_t i = 0; i < weight.matrices(); ++i) {
      weight.restore(i, {blocks.data() + i * whole.rows * row_bytes, row_bytes}, pool);
    }
  }
  return nb::cast(blocks);
}

nb::object to_groups(const PackedWeight& weight, ThreadPool* pool) {
  const PackedMatrix whole = weight.matrix();
  check(whole.group_size != 0, "only packed integers have scales of their own");
  const int64_t row_bytes = stored_row_bytes(whole.layout, whole.columns), groups = whole.columns / whole.group_size;
  const int64_t rows = weight.matrices() * whole.rows;
  auto codes = new_array<uint8_t>(rows, row_bytes);
  auto scales = new_array<float>(rows, groups);
  auto zeros = new_array<uint8_t>(rows, groups);
  {
    nb::gil_scoped_release release;
    for (int64_t i = 0; i < weight.matrices(); ++i) {
      const int64_t row = i * whole.rows;
      const RestoredRows target{codes.data() + row * row_bytes, row_bytes, scales.data() + row * groups,
                                zeros.data() + row * groups};
      weight.restore(i, target, pool);
    }
  }
  return nb::make_tuple(codes, scales, zeros);
}

// The bytes of the tiles themselves, for tests of the layouts. Shares the weight's memory.
nb::object tiles(nb::handle self) {
  const auto& weight = nb::cast<const PackedWeight&>(self);
  const size_t bytes = static_cast<size_t>(weight.bytes());
  return nb::cast(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(weight.matrix().data, {bytes}, self));
}

}  // namespace

void bind_pack(nb::module_& m) {
  const auto pool = nb::arg("pool") = nb::none();
  const auto order = nb::arg("order") = nb::none();
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def("__init__",
           [](PackedWeight* self, const std::string& layout, int64_t rows, int64_t columns, int64_t group_size,
              int64_t matrices) { new (self) PackedWeight(layout_by_name(layout), rows, columns, group_size, matrices); },
           nb::arg("layout"), nb::arg("rows"), nb::arg("columns"), nb::arg("group_size") = 0, nb::arg("matrices") = 1)
      .def_prop_ro("layout", [](const PackedWeight& w) { return layout_info(w.matrix().layout).name; })
      .def_prop_ro("rows", [](const PackedWeight& w) { return w.matrix().rows; })
      .def_prop_ro("columns", [](const PackedWeight& w) { return w.matrix().columns; })
      .def_prop_ro("group_size", [](const PackedWeight& w) { return w.matrix().group_size; })
      .def_prop_ro("matrices", &PackedWeight::matrices)
      .def_prop_ro("nbytes", &PackedWeight::bytes)
      .def_prop_ro("tiles", &tiles)
      .def("store", &store, nb::arg("stored"), nb::arg("first_row") = 0, nb::arg("matrix") = 0, order, pool)
      .def("store_groups", &store_groups, nb::arg("codes"), nb::arg("scales"), nb::arg("zeros") = nb::none(),
           nb::arg("first_row") = 0, nb::arg("matrix") = 0, order, pool)
      .def("to_blocks", &to_blocks, pool)
      .def("to_groups", &to_groups, pool);
}

}  // namespace llmctl
