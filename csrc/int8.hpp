// The linear product of 8-bit numbers: x rounded token by token, W beforehand.
#pragma once

#include <array>

#include "linear.hpp"

namespace blocksparse {

struct Int8Weights {
  const int8_t* values;  // [nnz, steps, padded_out, 4]
  const float* scale;    // [nnz, padded_out]
  const int32_t* sum;    // [nnz, padded_out]
  int64_t padded_out;
};

// One axis of a convolution: output o meets at tap t the input o * stride - padding + t * dilation, where that is one.
struct PatchAxis {
  int64_t input, output, kernel, stride, padding, dilation;
};
using Patches = std::array<PatchAxis, 3>;

// y = activation(x W^T + bias), x and y of a dtype other than float64. With patches, token t is not row t of x but the
// inputs of output t: for each block of channels the `block_in` numbers are those of all taps, one behind the other.
void int8_linear(const InstructionSet& isa, DType dtype, Activation activation, int64_t block_out, int64_t block_in,
                 int64_t tokens, Matrix x, const Patches* patches, const Int8Weights& weights, const void* bias,
                 void* y, int64_t out_features, const RowTasks& tasks);

}  // namespace blocksparse
