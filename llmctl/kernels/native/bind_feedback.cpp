// Feedback for Python: float32 arrays, column by row.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bind_isa.hpp"
#include "descent.hpp"
#include "feedback.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Changed = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMostColumns = 128;

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

template <class Array>
bool is(const Array& array, int64_t first, int64_t second) {
  return static_cast<int64_t>(array.shape(0)) == first && static_cast<int64_t>(array.shape(1)) == second;
}

void feed_back(ThreadPool& pool, const Matrix& wanted, const Matrix& values, const Changed& levels, const Changed& errors,
               const Matrix& couplings, const Indices& groups, const Matrix& steps, const Matrix& inverses,
               const std::optional<Matrix>& offsets, float lowest, float highest, const std::optional<Vector>& table,
               const std::optional<std::string>& isa) {
  const int64_t columns = values.shape(0), rows = values.shape(1), count = steps.shape(0);
  check(columns <= kMostColumns, "a block has 128 columns at most");
  check(is(wanted, columns, rows) && is(levels, columns, rows) && is(errors, columns, rows), "all columns must be alike");
  check(is(couplings, columns, columns), "couplings must fit the columns");
  check(is(steps, count, rows) && is(inverses, count, rows) && (!offsets || is(*offsets, count, rows)), "scales must fit the rows");
  check(static_cast<int64_t>(groups.shape(0)) == columns, "every column needs a group");
  for (int64_t i = 0; i < columns; i++)
    check(groups.data()[i] >= 0 && groups.data()[i] < count, "groups must be there");
  check(!table || table->shape(0) > 0, "a table needs levels");
  const RunFeedback kernel = feedback_of(isa ? kernels_named(*isa).name : active_kernels()->name);
  const FeedbackTask task{rows, columns, couplings.data(), groups.data(), steps.data(), inverses.data(),
                          offsets ? offsets->data() : nullptr, lowest, highest, table ? table->data() : nullptr,
                          table ? static_cast<int64_t>(table->shape(0)) : 0, wanted.data(), values.data(), levels.data(),
                          errors.data()};
  nb::gil_scoped_release release;
  run_feedback(kernel, task, pool);
}

int64_t rows_in(const Changed& array) { return static_cast<int64_t>(array.shape(0)); }

void descend(ThreadPool& pool, int64_t passes, const Matrix& hessian, const Vector& pivots, const Matrix& wanted, const Changed& levels,
             const Changed& steps, const std::optional<Changed>& offsets, const std::optional<Matrix>& units,
             const std::optional<Matrix>& offset_units, float least_code, float greatest_code, float lowest, float highest,
             const std::optional<Vector>& table, const std::optional<std::string>& isa) {
  const int64_t columns = levels.shape(0), rows = levels.shape(1), groups = rows_in(steps);
  check(is(wanted, columns, rows) && is(steps, groups, rows) && (!offsets || is(*offsets, groups, rows)), "rows must be alike");
  check(is(hessian, columns, columns) && static_cast<int64_t>(pivots.shape(0)) == columns, "the Hessian must fit the columns");
  check(groups > 0 && columns % groups == 0 && columns / groups <= kMostColumns, "groups have 128 columns at most, all as many");
  const int64_t blocks = units ? static_cast<int64_t>(units->shape(0)) : groups;
  check(blocks > 0 && groups % blocks == 0 && (!units || is(*units, blocks, rows)), "units must be of whole groups");
  check(!units || !offsets || (offset_units && is(*offset_units, blocks, rows)), "offsets need units where steps have them");
  check(!table || table->shape(0) > 0, "a table needs levels");
  const RunDescent kernel = descent_of(isa ? kernels_named(*isa).name : active_kernels()->name);
  const DescentTask task{rows, columns, passes, hessian.data(), pivots.data(), wanted.data(), columns / groups, groups / blocks,
                         units ? units->data() : nullptr, offset_units ? offset_units->data() : nullptr,
                         least_code, greatest_code, lowest, highest, table ? table->data() : nullptr,
                         table ? static_cast<int64_t>(table->shape(0)) : 0, levels.data(), steps.data(),
                         offsets ? offsets->data() : nullptr};
  nb::gil_scoped_release release;
  run_descent(kernel, task, pool);
}

}  // namespace

void bind_feedback(nb::module_& m) {
  m.def("feed_back", &feed_back, nb::arg("pool"), nb::arg("wanted"), nb::arg("values"), nb::arg("levels"), nb::arg("errors"),
        nb::arg("couplings"), nb::arg("groups"), nb::arg("steps"), nb::arg("inverses"), nb::arg("offsets") = nb::none(),
        nb::arg("lowest") = 0.f, nb::arg("highest") = 0.f, nb::arg("table") = nb::none(), nb::arg("isa") = nb::none());
  m.def("descend", &descend, nb::arg("pool"), nb::arg("passes"), nb::arg("hessian"), nb::arg("pivots"), nb::arg("wanted"),
        nb::arg("levels"), nb::arg("steps"), nb::arg("offsets") = nb::none(), nb::arg("units") = nb::none(),
        nb::arg("offset_units") = nb::none(), nb::arg("least_code") = 0.f, nb::arg("greatest_code") = 0.f,
        nb::arg("lowest") = 0.f, nb::arg("highest") = 0.f, nb::arg("table") = nb::none(), nb::arg("isa") = nb::none());
}

}  // namespace llmctl
