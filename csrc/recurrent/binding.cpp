#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"
#include "linear/row_tasks.hpp"
#include "recurrent/lstm.hpp"
#include "recurrent/small_world.hpp"

using namespace nb::literals;

namespace blocksparse {

namespace {

// The address of a weight's values, and the tasks of its product.
using PyWeight = std::tuple<uintptr_t, const PyRowTasks*>;

RecurrentWeight weight_of(const PyWeight& weight, int64_t out, int64_t in, bool transposed) {
  const auto& [values, plan] = weight;
  Sizes features(out, in), block = plan->block;
  if (transposed) std::swap(features.first, features.second), std::swap(block.first, block.second);
  require(plan->transposed == transposed && plan->features == features, "weights that fit the hidden units");
  return {out, in, block.first, block.second, pointer(values), transposed, plan->tasks};
}

TimeSteps steps_of(const Index<int64_t>& start, bool reverse, int64_t rows) {
  const TimeSteps steps = {start.data(), int64_t(start.size()) - 1, reverse};
  require_starts(start, steps.count, size_t(rows), "the start of each step, up to all rows");
  for (int64_t t = 0; t < steps.count; ++t)
    require(steps.rows(t) >= 0 && steps.rows(t) <= steps.rows(0), "no step with more rows than the first");
  return steps;
}

// Return rows of a table, chosen by an index if there is one.
InputRows indexed_input(const PyRows& rows, uintptr_t index) {
  return {pointer(rows.first), rows.second, static_cast<const int64_t*>(pointer(index))};
}

// `weights` has the weight of the gates and, for a multiplicative LSTM, the weight of the state.
void py_lstm_forward(const std::string& isa, const std::string& dtype, int64_t rows, int64_t hidden,
                     const Index<int64_t>& step, bool reverse, const std::vector<PyWeight>& weights, uintptr_t z,
                     const PyRows& pre, uintptr_t index, const PyRows& h_before, const PyRows& h_after,
                     uintptr_t h_final, const PyRows& c_before, const PyRows& c_after, uintptr_t c_final,
                     const PyRows& gates, const PyRows& factor, uintptr_t of_h, uintptr_t m) {
  const bool multiplied = weights.size() == 2;
  require(multiplied || weights.size() == 1, "one weight or two");
  const TimeSteps steps = steps_of(step, reverse, rows);
  const RecurrentWeight weight = weight_of(weights[0], 4 * hidden, hidden, false);
  MultipliedForward state;
  if (multiplied)
    state = {weight_of(weights[1], hidden, hidden, false), indexed_input(factor, index), pointer(of_h), pointer(m)};
  nb::gil_scoped_release release;
  lstm_forward(isa_named(isa), dtype_named(dtype), steps, weight,
               {hidden,
                indexed_input(pre, index),
                nullptr,
                {output(h_before), output(h_after), pointer(h_final)},
                {output(c_before), output(c_after), pointer(c_final)},
                output(gates)},
               pointer(z), multiplied ? &state : nullptr);
  trim_scratch();
}

void py_lstm_backward(const std::string& isa, const std::string& dtype, int64_t rows, int64_t hidden,
                      const Index<int64_t>& step, bool reverse, const std::vector<PyWeight>& weights,
                      const PyRows& gates, const PyRows& c_before, const PyRows& c_after, const PyRows& grad_y,
                      uintptr_t grad_h, uintptr_t grad_c, const PyRows& grad_pre, const PyRows& factor, uintptr_t index,
                      const PyRows& of_h, uintptr_t grad_m, const PyRows& grad_factor, const PyRows& grad_of_h) {
  const bool multiplied = weights.size() == 2;
  require(multiplied || weights.size() == 1, "one weight or two");
  const TimeSteps steps = steps_of(step, reverse, rows);
  const RecurrentWeight weight = weight_of(weights[0], 4 * hidden, hidden, true);
  MultipliedBackward state;
  if (multiplied)
    state = {weight_of(weights[1], hidden, hidden, true),
             indexed_input(factor, index),
             input(of_h),
             pointer(grad_m),
             output(grad_factor),
             output(grad_of_h)};
  nb::gil_scoped_release release;
  lstm_backward(isa_named(isa), dtype_named(dtype), steps, weight,
                {hidden, input(gates), input(c_before), input(c_after), input(grad_y), pointer(grad_h), pointer(grad_c),
                 output(grad_pre)},
                multiplied ? &state : nullptr);
  trim_scratch();
}

Hidden hidden_named(const std::string& kind) {
  if (kind == "gru") return Hidden::kGru;
  require(kind == "tanh" || kind == "relu", "the kind gru, tanh or relu");
  return kind == "tanh" ? Hidden::kTanh : Hidden::kRelu;
}

void py_hidden_forward(const std::string& isa, const std::string& dtype, const std::string& kind, int64_t rows,
                       int64_t hidden, const Index<int64_t>& step, bool reverse, const std::vector<PyWeight>& weights,
                       uintptr_t z, bool keep, const PyRows& pre, uintptr_t index, uintptr_t bias,
                       const PyRows& h_before, const PyRows& h_after, uintptr_t h_final) {
  require(weights.size() == 1, "one weight");
  const Hidden of = hidden_named(kind);
  const TimeSteps steps = steps_of(step, reverse, rows);
  const RecurrentWeight weight = weight_of(weights[0], hidden_gates(of) * hidden, hidden, false);
  nb::gil_scoped_release release;
  hidden_forward(isa_named(isa), dtype_named(dtype), steps, weight,
                 {of,
                  hidden,
                  indexed_input(pre, index),
                  pointer(bias),
                  {output(h_before), output(h_after), pointer(h_final)},
                  pointer(z),
                  keep});
  trim_scratch();
}

void py_hidden_backward(const std::string& isa, const std::string& dtype, const std::string& kind, int64_t rows,
                        int64_t hidden, const Index<int64_t>& step, bool reverse, const std::vector<PyWeight>& weights,
                        uintptr_t z, const PyRows& pre, uintptr_t bias, const PyRows& h_before, const PyRows& h_after,
                        const PyRows& grad_y, uintptr_t grad_h, uintptr_t carried, const PyRows& grad_z,
                        const PyRows& grad_pre) {
  require(weights.size() == 1, "one weight");
  const Hidden of = hidden_named(kind);
  const TimeSteps steps = steps_of(step, reverse, rows);
  const RecurrentWeight weight = weight_of(weights[0], hidden_gates(of) * hidden, hidden, true);
  nb::gil_scoped_release release;
  hidden_backward(
      isa_named(isa), dtype_named(dtype), steps, weight,
      {of, hidden, input(pre), pointer(bias), {output(h_before), output(h_after), nullptr}, pointer(z), true},
      {input(grad_y), pointer(grad_h), pointer(carried), output(grad_z), output(grad_pre)});
  trim_scratch();
}

// `weights` has the weights of the internal steps, then the weight of the gates.
SmallWorldWeights small_world_weights(const std::vector<PyWeight>& weights, int64_t hidden, bool transposed,
                                      uintptr_t gains, uintptr_t biases) {
  require(weights.size() >= 2, "two weights or more");
  SmallWorldWeights found = {{}, pointer(gains), pointer(biases)};
  for (const PyWeight& weight : weights) {
    const bool last = &weight == &weights.back();
    found.weights.push_back(weight_of(weight, last ? 4 * hidden : hidden, hidden, transposed));
  }
  return found;
}

void py_small_world_forward(const std::string& isa, const std::string& dtype, int64_t rows, int64_t hidden,
                            const Index<int64_t>& step, bool reverse, const std::vector<PyWeight>& weights,
                            double epsilon, bool keep, uintptr_t gains, uintptr_t biases, uintptr_t index,
                            const PyRows& factor, const PyRows& term, const PyRows& h_before, const PyRows& h_after,
                            uintptr_t h_final, const PyRows& c_before, const PyRows& c_after, uintptr_t c_final,
                            const PyRows& gates, uintptr_t y, uintptr_t z, uintptr_t z_scale, uintptr_t normed,
                            uintptr_t given, uintptr_t scale) {
  const TimeSteps steps = steps_of(step, reverse, rows);
  const SmallWorldWeights all = small_world_weights(weights, hidden, false, gains, biases);
  const DType type = dtype_named(dtype);
  const int64_t of_gates = (int64_t(weights.size()) - 1) * hidden * size_of(type);
  nb::gil_scoped_release release;
  small_world_forward(isa_named(isa), type, steps, all,
                      {hidden,
                       {pointer(biases + of_gates), 0},
                       pointer(gains + of_gates),
                       {output(h_before), output(h_after), pointer(h_final)},
                       {output(c_before), output(c_after), pointer(c_final)},
                       output(gates)},
                      {epsilon,
                       indexed_input(factor, index),
                       indexed_input(term, index),
                       pointer(y),
                       {keep, pointer(z), pointer(z_scale), pointer(normed), pointer(given), pointer(scale)}});
  trim_scratch();
}

void py_small_world_backward(const std::string& isa, const std::string& dtype, int64_t rows, int64_t hidden,
                             const Index<int64_t>& step, bool reverse, const std::vector<PyWeight>& weights,
                             uintptr_t gains, uintptr_t biases, uintptr_t index, const PyRows& factor,
                             const PyRows& gates, const PyRows& c_before, const PyRows& c_after, const PyRows& grad_y,
                             uintptr_t grad_h, uintptr_t grad_c, const PyRows& grad_pre, uintptr_t z, uintptr_t z_scale,
                             uintptr_t normed, uintptr_t given, uintptr_t scale, uintptr_t grad, uintptr_t grad_affine,
                             const PyRows& grad_factor, const PyRows& grad_term, uintptr_t grad_z, uintptr_t grad_taken,
                             uintptr_t grad_gains, uintptr_t grad_biases) {
  const TimeSteps steps = steps_of(step, reverse, rows);
  const SmallWorldWeights all = small_world_weights(weights, hidden, true, gains, biases);
  nb::gil_scoped_release release;
  small_world_backward(isa_named(isa), dtype_named(dtype), steps, all,
                       {hidden, input(gates), input(c_before), input(c_after), input(grad_y), pointer(grad_h),
                        pointer(grad_c), output(grad_pre)},
                       {indexed_input(factor, index),
                        {true, pointer(z), pointer(z_scale), pointer(normed), pointer(given), pointer(scale)},
                        pointer(grad),
                        pointer(grad_affine),
                        output(grad_factor),
                        output(grad_term),
                        pointer(grad_z),
                        pointer(grad_taken),
                        pointer(grad_gains),
                        pointer(grad_biases)});
  trim_scratch();
}

const Binding binding([](nb::module_& m) {
  const PyRows none;
  m.def("lstm_forward", &py_lstm_forward, nb::kw_only(), "isa"_a, "dtype"_a, "rows"_a, "hidden"_a, "step"_a.noconvert(),
        "reverse"_a, "weights"_a.noconvert(), "z"_a, "pre"_a, "index"_a, "h_before"_a, "h_after"_a, "h_final"_a,
        "c_before"_a, "c_after"_a, "c_final"_a, "gates"_a, "factor"_a = none, "of_h"_a = 0, "m"_a = 0);
  m.def("lstm_backward", &py_lstm_backward, nb::kw_only(), "isa"_a, "dtype"_a, "rows"_a, "hidden"_a,
        "step"_a.noconvert(), "reverse"_a, "weights"_a.noconvert(), "gates"_a, "c_before"_a, "c_after"_a, "grad_y"_a,
        "grad_h"_a, "grad_c"_a, "grad_pre"_a, "factor"_a = none, "index"_a = 0, "of_h"_a = none, "grad_m"_a = 0,
        "grad_factor"_a = none, "grad_of_h"_a = none);
  m.def("hidden_forward", &py_hidden_forward, nb::kw_only(), "isa"_a, "dtype"_a, "kind"_a, "rows"_a, "hidden"_a,
        "step"_a.noconvert(), "reverse"_a, "weights"_a.noconvert(), "z"_a, "keep"_a = false, "pre"_a, "index"_a,
        "bias"_a, "h_before"_a, "h_after"_a, "h_final"_a);
  m.def("hidden_backward", &py_hidden_backward, nb::kw_only(), "isa"_a, "dtype"_a, "kind"_a, "rows"_a, "hidden"_a,
        "step"_a.noconvert(), "reverse"_a, "weights"_a.noconvert(), "z"_a, "pre"_a, "bias"_a, "h_before"_a, "h_after"_a,
        "grad_y"_a, "grad_h"_a, "carried"_a, "grad_z"_a, "grad_pre"_a);
  m.def("small_world_forward", &py_small_world_forward, nb::kw_only(), "isa"_a, "dtype"_a, "rows"_a, "hidden"_a,
        "step"_a.noconvert(), "reverse"_a, "weights"_a.noconvert(), "epsilon"_a, "keep"_a, "gains"_a, "biases"_a,
        "index"_a, "factor"_a, "term"_a, "h_before"_a, "h_after"_a, "h_final"_a, "c_before"_a, "c_after"_a, "c_final"_a,
        "gates"_a, "y"_a, "z"_a, "z_scale"_a, "normed"_a, "given"_a, "scale"_a);
  m.def("small_world_backward", &py_small_world_backward, nb::kw_only(), "isa"_a, "dtype"_a, "rows"_a, "hidden"_a,
        "step"_a.noconvert(), "reverse"_a, "weights"_a.noconvert(), "gains"_a, "biases"_a, "index"_a, "factor"_a,
        "gates"_a, "c_before"_a, "c_after"_a, "grad_y"_a, "grad_h"_a, "grad_c"_a, "grad_pre"_a, "z"_a, "z_scale"_a,
        "normed"_a, "given"_a, "scale"_a, "grad"_a, "grad_affine"_a, "grad_factor"_a, "grad_term"_a, "grad_z"_a,
        "grad_taken"_a, "grad_gains"_a, "grad_biases"_a);
});

}  // namespace
}  // namespace blocksparse
