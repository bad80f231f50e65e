// The element-wise kernels and the norm by name of instruction set, for the tests: one vector in, a new one out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "bind_isa.hpp"

namespace nb = nanobind;

namespace llmctl {
namespace {

using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewVector = nb::ndarray<nb::numpy, float, nb::ndim<1>>;

NewVector new_vector(size_t n) {
  float* data = new float[n];
  return NewVector(data, {n}, nb::capsule(data, [](void* p) noexcept { delete[] static_cast<float*>(p); }));
}

void require_equal(const Vector& x, const Vector& y) {
  if (x.size() != y.size()) throw nb::value_error("both vectors must have the same length");
}

NewVector bound_rms_norm(const std::string& isa, const Vector& x, const Vector& weight, float eps) {
  require_equal(x, weight);
  NewVector out = new_vector(x.size());
  kernels_named(isa).rms_norm(x.data(), weight.data(), eps, int64_t(x.size()), out.data());
  return out;
}

NewVector bound_layer_norm(const std::string& isa, const Vector& x, const Vector& weight, const std::optional<Vector>& bias,
                           float eps) {
  require_equal(x, weight);
  if (bias) require_equal(x, *bias);
  NewVector out = new_vector(x.size());
  kernels_named(isa).layer_norm(x.data(), weight.data(), bias ? bias->data() : nullptr, eps, int64_t(x.size()), out.data());
  return out;
}

NewVector bound_rotary(const std::string& isa, const Vector& head, const Vector& cos, const Vector& sin) {
  require_equal(cos, sin);
  if (head.size() < 2 * cos.size()) throw nb::value_error("a head must have at least twice as many elements as cos");
  NewVector out = new_vector(head.size());
  std::copy(head.data(), head.data() + head.size(), out.data());
  kernels_named(isa).rotary(out.data(), cos.data(), sin.data(), int64_t(cos.size()));
  return out;
}

NewVector bound_gated(const std::string& isa, const Vector& gate, const Vector& up, const std::string& activation) {
  require_equal(gate, up);
  NewVector out = new_vector(gate.size());
  kernels_named(isa).gated_activation(gate.data(), up.data(), activation_named(activation), int64_t(gate.size()), out.data());
  return out;
}

NewVector bound_add(const std::string& isa, const Vector& x, const Vector& y) {
  require_equal(x, y);
  NewVector out = new_vector(x.size());
  kernels_named(isa).add(x.data(), y.data(), int64_t(x.size()), out.data());
  return out;
}

NewVector bound_scale(const std::string& isa, const Vector& x, float factor) {
  NewVector out = new_vector(x.size());
  kernels_named(isa).scale(x.data(), factor, int64_t(x.size()), out.data());
  return out;
}

NewVector bound_softcap(const std::string& isa, const Vector& x, float cap) {
  NewVector out = new_vector(x.size());
  kernels_named(isa).softcap(x.data(), cap, int64_t(x.size()), out.data());
  return out;
}

}  // namespace

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::Silu;
  if (name == "gelu_pytorch_tanh") return Activation::GeluTanh;
  if (name == "gelu") return Activation::Gelu;
  if (name == "clamped_swiglu") return Activation::ClampedSwiglu;
  throw nb::value_error("activation must be silu, gelu_pytorch_tanh, gelu or clamped_swiglu");
}

void bind_vector_ops(nb::module_& m) {
  m.def("rms_norm", &bound_rms_norm, nb::arg("isa"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"));
  m.def("layer_norm", &bound_layer_norm, nb::arg("isa"), nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("eps"));
  m.def("rotary", &bound_rotary, nb::arg("isa"), nb::arg("head"), nb::arg("cos"), nb::arg("sin"));
  m.def("gated_activation", &bound_gated, nb::arg("isa"), nb::arg("gate"), nb::arg("up"), nb::arg("activation"));
  m.def("add", &bound_add, nb::arg("isa"), nb::arg("x"), nb::arg("y"));
  m.def("scale", &bound_scale, nb::arg("isa"), nb::arg("x"), nb::arg("factor"));
  m.def("softcap", &bound_softcap, nb::arg("isa"), nb::arg("x"), nb::arg("cap"));
}

}  // namespace llmctl
