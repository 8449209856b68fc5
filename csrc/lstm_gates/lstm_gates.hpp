// The gates of one step of an LSTM, a GRU or a plain recurrence. Threads share parts of rows and features.
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

// Recurrences without a state c.
enum class Hidden { kGru, kTanh, kRelu };
constexpr int64_t hidden_gates(Hidden kind) { return kind == Hidden::kGru ? 3 : 1; }

// One step of such a recurrence, from z = h W^T, the product of the input `add`, and the bias of z. A GRU has the gates
// r, u, n: h_out = n + u (h - n) with n = tanh(add + r (z + bias)). A plain one has h_out = activation(add + z + bias).
struct HiddenForward {
  Hidden kind;
  int64_t hidden;
  InputRows z, add;  // gates * `hidden` features
  const void* bias;  // or null
  InputRows h;
  OutputRows h_out;
};

// The gradients of such a step at z + bias and at `add`, from those at h_out, grad_h + grad_y. The gradient at h is
// what grad_z gives, times W, and for a GRU `carried`. Before, `carried` is another part of the gradient at h_out.
struct HiddenBackward {
  Hidden kind;
  int64_t hidden;
  InputRows z, add;
  const void* bias;  // or null
  InputRows h, h_out, grad_h, grad_y;
  OutputRows carried, grad_z, grad_add;  // carried and grad_add are of a GRU only
};

struct GatesKernels {  // the part's features are those of each gate
  void (*forward)(const GatesForward&, const RowsPart&);
  void (*backward)(const GatesBackward&, const RowsPart&);
  void (*hidden_forward)(const HiddenForward&, const RowsPart&);
  void (*hidden_backward)(const HiddenBackward&, const RowsPart&);
};

void gates_forward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesForward& step);
void gates_backward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesBackward& step);
void hidden_gates_forward(const InstructionSet& isa, DType dtype, int64_t rows, const HiddenForward& step);
void hidden_gates_backward(const InstructionSet& isa, DType dtype, int64_t rows, const HiddenBackward& step);

}  // namespace blocksparse
