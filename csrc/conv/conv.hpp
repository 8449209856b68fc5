// Convolutions as implicit matrix products. The driver cuts positions into runs and packs the weights.
#pragma once

#include "core/types.hpp"

namespace blocksparse {

// Pack the weights of one block, [lane, sum, tap] or [sum, lane, tap], as [tap, sum / k_pack, padded] units, padded
// with zeros.
struct PackedBlock {
  const void* from;
  int64_t lanes, sum, taps, padded;
  bool transposed;  // [sum, lane, tap]
  void* to;
};

// The outputs of one block row at runs of positions of equal length. Class c holds the taps from `class_start[c]` to
// `class_start[c + 1]`; these meet the positions from `class_begin[c]` to `class_end[c]` of each run.
struct ConvPiece {
  int64_t blocks;       // in this row
  const int32_t* col;   // [blocks], the block of inputs each one multiplies
  const void* weights;  // [blocks, all_taps, steps, padded] units
  int64_t all_taps, steps, padded, outputs;
  int64_t classes;
  const int64_t *class_start, *class_begin, *class_end;
  bool covered;          // the first class meets all positions
  const int64_t* tap;    // [taps of all classes]
  const int64_t* at;     // [taps of all classes], units from the run's input to the tap's
  const void* x;         // units
  int64_t runs, length;  // positions of a run
  const int64_t* input;  // [runs], units from x to the run's first position
  int64_t input_step;    // units from position to position
  const void* bias;      // of the first output, or null
  Activation activation;
  void* y;                // of the first output
  const int64_t* output;  // [runs], numbers from y to the run's first position
  int64_t output_step;
  bool streams;  // y bypasses the caches; y and the blocks of outputs are aligned to cache lines
  // The next input, prefetched meanwhile: next_blocks blocks, and the same next_lines cache lines of each.
  int64_t next_blocks;
  const int32_t* next_col;  // [next_blocks]
  int64_t next_lines;
  const int64_t* next;  // [next_lines], bytes from x for the first block of inputs
};

// On tiles: the outputs of one block row at neighbouring positions of images with borders of zeros.
struct BorderedPiece {
  int64_t terms;
  const int64_t* input;    // [terms], units from x to what each multiplies
  const int64_t* weight;   // [terms], units from `weights`
  const void* weights;     // [..., steps, outputs] units
  int64_t steps, outputs;  // steps are half a tile or whole tiles, outputs whole tiles
  const void* x;           // of the first position
  int64_t x_step;          // units from position to position
  int64_t positions;       // whole tiles
  void* sums;              // [positions, sums_row]
  int64_t sums_row;
};

// y[at[p], outputs] = activation(sums[p, outputs] + bias)
struct PositionOutputs {
  const void* sums;  // [positions, sums_row]
  int64_t sums_row, positions, outputs;
  const void* bias;  // of the first output, or null
  Activation activation;
  void* y;            // of the first output
  const int64_t* at;  // [positions], numbers from y, or negative if a position has no output
  bool streams;
};

// Multiply rows of positions of two images: sums[row, lane] += sum over positions of left[row] * right[lane].
struct SampledRows {
  int64_t count, steps;
  const void* const* left;   // [count] units, `left_step` apart
  const void* const* right;  // [count] units, `right_step` apart
  int64_t rows, padded, left_step, right_step;
  void* sums;  // [rows, padded]
};

// Unpack the sums of one sampled block, [tap, row, padded] per slice, to [row, lane, tap], or to [lane, row, tap] if
// `swapped`.
struct UnpackedBlock {
  void* sums;  // all slices are added to the first
  int64_t slices, slice;
  int64_t rows, lanes, padded, taps;
  bool swapped;
  void* to;
};

struct ConvKernels {
  int k_pack, lanes;
  size_t unit_size, sum_size;
  bool converts;  // the type in memory is not the type that is multiplied
  void (*convert)(const void* from, int64_t count, void* to);
  void (*pack_block)(const PackedBlock&);
  void (*piece)(const ConvPiece&);
  void (*bordered_piece)(const BorderedPiece&);  // null without tiles
  void (*write_positions)(const PositionOutputs&);
  void (*sample)(const SampledRows&);
  void (*unpack_block)(const UnpackedBlock&);
};

// Return the kernels of `dtype` for blocks with `block_sum` inputs. Pairs of bfloat16 need an even number.
const ConvKernels& conv_kernels(const InstructionSet& isa, DType dtype, int64_t block_sum);

namespace avx512 {  // used by sets with pairs for every other type
const ConvKernels& select_conv(DType dtype, int64_t block_sum);
}

// One axis of the outputs cut into runs, and the taps that each run meets; see Runs in ops/conv/plan.py.
struct AxisRuns {
  int64_t count, out_step, in_step;
  const int64_t *first, *length, *tap_start, *tap, *at, *begin, *end;
};

// One axis of the weight gradient: for each tap the number of positions, and the first output and input position.
struct AxisTaps {
  int64_t taps, stride;
  const int64_t *count, *first_output, *first_input;
};

struct Image {  // [n, size[0], size[1], size[2], channels]
  const void* data;
  int64_t size[3], channels;
};

// Return whether outputs `y` of n images bypass the caches: large ones of which each cache line is written whole, so
// that none has to be read first.
bool bypasses_caches(const Image& y, int64_t n, int64_t block_out, int64_t size);

struct ChannelRows {  // see ChannelPlan in plan.py
  const int64_t* start;
  const int32_t* col;
  const int64_t* position;
  const int32_t* order;
  int64_t rows;
};

// y = activation(W * x + bias), with blocks [block_out, block_sum, taps], or [block_sum, block_out, taps] if
// transposed. `cut` has the three axes cut into runs that meet the same taps, `whole` has them uncut.
void conv(const InstructionSet& isa, DType dtype, Activation activation, bool transposed, int64_t block_out,
          int64_t block_sum, const int64_t* kernel, int64_t n, const Image& x, const void* values, const void* bias,
          const Image& y, const AxisRuns* cut, const AxisRuns* whole, const ChannelRows& rows);

// The same with tiles, for steps of one position: on images with borders of zeros, so that all positions meet all taps.
// Return false, and compute nothing, for others. `weights` has the packed blocks of the rows, one after another;
// `finite` says that none of their numbers is infinite or NaN.
bool conv_on_tiles(const ConvKernels& kernels, DType dtype, Activation activation, int64_t block_out, int64_t block_sum,
                   const int64_t* kernel, int64_t n, const Image& x, const void* weights, const void* bias,
                   const Image& y, const AxisRuns* whole, const ChannelRows& rows, bool finite);

// values = the blocks [block_out, block_in, taps] of the weight gradient. For a transposed convolution, "input" and
// "output" inside mean those of the convolution that it transposes, so `grad` is the input.
void conv_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in, int64_t n,
                const Image& grad, const Image& x, bool transposed, void* values, const AxisTaps* axes,
                const int32_t* row, const int32_t* col, int64_t nnz);

}  // namespace blocksparse
