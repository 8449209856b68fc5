// Linear products on packed panels. The driver cuts tokens into panels, packs and multiplies.
#pragma once

#include "core/types.hpp"

namespace blocksparse {

// The outputs [begin, end) of one block row of x W^T, from a packed panel of x. W is a list of blocks; `transposed`
// blocks are stored [sum, output] instead of [output, sum].
struct RowPiece {
  int64_t blocks;           // in this row
  const int32_t* col;       // [blocks], the block of inputs each one multiplies
  const int64_t* position;  // [blocks], its place in `values`; on tiles, those of the row begin at `values`, in order
  const void* values;
  int64_t block_out, block_sum;  // outputs and summed inputs of a block
  bool transposed;
  int64_t begin, end;  // outputs of the block row
  const void* panel;   // [in_features / k_pack, width] units; x itself for few tokens
  int64_t width;       // tokens of the padded panel; elements per row of x for few tokens
  int64_t depth;       // 0, or on tiles the panel is [in_features / k_pack / depth, width / lanes, depth, lanes]
};

// y[tokens, outputs] = activation(sums + bias), for contiguous outputs.
struct LinearOutputs {
  void* sums;  // [count, width]
  int64_t count, width, tokens;
  const void* bias;  // of the first output, or null
  Activation activation;
  void* y;  // of the first token and output
  int64_t y_stride;
  bool streams;  // whole cache lines bypass the caches
};

// Pack a chunk of tokens, with features cut into blocks, as [blocks, tokens / k_pack, padded] units, padded with zeros.
struct BlockColumns {
  const void* from;  // of token 0, feature 0
  int64_t stride;
  int64_t tokens;  // of the chunk: the last group of `k_pack` is filled with zeros
  int64_t block, padded;
  void* to;
  int64_t to_stride;  // units from block to block
};

// Consecutive stored blocks of one block row of grad^T x, summed over a chunk of tokens.
struct SampledStrip {
  int64_t blocks;
  const int32_t* col;  // [blocks]
  const void* grad;  // [steps, block_out] units of the block row; on tiles [tiles of outputs, steps / 16, outputs, 16]
  const void* x;     // [in_features / chunk, steps, chunk] units, of features padded by block
  int64_t steps;     // tokens / k_pack
  int64_t block_out, block_in, padded_in;
  int64_t chunk;  // of a vector or tile if blocks are whole ones, padded_in otherwise
  void* values;   // [blocks, block_out, block_in]
  bool add;       // to what `values` holds
};

// A matrix [sum, outputs] of numbers, transposed to [outputs, units] pairs along the sum. Missing numbers are zeros.
struct TurnedMatrix {
  const void* from;
  int64_t stride, sum, outputs, units;
  void* to;
  int64_t to_row, to_tile;  // units from an output to the next, and from 16 units of one to the next 16
};

struct LinearKernels {
  int k_pack;       // numbers per unit along the sum
  int lanes;        // units, and sums, in a vector
  int max_vectors;  // of tokens in a panel
  size_t unit_size;
  // Pack the panel of RowPiece; a depth of 1 means rows of units.
  void (*pack_panel)(const void* x, int64_t stride, int64_t tokens, int64_t first_unit, int64_t last_unit,
                     int64_t width, int64_t depth, void* panel);
  // Compute sums [outputs, width], and prefetch `next`, which is probably computed next.
  void (*row_piece)(const RowPiece&, const RowPiece& next, void* sums);
  void (*write_outputs)(const LinearOutputs&);
  void (*pack_block_columns)(const BlockColumns&, int64_t first_step, int64_t last_step, int64_t first_block,
                             int64_t last_block);
  int64_t (*padded_in)(int64_t block_in);  // for the sampled product: a part of a vector, or whole vectors
  int64_t (*strip)(int64_t block_in);      // blocks of a row that it samples at a time
  void (*sampled_strip)(const SampledStrip&);
  // For a few tokens, which need no panel. `few_tokens` returns how many copies of each block of x `few_tokens_piece`
  // needs, usually one, or 0 if panels are faster or the blocks do not fit. `few_tokens_piece` writes the outputs too,
  // so `sums` and `width` of LinearOutputs are not used.
  int64_t (*few_tokens)(int64_t tokens, int64_t block_out, int64_t block_sum, bool transposed);
  void (*few_tokens_piece)(const RowPiece&, const LinearOutputs&);
  // For tiles: the depth of a panel's tiles, or 0 for products without tiles.
  int64_t (*tile_depth)(int64_t block_out, int64_t block_sum);
  void (*turn)(const TurnedMatrix&);
};

// Return the kernels of `dtype` for blocks with `block_sum` inputs. Pairs of bfloat16 need an even number.
const LinearKernels& linear_kernels(const InstructionSet& isa, DType dtype, int64_t block_sum);

namespace avx512 {  // used by sets with pairs for every other type
const LinearKernels& select_linear(DType dtype, int64_t block_sum);
}

struct Matrix {  // [tokens, features], features contiguous
  const void* data;
  int64_t stride, features;
};

struct RowTasks {  // see RowPlan in linear/plan.hpp
  const int64_t* start;
  const int32_t* col;
  const int64_t* position;
  const int32_t *row, *begin, *end;
  const int64_t* task_start;
  int64_t tasks;
};

struct BlockTasks {  // see BlockPlan in ops/cpu_plan.py; blocks are ordered by row, then by column
  const int32_t *row, *col;
  const int64_t* task_start;
  int64_t tasks;
};

// y = activation(x W^T + bias), with blocks [block_out, block_sum], or [block_sum, block_out] if transposed.
void linear(const InstructionSet& isa, DType dtype, Activation activation, bool transposed, int64_t block_out,
            int64_t block_sum, int64_t tokens, Matrix x, const void* values, const void* bias, void* y,
            int64_t out_features, const RowTasks& tasks);

// values = the stored blocks of grad^T x.
void linear_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in, int64_t tokens,
                  Matrix grad, Matrix x, void* values, const BlockTasks& tasks);

}  // namespace blocksparse
