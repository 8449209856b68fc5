#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"
#include "linear/linear.hpp"
#include "linear/row_tasks.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

void py_linear(const PyRowTasks& plan, const std::string& isa, const std::string& dtype, const std::string& activation,
               int64_t tokens, const PyRows& x, uintptr_t values, uintptr_t bias, uintptr_t y) {
  nb::gil_scoped_release release;
  linear(isa_named(isa), dtype_named(dtype), activation_named(activation), plan.transposed, plan.block.first,
         plan.block.second, tokens, {pointer(x.first), x.second, plan.features.second}, pointer(values), pointer(bias),
         pointer(y), plan.features.first, plan.tasks);
  trim_scratch();
}

void py_linear_wgrad(const std::string& isa, const std::string& dtype, std::pair<int64_t, int64_t> block,
                     int64_t tokens, uintptr_t grad, int64_t grad_stride, int64_t out_features, uintptr_t x,
                     int64_t x_stride, int64_t in_features, uintptr_t values, Index<int32_t> row, Index<int32_t> col,
                     Index<int64_t> task_start) {
  const BlockTasks tasks = {row.data(), col.data(), task_start.data(), int64_t(task_start.size()) - 1};
  blocks_in(out_features, block.first), blocks_in(in_features, block.second);
  require(row.size() == col.size(), "row and col of one length");
  require_tasks(task_start, row.size());
  nb::gil_scoped_release release;
  linear_wgrad(isa_named(isa), dtype_named(dtype), block.first, block.second, tokens,
               {pointer(grad), grad_stride, out_features}, {pointer(x), x_stride, in_features}, pointer(values), tasks);
  trim_scratch();
}

const Binding binding([](nb::module_& m) {
  nb::class_<PyRowTasks>(m, "RowTasks")
      .def(nb::init<Sizes, Sizes, bool, Index<int64_t>, Index<int32_t>, Index<int64_t>, Index<int32_t>, Index<int32_t>,
                    Index<int32_t>, Index<int64_t>>(),
           nb::kw_only(), "features"_a, "block"_a, "transposed"_a, "start"_a.noconvert(), "col"_a.noconvert(),
           "position"_a.noconvert(), "row"_a.noconvert(), "begin"_a.noconvert(), "end"_a.noconvert(),
           "task_start"_a.noconvert());
  // Positional arguments: keywords would take longer than a small product.
  m.def("linear", &py_linear);
  m.def("linear_wgrad", &py_linear_wgrad, nb::kw_only(), "isa"_a, "dtype"_a, "block"_a, "tokens"_a, "grad"_a,
        "grad_stride"_a, "out_features"_a, "x"_a, "x_stride"_a, "in_features"_a, "values"_a, "row"_a.noconvert(),
        "col"_a.noconvert(), "task_start"_a.noconvert());
});

}  // namespace
}  // namespace blocksparse
