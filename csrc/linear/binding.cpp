#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <vector>

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

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> py_plan_blocks(int64_t blocks, Sizes block) {
  require(blocks >= 0 && block.first > 0 && block.second > 0, "blocks with features");
  auto* starts = new std::vector<int64_t>(plan_blocks(blocks, block.first, block.second));
  const nb::capsule owner(starts, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return {starts->data(), {starts->size()}, owner};
}

template <class T>
void add_init(nb::class_<PyRowTasks>& plan) {
  plan.def(nb::init<Sizes, Sizes, bool, Index<T>, Index<T>>(), nb::kw_only(), "grid"_a, "block"_a, "transposed"_a,
           "start"_a.noconvert(), "col"_a.noconvert());
}

// Add a read-only array that shares the plan's memory.
template <class T>
void add_array(nb::class_<PyRowTasks>& plan, const char* name, std::vector<T> RowPlan::* array) {
  const auto view = [array](const PyRowTasks& self) {
    const std::vector<T>& all = self.plan.*array;
    return nb::ndarray<nb::numpy, const T, nb::ndim<1>>(all.data(), {all.size()}, nb::handle());
  };
  plan.def_prop_ro(name, view, nb::rv_policy::reference_internal);
}

const Binding binding([](nb::module_& m) {
  auto plan = nb::class_<PyRowTasks>(m, "RowTasks");
  add_init<int32_t>(plan), add_init<int64_t>(plan);
  add_array(plan, "start", &RowPlan::start), add_array(plan, "col", &RowPlan::col);
  add_array(plan, "position", &RowPlan::position), add_array(plan, "row", &RowPlan::row);
  add_array(plan, "begin", &RowPlan::begin), add_array(plan, "end", &RowPlan::end);
  add_array(plan, "task_start", &RowPlan::task_start);
  m.def("plan_blocks", &py_plan_blocks, "blocks"_a, "block"_a);
  // Positional arguments: keywords would take longer than a small product.
  m.def("linear", &py_linear);
  m.def("linear_wgrad", &py_linear_wgrad, nb::kw_only(), "isa"_a, "dtype"_a, "block"_a, "tokens"_a, "grad"_a,
        "grad_stride"_a, "out_features"_a, "x"_a, "x_stride"_a, "in_features"_a, "values"_a, "row"_a.noconvert(),
        "col"_a.noconvert(), "task_start"_a.noconvert());
});

}  // namespace
}  // namespace blocksparse
