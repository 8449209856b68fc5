// The Python module blocksparse._core. Tensors come as addresses: ops/cpu_core.py, their only way in, compares each
// tensor with the sizes that it passes along. Index arrays come as arrays, whose lengths and total counts are compared
// here. Their entries are trusted, since plans make them from layouts only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "core/bindings.hpp"
#include "core/parallel.hpp"
#include "isa/cpu_features.hpp"
#include "isa/dispatch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace blocksparse {
namespace {

using Add = void (*)(nb::module_&);

// A function's static variable, since the order in which files construct their globals is not defined.
std::vector<Add>& bindings() {
  static std::vector<Add> all;
  return all;
}

}  // namespace

Binding::Binding(Add add) { bindings().push_back(add); }

NB_MODULE(_core, m) {
  m.doc() = "The compiled CPU core of blocksparse.";
  nb::set_leak_warnings(false);  // layouts that live until the interpreter ends keep their tasks
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::invalid_argument& error) {
      PyErr_SetString(nb::module_::import_("blocksparse.errors").attr("BlockSparseError").ptr(), error.what());
    }
  });
  m.def("share_threads", &share_threads, "parallel_for"_a, "get_num_threads"_a,
        "Run loops on PyTorch's threads, by the addresses of torch_parallel_for and torch_get_num_threads.");
  m.def("features", &cpu_feature_names, "Return the features of this CPU that the kernels use.");
  m.def("isas", &isas, "Return the instruction sets compiled in, slowest first, and whether this CPU has each.");
  for (const Add add : bindings()) add(m);
}

}  // namespace blocksparse
