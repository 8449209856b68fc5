// The gates of one LSTM step. Threads share parts of rows and features.
#pragma once

#include "core/types.hpp"

namespace blocksparse {

// One LSTM step: c_out = f c + i g and h = o tanh(c_out), with the gates i, f, g, o from gain * z + add. z, add, gain
// and gates have 4 * `hidden` features; the states c are in the type of sums.
struct GatesForward {
  int64_t hidden;
  InputRows z, add;  // add may be null
  const void* gain;  // or null
  InputRows c;
  OutputRows h, c_out, gates;  // gates may be null
};

// The gradients at gain * z + add and at the state before, from the gradients at h (grad_h + grad_y) and at c. Each of
// these three may be null.
struct GatesBackward {
  int64_t hidden;
  InputRows gates, c_before, c, grad_h, grad_y, grad_c;
  OutputRows grad_pre, grad_c_before;
};

struct GatesKernels {  // the part's features are those of each gate
  void (*forward)(const GatesForward&, const RowsPart&);
  void (*backward)(const GatesBackward&, const RowsPart&);
};

void gates_forward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesForward& step);
void gates_backward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesBackward& step);

}  // namespace blocksparse
