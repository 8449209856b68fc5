// What an instruction set provides to the drivers of the ops: a table of functions per element type.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace blocksparse {

enum class DType { kFloat32, kFloat64, kBFloat16, kFloat16 };
enum class Activation { kNone, kRelu, kGelu, kSilu };

// A piece of one block row: the outputs [begin, end) of y[tokens, out] = activation(x W^T + bias), from a packed
// panel of x. W is a list of blocks; `transposed` blocks are stored [sum, output] instead of [output, sum].
struct RowPiece {
  int64_t blocks;           // in this row
  const int32_t* col;       // [blocks], the block of inputs each one multiplies
  const int64_t* position;  // [blocks], its place in `values`
  const void* values;
  int64_t block_out, block_sum;  // outputs and summed inputs of a block
  bool transposed;
  int64_t begin, end;     // outputs of the block row
  const void* panel;      // [in_features / fold, width] units
  int64_t width, tokens;  // of the panel: with padding, and of those the real ones
  const void* bias;       // of output `begin`, or null
  Activation activation;
  void* y;  // of the panel's first token, output `begin`
  int64_t y_stride;
};

// A chunk of tokens, features cut into blocks, to [blocks, tokens / fold, padded] units, zeros behind.
struct BlockColumns {
  const void* from;  // of token 0, feature 0
  int64_t stride;
  int64_t tokens;  // of the chunk: the last group of `fold` is filled with zeros
  int64_t block, padded;
  void* to;
  int64_t to_stride;  // units from block to block
};

// Blocks of grad^T x that follow each other in one block row, summed over a chunk of tokens.
struct SampledStrip {
  int64_t blocks;
  const int32_t* col;  // [blocks]
  const void* grad;    // [steps, block_out] units of the block row
  const void* x;       // [in_blocks, steps, padded_in] units
  int64_t steps;       // tokens / fold
  int64_t block_out, block_in, padded_in;
  void* values;  // [blocks, block_out, block_in]
  bool add;      // to what `values` holds
};

struct LinearKernels {
  int fold;         // numbers per unit along the sum
  int lanes;        // units, and sums, in a vector
  int max_vectors;  // of tokens in a panel
  size_t unit_size;
  void (*pack_panel)(const void* x, int64_t stride, int64_t tokens, int64_t first_unit, int64_t last_unit,
                     int64_t width, void* panel);
  void (*row_piece)(const RowPiece&);
  void (*pack_block_columns)(const BlockColumns&, int64_t first_step, int64_t last_step, int64_t first_block,
                             int64_t last_block);
  int64_t (*padded_in)(int64_t block_in);  // of the sampled product: a part of a vector, or whole vectors
  int64_t (*strip)(int64_t block_in);      // blocks of a row that it takes at a time
  void (*sampled_strip)(const SampledStrip&);
};

// The table for a dtype and the length of the blocks' sums (pairs need an even one).
using SelectLinear = const LinearKernels& (*)(DType dtype, int64_t block_sum);

struct InstructionSet {
  const char* name;
  bool (*present)();
  SelectLinear linear;
};

}  // namespace blocksparse
