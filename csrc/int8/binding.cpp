#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "core/parallel.hpp"
#include "int8/int8.hpp"
#include "isa/dispatch.hpp"
#include "linear/row_tasks.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

constexpr const char* kAxis = "all numbers of an axis";

// Each axis is input, output, kernel, stride, padding, dilation. The bounds keep all products far from overflow.
Patches patches_of(const std::vector<std::array<int64_t, 6>>& axes) {
  require(axes.size() == 3, kAxis);
  Patches patches = {};
  for (int a = 0; a < 3; ++a) {
    const auto [input, output, kernel, stride, padding, dilation] = axes[a];
    require(std::min({input, padding}) >= 0 && std::min({output, kernel, stride, dilation}) > 0, kAxis);
    require(std::max({input, output, kernel, stride, padding, dilation}) < int64_t(1) << 31, kAxis);
    patches[a] = {input, output, kernel, stride, padding, dilation};
  }
  return patches;
}

// A linear product if `axes` is empty, else a convolution: its tokens are the outputs, and the plan's inputs are those
// of all taps.
void py_int8_linear(const PyRowTasks& plan, const std::string& isa, const std::string& dtype,
                    const std::string& activation, int64_t tokens, const PyRows& x, uintptr_t blocks,
                    uintptr_t row_scales, int64_t padded_out, uintptr_t bias, uintptr_t y,
                    const std::vector<std::array<int64_t, 6>>& axes) {
  require(!plan.transposed, "tasks of x W^T");
  const Patches patches = axes.empty() ? Patches{} : patches_of(axes);
  if (!axes.empty()) {
    blocks_in(plan.block.second, patches[0].kernel * patches[1].kernel * patches[2].kernel);
    blocks_in(tokens, patches[0].output * patches[1].output * patches[2].output);
  }
  const Int8Weights weights = {static_cast<const char*>(pointer(blocks)), static_cast<const char*>(pointer(row_scales)),
                               padded_out};
  nb::gil_scoped_release release;
  int8_linear(isa_named(isa), dtype_named(dtype), activation_named(activation), plan.block.first, plan.block.second,
              tokens, {pointer(x.first), x.second, plan.features.second}, axes.empty() ? nullptr : &patches, weights,
              pointer(bias), pointer(y), plan.features.first, plan.tasks);
  trim_scratch();
}

const Binding binding([](nb::module_& m) {
  m.def("int8_linear", &py_int8_linear, nb::kw_only(), "plan"_a, "isa"_a, "dtype"_a, "activation"_a, "tokens"_a, "x"_a,
        "blocks"_a, "row_scales"_a, "padded_out"_a, "bias"_a, "y"_a, "axes"_a = std::vector<std::array<int64_t, 6>>());
});

}  // namespace
}  // namespace blocksparse
