// All steps of a recurrence in one call.
#pragma once

#include <functional>

#include "linear/linear.hpp"
#include "lstm_gates/lstm_gates.hpp"

namespace blocksparse {

// Step t has the rows [start[t], start[t + 1]) of all data, and never more rows than the step before.
struct TimeSteps {
  const int64_t* start;  // [count + 1]
  int64_t count;
  bool reverse;  // time runs from the last step to the first

  int64_t at(int64_t nth) const { return reverse ? count - 1 - nth : nth; }
  int64_t rows(int64_t t) const { return start[t + 1] - start[t]; }
  bool aligned() const { return count == 0 || rows(count - 1) == rows(0); }
};

// A weight [out, in] and the tasks of its product x W^T, or x W if transposed.
struct RecurrentWeight {
  int64_t out, in, block_out, block_in;
  const void* values;
  bool transposed;
  RowTasks tasks;
  bool has_turned_blocks = false;  // blocks are [in, out]
};

// y = the product of these rows, contiguous.
void product(const InstructionSet& isa, DType dtype, const RecurrentWeight& weight, int64_t rows, const InputRows& x,
             void* y);

// A state through time: the state before and after each step, [rows, hidden]. `final` is the last state of each
// sequence; null if each step reads its input where the step before wrote its output. Without `before`, `final` holds
// the initial state at first. Without both, each step overwrites it.
struct StatePath {
  OutputRows before, after;
  void* final;  // [batch, hidden]
};

struct GatedForward {
  int64_t hidden;
  InputRows add;     // the gates are those of gain z + add
  const void* gain;  // or null
  StatePath h, c;
  OutputRows gates;  // may be null
};

struct GatedBackward {
  int64_t hidden;
  InputRows gates, c_before, c, grad_y;
  void *grad_h, *grad_c;  // [batch, hidden], of the final states; then of the initial ones
  OutputRows grad_pre;    // at gain z + add
};

// The rows of one step: `count` rows from row `at` on.
struct StepRows {
  int64_t at, count;
};

// `z_of` computes z [rows, 4 hidden] of a step from its h.
void gated_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const GatedForward& data,
                   const std::function<InputRows(StepRows, const InputRows&)>& z_of);

// `to_h` writes the gradient at the h that a step reads into `grad_h`, from `grad_pre`.
void gated_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const GatedBackward& data,
                    const std::function<void(StepRows)>& to_h);

// A multiplicative LSTM multiplies its weight with m = factor * of_h instead of h, where of_h = h M^T.
struct MultipliedForward {
  RecurrentWeight weight;  // M
  InputRows factor;
  void *of_h, *m;  // [rows, hidden]
};

struct MultipliedBackward {
  RecurrentWeight weight;
  InputRows factor, of_h;
  void* grad_m;  // [batch, hidden], working memory
  OutputRows grad_factor, grad_of_h;
};

// z [batch, 4 hidden] is working memory; `multiplied` is null for a plain LSTM.
void lstm_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                  const GatedForward& data, void* z, const MultipliedForward* multiplied);

void lstm_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                   const GatedBackward& data, const MultipliedBackward* multiplied);

// A recurrence without a state c.
struct HiddenSteps {
  Hidden kind;
  int64_t hidden;
  InputRows add;     // the products of the inputs
  const void* bias;  // of the product of the state, or null
  StatePath h;
  void* z;      // the products of the states: of a step, [batch, gates * hidden], or of all, [rows, gates * hidden]
  bool keep_z;  // whether it has those of all steps
};

struct HiddenGradients {
  InputRows grad_y;
  void *grad_h, *carried;  // [batch, hidden]: grad_h of the final states, and 0; then the initial ones' is their sum
  OutputRows grad_z, grad_add;
};

void hidden_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                    const HiddenSteps& data);

// The states of `data.h` and all products z are those that the forward pass wrote.
void hidden_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                     const HiddenSteps& data, const HiddenGradients& gradients);

}  // namespace blocksparse
