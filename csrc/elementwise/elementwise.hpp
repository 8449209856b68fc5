// Elementwise ops: dropout with the activation before it, concatenated ELU, gated sums, the momentum step of an
// optimizer, and products of rows.
#pragma once

#include <vector>

#include "core/types.hpp"

namespace blocksparse {

// y = factor[code] * x with a random code: 0 (dropped) if a random number is below `least`, else 1 if x > 0, else 2.
struct DropoutForward {
  const void* x;
  void* y;
  uint8_t* code;
  double factor[3];
  uint64_t seed;
  uint16_t least;
};

// grad_x = factor[code] * grad.
struct DropoutBackward {
  const void* grad;
  const uint8_t* code;
  void* grad_x;
  double factor[3];
};

// Concatenated ELU: y = scale * [elu(x), elu(-x)] for contiguous rows of x, so that y has twice the features; or its
// gradient. Each output is dropped if its random number is below `least`.
struct ConcatElu {
  int64_t features;
  const void *x, *grad;  // grad of the gradient only
  void* to;
  double scale;
  uint64_t seed;
  uint16_t least;
};
constexpr int64_t kConcatEluPart = kPartNumbers / 2;

// Rows of x + a * sigmoid(b), contiguous, where each row of `pair` is [a, b]; or with `grad` the gradient at `pair`.
struct GatedSum {
  int64_t features;
  const void *x, *pair, *grad;
  void* to;
};

// velocity = momentum * velocity - rate * grad; weight = keep * weight + velocity.
struct MomentumStep {
  void *weight, *velocity;
  const void* grad;
  double momentum, rate, keep;
};

// y = a * b.
struct RowsProduct {
  InputRows a, b;
  OutputRows y;
};

// Each kernel computes the elements [first, last) of a part that begins at a multiple of kPartNumbers, or a part of
// rows.
struct ElementwiseKernels {
  void (*dropout_forward)(const DropoutForward&, int64_t first, int64_t last);
  void (*dropout_backward)(const DropoutBackward&, int64_t first, int64_t last);
  // With parts of kConcatEluPart elements.
  void (*concat_elu_forward)(const ConcatElu&, int64_t first, int64_t last);
  void (*concat_elu_backward)(const ConcatElu&, int64_t first, int64_t last);
  void (*gated_sum)(const GatedSum&, const RowsPart&);
  void (*gated_sum_backward)(const GatedSum&, const RowsPart&);
  void (*momentum_step)(const MomentumStep&, int64_t first, int64_t last);
  void (*multiply)(const RowsProduct&, const RowsPart&);
};

void dropout_forward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutForward& dropout);
void dropout_backward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutBackward& dropout);

// The forward pass, or the backward pass if `call.grad` is not null.
void concat_elu(const InstructionSet& isa, DType dtype, int64_t rows, const ConcatElu& call);

// The forward pass, or the backward pass if `call.grad` is not null.
void gated_sum(const InstructionSet& isa, DType dtype, int64_t rows, const GatedSum& call);

// Step all tensors; tensor i has counts[i] elements.
void momentum_steps(const InstructionSet& isa, DType dtype, const std::vector<int64_t>& counts,
                    const std::vector<MomentumStep>& steps);

void multiply(const InstructionSet& isa, DType dtype, int64_t rows, int64_t features, const RowsProduct& product);

}  // namespace blocksparse
