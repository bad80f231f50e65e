// The linear kernels by name of instruction set, for tests and for timing them by themselves.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "aligned.hpp"
#include "bind_isa.hpp"
#include "cpu.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

template <class Number, int kAxes> using Array = nb::ndarray<const Number, nb::ndim<kAxes>, nb::c_contig, nb::device::cpu>;
using Bytes = Array<uint8_t, 1>;
using Rows = Array<float, 2>;   // [tokens, columns]

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

template <class Number, size_t kAxes>
nb::ndarray<nb::numpy, Number> new_array(const size_t (&shape)[kAxes]) {
  size_t count = 1;
  for (size_t n : shape) count *= n;
  auto* data = new Number[count];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<Number*>(p); });
  return nb::ndarray<nb::numpy, Number>(data, kAxes, shape, owner);
}

Layout layout_named(const std::string& name) {
  for (int i = 0; i < int(Layout::Count); ++i)
    if (name == layout_info(Layout(i), kBlock).name) return Layout(i);
  throw nb::value_error(("there is no native layout called " + name).c_str());
}

// A prepared matrix out of a copy of its bytes, which Python need not have aligned.
class Matrix {
 public:
  Matrix(const std::string& layout, const Bytes& packed, int64_t rows, int64_t columns, int64_t group_size)
      : matrix_{layout_named(layout), rows, columns, group_size, memory_.reserve(int64_t(packed.size()))} {
    bool groups = matrix_.layout == Layout::I4 || matrix_.layout == Layout::I8;
    require(rows > 0 && columns > 0, "a matrix has rows and columns");
    require(groups ? group_size > 0 && group_size % kBlock == 0 : group_size == 0, "I4 and I8 alone have groups, of 32 columns");
    require(columns % layout_info(matrix_.layout, group_size).columns == 0, "the columns are not whole units of this layout");
    require(int64_t(packed.size()) == matrix_.tiles() * matrix_.tile_bytes(), "the bytes are not those of rows x columns");
    std::memcpy(memory_.get(), packed.data(), packed.size());
  }
  const PackedMatrix& get() const { return matrix_; }
  bool is_plain() const { return layout_info(matrix_.layout, kBlock).columns == 1; }

 private:
  AlignedArray<uint8_t> memory_;
  PackedMatrix matrix_;
};

// Activations as a kernel reads them, float or quantized by the same instruction set.
class Input {
 public:
  Input(const Kernels& kernels, const Rows& x, bool int8) {
    const int64_t tokens = int64_t(x.shape(0)), columns = int64_t(x.shape(1)), padded = (columns + 63) / 64 * 64;
    activations_ = {tokens, columns, padded, x.data(), columns, nullptr, nullptr, nullptr};
    if (!int8) return;
    int8_t* codes = codes_.reserve(tokens * padded);
    float* scales = scales_.reserve(tokens * padded / 32);
    int32_t* sums = sums_.reserve(tokens * padded / 16);
    for (int64_t t = 0; t < tokens; ++t)
      kernels.quantize_activations(x.data() + t * columns, columns, padded, codes + t * padded, scales + t * padded / 32,
                                   sums + t * padded / 16);
    activations_ = {tokens, columns, padded, nullptr, 0, codes, scales, sums};
  }
  const Activations& get() const { return activations_; }

 private:
  AlignedArray<int8_t> codes_;
  AlignedArray<float> scales_;
  AlignedArray<int32_t> sums_;
  Activations activations_{};
};

void check_input(const Matrix& matrix, const Rows& x, bool int8) {
  require(int64_t(x.shape(1)) == matrix.get().columns, "x must have the matrix's columns");
  require(!(int8 && matrix.is_plain()), "plain weights take float activations");
}

void run_in_parts(const Kernels& kernels, const PackedMatrix& matrix, const Activations& x, int64_t tiles_per_call, float* y) {
  for (int64_t tile = 0; tile < matrix.tiles(); tile += tiles_per_call)
    kernels.linear({matrix, tile, std::min(matrix.tiles(), tile + tiles_per_call)}, x, y + kTileRows * tile, matrix.rows);
}

nb::object linear(const std::string& isa, const std::string& layout, const Bytes& packed, int64_t rows, int64_t columns,
                  int64_t group_size, const Rows& x, bool int8, int64_t tiles_per_call) {
  const Kernels& kernels = kernels_named(isa);
  const Matrix matrix(layout, packed, rows, columns, group_size);
  check_input(matrix, x, int8);
  require(tiles_per_call > 0, "a call has at least one tile");
  const Input input(kernels, x, int8);
  auto y = new_array<float>({x.shape(0), size_t(rows)});
  run_in_parts(kernels, matrix.get(), input.get(), tiles_per_call, y.data());
  return nb::cast(y);
}

nb::object dequantize_row(const std::string& isa, const std::string& layout, const Bytes& packed, int64_t rows, int64_t columns,
                          int64_t group_size, int64_t row) {
  const Matrix matrix(layout, packed, rows, columns, group_size);
  require(row >= 0 && row < rows, "there is no such row");
  auto out = new_array<float>({size_t(columns)});
  kernels_named(isa).dequantize_row(matrix.get(), row, out.data());
  return nb::cast(out);
}

nb::tuple quantize_activations(const std::string& isa, const Array<float, 1>& x) {
  const int64_t columns = int64_t(x.size());
  const size_t padded = (x.size() + 63) / 64 * 64;
  auto codes = new_array<int8_t>({padded});
  auto scales = new_array<float>({padded / 32});
  auto sums = new_array<int32_t>({padded / 16});
  kernels_named(isa).quantize_activations(x.data(), columns, int64_t(padded), codes.data(), scales.data(), sums.data());
  return nb::make_tuple(codes, scales, sums);
}

// Seconds of one product over the whole matrix by one thread, the best of `repeats` measurements of `calls` calls.
double time_linear(const std::string& isa, const std::string& layout, const Bytes& packed, int64_t rows, int64_t columns,
                   int64_t group_size, const Rows& x, bool int8, int64_t repeats, int64_t calls) {
  const Kernels& kernels = kernels_named(isa);
  const Matrix matrix(layout, packed, rows, columns, group_size);
  check_input(matrix, x, int8);
  require(repeats > 0 && calls > 0, "repeats and calls must be positive");
  const Input input(kernels, x, int8);
  AlignedArray<float> y;
  y.reserve(int64_t(x.shape(0)) * rows);
  double best = 1e30;
  nb::gil_scoped_release release;
  for (int64_t i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t call = 0; call < calls; ++call) kernels.linear({matrix.get(), 0, matrix.get().tiles()}, input.get(), y.get(), rows);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count() / double(calls));
  }
  return best;
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("available_isas", &available_isas, "Names of the instruction sets that this build and machine have, best first.");
  m.def("active_isa", [] { return active_kernels()->name; }, "The one in use; LLMCTL_ISA forces another.");
  m.def("linear", &linear, nb::arg("isa"), nb::arg("layout"), nb::arg("packed"), nb::arg("rows"), nb::arg("columns"),
        nb::arg("group_size"), nb::arg("x"), nb::arg("int8"), nb::arg("tiles_per_call") = 1 << 30);
  m.def("dequantize_row", &dequantize_row, nb::arg("isa"), nb::arg("layout"), nb::arg("packed"), nb::arg("rows"),
        nb::arg("columns"), nb::arg("group_size"), nb::arg("row"));
  m.def("quantize_activations", &quantize_activations, nb::arg("isa"), nb::arg("x"));
  m.def("time_linear", &time_linear, nb::arg("isa"), nb::arg("layout"), nb::arg("packed"), nb::arg("rows"), nb::arg("columns"),
        nb::arg("group_size"), nb::arg("x"), nb::arg("int8"), nb::arg("repeats"), nb::arg("calls"));
}

}  // namespace llmctl
