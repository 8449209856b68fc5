#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "core/parallel.hpp"
#include "expert_linear/expert_linear.hpp"
#include "isa/dispatch.hpp"
#include "linear/row_tasks.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

ExpertGroups groups_of(const Index<int64_t>& rows, const Index<int64_t>& blocks) {
  const int64_t experts = int64_t(rows.size()) - 1;
  require(experts > 0 && rows.size() == blocks.size(), "rows and blocks of one length");
  for (const auto* starts : {&rows, &blocks})
    require(rises(*starts) && starts->data()[0] == 0, "rows and blocks to rise from 0");
  return {experts, rows.data(), blocks.data()};
}

void py_expert_linear(const std::vector<const PyRowTasks*>& plans, const std::string& isa, const std::string& dtype,
                      Index<int64_t> rows, Index<int64_t> blocks, const PyRows& x, uintptr_t values, uintptr_t y) {
  const ExpertGroups groups = groups_of(rows, blocks);
  require(int64_t(plans.size()) == groups.experts && plans[0], "a plan for each expert");
  const PyRowTasks& first = *plans[0];
  std::vector<const RowTasks*> tasks;
  for (int64_t e = 0; e < groups.experts; ++e) {
    const PyRowTasks* plan = plans[e];
    require(
        plan && plan->features == first.features && plan->block == first.block && plan->transposed == first.transposed,
        "plans of one shape");
    require(int64_t(plan->plan.position.size()) == groups.blocks[e + 1] - groups.blocks[e],
            "a position for each block");
    tasks.push_back(&plan->tasks);
  }
  nb::gil_scoped_release release;
  expert_linear(isa_named(isa), dtype_named(dtype), first.transposed, first.block.first, first.block.second, groups,
                {pointer(x.first), x.second, first.features.second}, pointer(values), pointer(y), first.features.first,
                tasks.data());
  trim_scratch();
}

void py_expert_linear_wgrad(const std::string& isa, const std::string& dtype, Sizes block, Sizes features,
                            Index<int64_t> rows, Index<int64_t> blocks, const PyRows& grad, const PyRows& x,
                            uintptr_t values, Index<int32_t> row, Index<int32_t> col) {
  const ExpertGroups groups = groups_of(rows, blocks);
  blocks_in(features.first, block.first), blocks_in(features.second, block.second);
  require(row.size() == col.size() && int64_t(row.size()) == groups.blocks[groups.experts],
          "row and col for each block");
  nb::gil_scoped_release release;
  expert_linear_wgrad(isa_named(isa), dtype_named(dtype), block.first, block.second, groups,
                      {pointer(grad.first), grad.second, features.first}, {pointer(x.first), x.second, features.second},
                      pointer(values), row.data(), col.data());
  trim_scratch();
}

const Binding binding([](nb::module_& m) {
  m.def("expert_linear", &py_expert_linear, nb::kw_only(), "plans"_a, "isa"_a, "dtype"_a, "rows"_a.noconvert(),
        "blocks"_a.noconvert(), "x"_a, "values"_a, "y"_a);
  m.def("expert_linear_wgrad", &py_expert_linear_wgrad, nb::kw_only(), "isa"_a, "dtype"_a, "block"_a, "features"_a,
        "rows"_a.noconvert(), "blocks"_a.noconvert(), "grad"_a, "x"_a, "values"_a, "row"_a.noconvert(),
        "col"_a.noconvert());
});

}  // namespace
}  // namespace blocksparse
