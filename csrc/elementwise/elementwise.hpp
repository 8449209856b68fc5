// Elementwise operations: dropout with the activation before it, ELUs of both signs, the step of an optimizer, products
// of rows.
#pragma once

#include <vector>

#include "core/types.hpp"

namespace blocksparse {

// y = factor[code] x, where the code is drawn: 0 where a random number is below `least`, else 1 where x > 0, else 2.
struct DropoutForward {
  const void* x;
  void* y;
  uint8_t* code;
  double factor[3];
  uint64_t seed;
  uint16_t least;
};

// grad_x = factor[code] grad.
struct DropoutBackward {
  const void* grad;
  const uint8_t* code;
  void* grad_x;
  double factor[3];
};

// Of rows of x side by side, whose outputs have twice the features: y = scale [elu(x), elu(-x)], and its gradient.
// Where one of two random numbers for each of x is below `least`, an output is dropped.
struct ConcatElu {
  int64_t features;
  const void *x, *grad;  // grad of the gradient only
  void* to;
  double scale;
  uint64_t seed;
  uint16_t least;
};
constexpr int64_t kConcatEluPart = kPartNumbers / 2;

// velocity = momentum velocity - rate grad; weight = keep weight + velocity.
struct MomentumStep {
  void *weight, *velocity;
  const void* grad;
  double momentum, rate, keep;
};

// y = a b.
struct RowsProduct {
  InputRows a, b;
  OutputRows y;
};

// Of the numbers [first, last) of the part that begins at a multiple of kPartNumbers, or of a part of rows.
struct ElementwiseKernels {
  void (*dropout_forward)(const DropoutForward&, int64_t first, int64_t last);
  void (*dropout_backward)(const DropoutBackward&, int64_t first, int64_t last);
  // Of parts of kConcatEluPart.
  void (*concat_elu_forward)(const ConcatElu&, int64_t first, int64_t last);
  void (*concat_elu_backward)(const ConcatElu&, int64_t first, int64_t last);
  void (*momentum_step)(const MomentumStep&, int64_t first, int64_t last);
  void (*multiply)(const RowsProduct&, const RowsPart&);
};

void dropout_forward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutForward& dropout);
void dropout_backward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutBackward& dropout);

// Of x, or of grad and x if the gradient is given.
void concat_elu(const InstructionSet& isa, DType dtype, int64_t rows, const ConcatElu& call);

// Tensor i has counts[i] numbers.
void momentum_steps(const InstructionSet& isa, DType dtype, const std::vector<int64_t>& counts,
                    const std::vector<MomentumStep>& steps);

void multiply(const InstructionSet& isa, DType dtype, int64_t rows, int64_t features, const RowsProduct& product);

}  // namespace blocksparse
