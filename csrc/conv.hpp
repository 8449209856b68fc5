// The convolutions: cutting positions into runs, packing, multiplying.
#pragma once

#include "kernels.hpp"

namespace blocksparse {

// One axis of the outputs in runs, and what each of their taps meets: see Runs in plan.py.
struct AxisRuns {
  int64_t count, out_step, in_step;
  const int64_t *first, *length, *tap_start, *tap, *at, *begin, *end;
};

// One axis of a convolution's gradient: for each tap how many positions it maps, and the first of output and input.
struct AxisTaps {
  int64_t taps, stride;
  const int64_t *count, *first_output, *first_input;
};

struct Image {  // [n, size[0], size[1], size[2], channels]
  const void* data;
  int64_t size[3], channels;
};

struct ChannelRows {  // see ChannelPlan in plan.py
  const int64_t* start;
  const int32_t* col;
  const int64_t* position;
  const int32_t* order;
  int64_t rows;
};

// y = activation(W * x + bias) with blocks [block_out, block_sum, taps], or [block_sum, block_out, taps] if transposed.
// The three axes come cut into runs of the same taps, and whole.
void conv(const InstructionSet& isa, DType dtype, Activation activation, bool transposed, int64_t block_out,
          int64_t block_sum, const int64_t* kernel, int64_t n, const Image& x, const void* values, const void* bias,
          const Image& y, const AxisRuns* cut, const AxisRuns* whole, const ChannelRows& rows);

// values = the blocks [block_out, block_in, taps] of the gradient. Of a transposed convolution the names input and
// output of the inside are those of the convolution that it transposes: grad is the input.
void conv_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in, int64_t n,
                const Image& grad, const Image& x, bool transposed, void* values, const AxisTaps* axes,
                const int32_t* row, const int32_t* col, int64_t nnz);

}  // namespace blocksparse
