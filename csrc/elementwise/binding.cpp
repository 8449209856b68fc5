#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "elementwise/elementwise.hpp"
#include "isa/dispatch.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

void py_dropout_forward(const std::string& isa, const std::string& dtype, int64_t count, uintptr_t x, uintptr_t y,
                        uintptr_t code, const std::array<double, 3>& factors, uint64_t seed, uint16_t least) {
  nb::gil_scoped_release release;
  dropout_forward(
      isa_named(isa), dtype_named(dtype), count,
      {pointer(x), pointer(y), reinterpret_cast<uint8_t*>(code), {factors[0], factors[1], factors[2]}, seed, least});
}

void py_dropout_backward(const std::string& isa, const std::string& dtype, int64_t count, uintptr_t grad,
                         uintptr_t code, uintptr_t grad_x, const std::array<double, 3>& factors) {
  nb::gil_scoped_release release;
  dropout_backward(
      isa_named(isa), dtype_named(dtype), count,
      {pointer(grad), reinterpret_cast<const uint8_t*>(code), pointer(grad_x), {factors[0], factors[1], factors[2]}});
}

void py_concat_elu(const std::string& isa, const std::string& dtype, int64_t rows, int64_t features, uintptr_t x,
                   uintptr_t grad, uintptr_t to, double scale, uint64_t seed, uint16_t least) {
  nb::gil_scoped_release release;
  concat_elu(isa_named(isa), dtype_named(dtype), rows,
             {features, pointer(x), pointer(grad), pointer(to), scale, seed, least});
}

void py_gated_sum(const std::string& isa, const std::string& dtype, int64_t rows, int64_t features, uintptr_t x,
                  uintptr_t pair, uintptr_t grad, uintptr_t to) {
  nb::gil_scoped_release release;
  gated_sum(isa_named(isa), dtype_named(dtype), rows,
            {features, pointer(x), pointer(pair), pointer(grad), pointer(to)});
}

void py_momentum_steps(const std::string& isa, const std::string& dtype, const std::vector<int64_t>& counts,
                       const std::vector<uintptr_t>& weights, const std::vector<uintptr_t>& velocities,
                       const std::vector<uintptr_t>& grads, double momentum, double rate, double keep) {
  const size_t count = counts.size();
  require(weights.size() == count && velocities.size() == count && grads.size() == count, "lists of one length");
  std::vector<MomentumStep> steps;
  for (size_t i = 0; i < counts.size(); ++i)
    steps.push_back({pointer(weights[i]), pointer(velocities[i]), pointer(grads[i]), momentum, rate, keep});
  nb::gil_scoped_release release;
  momentum_steps(isa_named(isa), dtype_named(dtype), counts, steps);
}

const Binding binding([](nb::module_& m) {
  m.def("dropout_forward", &py_dropout_forward, nb::kw_only(), "isa"_a, "dtype"_a, "count"_a, "x"_a, "y"_a, "code"_a,
        "factors"_a, "seed"_a, "least"_a);
  m.def("concat_elu", &py_concat_elu, nb::kw_only(), "isa"_a, "dtype"_a, "rows"_a, "features"_a, "x"_a, "grad"_a,
        "to"_a, "scale"_a, "seed"_a, "least"_a);
  m.def("gated_sum", &py_gated_sum, nb::kw_only(), "isa"_a, "dtype"_a, "rows"_a, "features"_a, "x"_a, "pair"_a,
        "grad"_a, "to"_a);
  m.def("dropout_backward", &py_dropout_backward, nb::kw_only(), "isa"_a, "dtype"_a, "count"_a, "grad"_a, "code"_a,
        "grad_x"_a, "factors"_a);
  m.def("momentum_steps", &py_momentum_steps, nb::kw_only(), "isa"_a, "dtype"_a, "counts"_a, "weights"_a,
        "velocities"_a, "grads"_a, "momentum"_a, "rate"_a, "keep"_a);
});

}  // namespace
}  // namespace blocksparse
