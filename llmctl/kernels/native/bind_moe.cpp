// Moe for Python: the experts of one layer with their thread pool, run on numpy arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind_isa.hpp"
#include "moe.hpp"
#include "packed_weight.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = std::vector<std::shared_ptr<PackedWeight>>;

// Whether they lie in one weight or in many.
ExpertMatrices matrices(const Weights& weights) {
  ExpertMatrices all;
  for (const auto& weight : weights)
    for (int64_t i = 0; i < weight->matrices(); i++) all.matrices.push_back(weight->matrix(i));
  return all;
}

class OwningMoe {
 public:
  OwningMoe(std::shared_ptr<ThreadPool> pool, Weights gate, Weights up, Weights down, Routing routing,
            const std::string& activation, bool int8, const std::optional<std::string>& isa)
      : pool_(std::move(pool)), gate_(std::move(gate)), up_(std::move(up)), down_(std::move(down)),
        moe_(isa ? &kernels_named(*isa) : active_kernels(), std::move(routing), matrices(gate_), matrices(up_),
             matrices(down_), SharedExpert{}, activation_named(activation), int8) {}

  nb::object run(const Rows& x, const Rows& logits) {
    const auto tokens = static_cast<int64_t>(x.shape(0));
    if (static_cast<int64_t>(x.shape(1)) != moe_.hidden()) throw nb::value_error("x must have the experts' hidden size");
    if (static_cast<int64_t>(logits.shape(0)) != tokens || static_cast<int64_t>(logits.shape(1)) != moe_.num_experts())
      throw nb::value_error("one router logit a token and expert is needed");
    auto* y = new float[tokens * moe_.hidden()];
    nb::capsule owner(y, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    {
      nb::gil_scoped_release release;
      moe_.prepare(scratch_, pool_->size(), {tokens, x.data(), logits.data(), nullptr, nullptr, nullptr, y});
      pool_->run([this](int worker) { moe_.run(*pool_, worker); });
    }
    return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(y, {x.shape(0), x.shape(1)}, owner));
  }

 private:
  std::shared_ptr<ThreadPool> pool_;
  Weights gate_, up_, down_;
  Moe moe_;
  MoeScratch scratch_;
};

// experts [tokens][top_k] and weights, for the tests.
nb::tuple route(const Routing& routing, const Rows& logits) {
  if (static_cast<int64_t>(logits.shape(1)) != routing.num_experts) throw nb::value_error("one logit an expert is needed");
  const size_t tokens = logits.shape(0), top_k = static_cast<size_t>(routing.top_k);
  auto* experts = new int32_t[tokens * top_k];
  auto* weights = new float[tokens * top_k];
  Router router(routing);
  for (size_t t = 0; t < tokens; t++)
    router.route(logits.data() + t * logits.shape(1), experts + t * top_k, weights + t * top_k);
  nb::capsule own_experts(experts, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
  nb::capsule own_weights(weights, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::make_tuple(nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>(experts, {tokens, top_k}, own_experts),
                        nb::ndarray<nb::numpy, float, nb::ndim<2>>(weights, {tokens, top_k}, own_weights));
}

}  // namespace

void bind_moe(nb::module_& m) {
  nb::class_<Routing>(m, "Routing")
      .def(nb::init<int64_t, int64_t, bool, bool, std::vector<float>, int64_t, int64_t, bool, float>(), nb::arg("num_experts"),
           nb::arg("top_k"), nb::arg("renormalize"), nb::arg("sigmoid"), nb::arg("bias"), nb::arg("num_groups"),
           nb::arg("top_groups"), nb::arg("group_by_top2"), nb::arg("scale"));
  m.def("route", &route, nb::arg("routing"), nb::arg("logits"));
  nb::class_<OwningMoe>(m, "Moe")
      .def(nb::init<std::shared_ptr<ThreadPool>, Weights, Weights, Weights, Routing, const std::string&, bool,
                    const std::optional<std::string>&>(),
           nb::arg("pool"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("routing"), nb::arg("activation"),
           nb::arg("int8"), nb::arg("isa") = nb::none())
      .def("run", &OwningMoe::run, nb::arg("x"), nb::arg("router_logits"));
}

}  // namespace llmctl
