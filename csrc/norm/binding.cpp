#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "isa/dispatch.hpp"
#include "norm/norm.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

void py_weight_norm(const std::string& isa, const std::string& dtype, int64_t outputs, int64_t inner,
                    Index<int64_t> start, uintptr_t values, uintptr_t gain, double least, uintptr_t grad, uintptr_t to,
                    uintptr_t grad_gain) {
  require(start.size() > 0 && outputs > 0 && inner > 0, "rows of blocks");
  nb::gil_scoped_release release;
  weight_norm(isa_named(isa), dtype_named(dtype), int64_t(start.size()) - 1,
              {pointer(values), start.data(), outputs, inner, pointer(gain), least, pointer(grad), pointer(to),
               pointer(grad_gain)});
}

const Binding binding([](nb::module_& m) {
  m.def("weight_norm", &py_weight_norm, nb::kw_only(), "isa"_a, "dtype"_a, "outputs"_a, "inner"_a,
        "start"_a.noconvert(), "values"_a, "gain"_a, "least"_a, "grad"_a, "to"_a, "grad_gain"_a);
});

}  // namespace
}  // namespace blocksparse
