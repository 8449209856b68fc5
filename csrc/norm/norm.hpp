// Layer norms, and the normalization of weights. In layer norms threads share rows and then, for the gradients of gains
// and biases, features.
#pragma once

#include "core/types.hpp"

namespace blocksparse {

// n = (x - mean) / deviation over each group of `features` contiguous elements of a row, and y = (gain * n + bias) *
// factor + term, with an optional relu. Gain and bias have the elements of a row.
struct NormForward {
  int64_t features, groups;
  double epsilon;  // added to the variance
  InputRows x;
  OutputRows normed;        // n; may be in place of x, or null
  void* scale;              // [rows, groups], 1 / deviation in the type of sums; or null
  const void *gain, *bias;  // these and what follows are for y
  InputRows factor, term;   // each may be null
  bool relu;
  OutputRows y;  // or null
};

// The gradients at x, at the factor, and at gain * n + bias, which equals the gradient at the term.
struct NormBackward {
  int64_t features, groups;
  InputRows grad;  // at y
  const void *gain, *bias;
  InputRows normed;
  const void* scale;
  InputRows y, factor;  // y only with a relu; each may be null
  OutputRows grad_factor;
  OutputRows grad_affine;       // null without a relu and a factor, where it would be `grad`
  void *grad_gain, *grad_bias;  // added to, in the type of sums
  OutputRows grad_x;
};

// Weights divided by the norm of their output's and multiplied by its gain; or with `grad` the gradients at both. Row r
// of blocks is `start[r]` to `start[r + 1]`; a block is [outputs, inner].
struct WeightNorm {
  const void* values;
  const int64_t* start;
  int64_t outputs, inner;
  const void* gain;  // of all outputs, or null for 1
  double least;      // a lower bound of norms
  const void* grad;
  void *to, *grad_gain;  // grad_gain only with a gain and `grad`
};

struct NormKernels {
  void (*forward)(const NormForward&, int64_t first_row, int64_t last_row);
  void (*backward)(const NormBackward&, int64_t first_row, int64_t last_row);
  void (*weights)(const WeightNorm&, int64_t row);  // a row of blocks; float32 and float64 only
  // Run after `backward`: sums the gradients of gains and biases over all rows, for the elements [first, last) of a
  // row.
  void (*sums)(const NormBackward&, int64_t rows, int64_t first, int64_t last);
};

void norm_forward(const InstructionSet& isa, DType dtype, int64_t rows, const NormForward& norm);
void norm_backward(const InstructionSet& isa, DType dtype, int64_t rows, const NormBackward& norm);
void weight_norm(const InstructionSet& isa, DType dtype, int64_t rows, const WeightNorm& norm);

}  // namespace blocksparse
