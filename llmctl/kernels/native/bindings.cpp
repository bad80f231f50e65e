// What Python sees of the native kernels. Every area adds two lines.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace llmctl {
void bind_pool(nb::module_& m);
void bind_pack(nb::module_& m);
void bind_program(nb::module_& m);
void bind_sample(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_vector_ops(nb::module_& m);
void bind_ceilings(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_moe(nb::module_& m);
void bind_encode(nb::module_& m);
void bind_feedback(nb::module_& m);
}  // namespace llmctl

NB_MODULE(_native, m) {
  m.doc() = "llmctl's native CPU kernels";
  llmctl::bind_pool(m);
  llmctl::bind_pack(m);
  llmctl::bind_program(m);
  llmctl::bind_sample(m);
  llmctl::bind_attention(m);
  llmctl::bind_vector_ops(m);
  llmctl::bind_ceilings(m);
  llmctl::bind_linear(m);
  llmctl::bind_moe(m);
  llmctl::bind_encode(m);
  llmctl::bind_feedback(m);
}
