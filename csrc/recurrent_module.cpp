#include "recurrent_module.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arguments.hpp"
#include "isa_dispatch.hpp"
#include "lstm.hpp"
#include "parallel.hpp"

using namespace nb::literals;

namespace blocksparse {

namespace {

// A weight: the address of its values, its [out, in], its blocks', and the plan of its product as in `row_tasks`.
using PyWeight = std::tuple<uintptr_t, std::array<int64_t, 2>, std::array<int64_t, 2>, Index<int64_t>, Index<int32_t>,
                            Index<int64_t>, Index<int32_t>, Index<int32_t>, Index<int32_t>, Index<int64_t>>;

RecurrentWeight weight_of(const PyWeight& weight, int64_t out, int64_t in, bool transposed) {
  const auto& [values, shape, block, start, col, position, row, begin, end, task_start] = weight;
  require(shape[0] == out && shape[1] == in, "weights that fit the hidden units");
  const int64_t out_blocks = blocks_in(out, block[0]), in_blocks = blocks_in(in, block[1]);
  return {out,
          in,
          block[0],
          block[1],
          pointer(values),
          transposed,
          row_tasks(transposed ? in_blocks : out_blocks, start, col, position, row, begin, end, task_start)};
}

TimeSteps steps_of(const Index<int64_t>& start, bool reverse, int64_t rows) {
  const TimeSteps steps = {start.data(), int64_t(start.size()) - 1, reverse};
  require_starts(start, steps.count, size_t(rows), "the start of each step, up to all rows");
  for (int64_t t = 0; t < steps.count; ++t)
    require(steps.rows(t) >= 0 && steps.rows(t) <= steps.rows(0), "no step with more rows than the first");
  return steps;
}

// Rows of a table, if there is an index of them.
InputRows input(const PyRows& rows, uintptr_t index) {
  return {pointer(rows.first), rows.second, static_cast<const int64_t*>(pointer(index))};
}

// The weights are those of the gates and, of a multiplicative LSTM, of the state.
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
    state = {weight_of(weights[1], hidden, hidden, false), input(factor, index), pointer(of_h), pointer(m)};
  nb::gil_scoped_release release;
  lstm_forward(isa_named(isa), dtype_named(dtype), steps, weight,
               {hidden,
                input(pre, index),
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
             input(factor, index),
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

}  // namespace

void add_recurrences(nb::module_& m) {
  const PyRows none;
  m.def("lstm_forward", &py_lstm_forward, nb::kw_only(), "isa"_a, "dtype"_a, "rows"_a, "hidden"_a, "step"_a.noconvert(),
        "reverse"_a, "weights"_a.noconvert(), "z"_a, "pre"_a, "index"_a, "h_before"_a, "h_after"_a, "h_final"_a,
        "c_before"_a, "c_after"_a, "c_final"_a, "gates"_a, "factor"_a = none, "of_h"_a = 0, "m"_a = 0);
  m.def("lstm_backward", &py_lstm_backward, nb::kw_only(), "isa"_a, "dtype"_a, "rows"_a, "hidden"_a,
        "step"_a.noconvert(), "reverse"_a, "weights"_a.noconvert(), "gates"_a, "c_before"_a, "c_after"_a, "grad_y"_a,
        "grad_h"_a, "grad_c"_a, "grad_pre"_a, "factor"_a = none, "index"_a = 0, "of_h"_a = none, "grad_m"_a = 0,
        "grad_factor"_a = none, "grad_of_h"_a = none);
}

}  // namespace blocksparse
