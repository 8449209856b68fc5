// Convolutions with stride 1 over images [n, channels, height, width] and small blocks. Lanes are positions, so that
// blocks smaller than a vector waste nothing.
#pragma once

#include "core/types.hpp"

namespace blocksparse {

// One axis: tap t of output position j meets input position j + first + t * step.
struct PlaneAxis {
  int64_t input, output, taps, first, step;
};

// Blocks by rows of outputs. Block b has block_out x block_sum x taps values from `position[b]` on; its inputs are
// block `col[b]` of channels.
struct PlaneBlocks {
  int64_t rows, block_out, block_sum, out_step, sum_step;  // steps in `values`, from one channel to the next
  const int64_t* start;
  const int32_t* col;
  const int64_t* position;
};

struct PlaneImages {
  const void* data;  // [n, channels, height, width]
  int64_t n, channels;
};

// Some channels of some rows of an image, copied with zeros around them.
struct PackedPlanes {
  const void* from;
  int64_t channels, from_plane, from_rows, width;  // `from_rows` rows of `width` numbers
  int64_t first_row, left;                         // of the copy, in the image; zeros at the left of each row
  void* to;
  int64_t to_plane, rows, pitch;
};

// The outputs of a row of blocks: sums over terms of w[t][o * w_row + k * w_step] * x[t][k * x_step + position].
struct PlaneRow {
  const void* const* w;
  const void* const* x;
  int64_t terms, w_row, w_step, x_step, steps;
  int64_t outputs, vectors, rows, pitch, width;  // positions: `rows` rows of `width`, `pitch` apart
  const void* bias;                              // of the first output, or null
  Activation activation;
  void* y;
  int64_t y_plane;
};

// sums[o, c] += products of the gradient's plane o with column c of the input; each sum is a vector of partial sums.
struct PlaneSamples {
  const void* grad;
  int64_t outputs, grad_plane, grad_pitch;
  const void* const* x;
  int64_t columns, pitch, rows, width;
  void* sums;
};

struct ConvPlanesKernels {
  int lanes;
  bool (*all_finite)(const void* values, int64_t count);
  void (*pack)(const PackedPlanes&);
  void (*row)(const PlaneRow&);
  void (*sample)(const PlaneSamples&);
  // to[i] = the sum of vector i over all slices and lanes.
  void (*add_up)(const void* sums, int64_t slices, int64_t slice, int64_t count, void* to);
};

// y = activation(W * x + bias). Returns false, without a result, if zeros around the image would meet a value that is
// not finite.
bool conv_planes(const InstructionSet& isa, DType dtype, Activation activation, const PlaneImages& x,
                 const PlaneAxis* axes, const PlaneBlocks& blocks, const void* values, const void* bias, void* y);

// values = the blocks [block_out, block_in, taps] of the gradient, given that of y.
void conv_planes_wgrad(const InstructionSet& isa, DType dtype, const PlaneImages& grad, const PlaneImages& x,
                       const PlaneAxis* axes, int64_t block_out, int64_t block_in, int64_t nnz, const int32_t* row,
                       const int32_t* col, void* values);

}  // namespace blocksparse
