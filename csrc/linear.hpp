// The linear products on packed panels: cutting tokens, packing, multiplying.
#pragma once

#include "kernels.hpp"

namespace blocksparse {

struct Matrix {  // [tokens, features], the features of a token side by side
  const void* data;
  int64_t stride, features;
};

struct RowTasks {  // see RowPlan in plan.py
  const int64_t* start;
  const int32_t* col;
  const int64_t* position;
  const int32_t *row, *begin, *end;
  const int64_t* task_start;
  int64_t tasks;
};

struct BlockTasks {  // see BlockPlan in plan.py
  const int32_t *row, *col;
  const int64_t* task_start;
  int64_t tasks;
};

// y = activation(x W^T + bias) with blocks [block_out, block_sum], or stored [block_sum, block_out] when transposed.
void linear(const InstructionSet& isa, DType dtype, Activation activation, bool transposed, int64_t block_out,
            int64_t block_sum, int64_t tokens, Matrix x, const void* values, const void* bias, void* y,
            int64_t out_features, const RowTasks& tasks);

// values = the blocks of grad^T x.
void linear_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in, int64_t tokens,
                  Matrix grad, Matrix x, void* values, const BlockTasks& tasks);

}  // namespace blocksparse
