// What Python sees of the native kernels.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) { m.doc() = "llmctl's native CPU kernels"; }
