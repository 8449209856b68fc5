// Linear products and convolutions of 8-bit numbers: x is quantized per token in each call, W beforehand.
#pragma once

#include <array>

#include "linear/linear.hpp"

namespace blocksparse {

// One quantized row of x: element k is (to[k] - 128) * scale, in blocks of `padded` bytes.
struct QuantizedRow {
  const void* from;
  int64_t blocks, block, padded;
  uint8_t* to;
  float* scale;  // NaN where a number is not finite
};

// The outputs [begin, end) of one block row of y = activation(x W^T + bias), with x and W in 8 bits.
struct Int8Piece {
  int64_t blocks;      // in this row, contiguous
  const int32_t* col;  // [blocks], the block of inputs each one multiplies
  const char* w;       // of the first block: int8 [steps, padded_out, 4], 4 inputs a step
  const char* scales;  // of the first block or, by_row, of the row: see Int8Weights
  int64_t block_bytes;
  bool by_row;       // whether the row has scales, so that the integers of all blocks are summed first
  const char* next;  // weights to prefetch, probably those of the next piece
  int64_t next_bytes;
  int64_t steps, padded_out, begin, end;
  const uint8_t* x;      // [tokens, in_blocks, 4 steps]
  int64_t x_stride;      // bytes
  const float* x_scale;  // [tokens]
  int64_t tokens;
  const void* bias;  // of output `begin`, or null
  Activation activation;
  void* y;  // of token 0, output `begin`
  int64_t y_stride;
  bool streams;  // whole cache lines of y bypass the caches
};

struct Int8Kernels {
  void (*quantize)(const QuantizedRow&);
  // On tiles it reads, and ignores, up to kTileTokens - 1 tokens more.
  void (*piece)(const Int8Piece&);
};

// The outputs of a piece begin at a multiple of kTileOutputs: two AMX tiles, or two vectors of AVX-512.
constexpr int64_t kTileTokens = 32, kTileOutputs = 32;

// Blocks of int8 [steps, padded_out, 4], each followed by its scales unless rows have scales. Scales are float32
// [padded_out], then the sums of each output's weights, int32 [padded_out]. Fetching the weights fetches them too.
struct Int8Weights {
  const char* blocks;
  const char* row_scales;  // or null; the sums of whole rows must fit int32
  int64_t padded_out;
};

// One axis of a convolution: output o meets with tap t the input o * stride - padding + t * dilation, if that is
// inside.
struct PatchAxis {
  int64_t input, output, kernel, stride, padding, dilation;
};
using Patches = std::array<PatchAxis, 3>;

// y = activation(x W^T + bias); x and y are of any dtype but float64. With patches, token t stands for the inputs of
// output t instead of row t of x: for each block of channels, the `block_in` elements of all taps in turn.
void int8_linear(const InstructionSet& isa, DType dtype, Activation activation, int64_t block_out, int64_t block_in,
                 int64_t tokens, Matrix x, const Patches* patches, const Int8Weights& weights, const void* bias,
                 void* y, int64_t out_features, const RowTasks& tasks);

}  // namespace blocksparse
