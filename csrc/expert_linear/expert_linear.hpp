// The linear products of a mixture's experts: rows sorted by expert, each group multiplied by blocks of its own.
#pragma once

#include "linear/linear.hpp"

namespace blocksparse {

// Expert e has the rows [rows[e], rows[e + 1]), and the blocks [blocks[e], blocks[e + 1]) of `values`.
struct ExpertGroups {
  int64_t experts;
  const int64_t *rows, *blocks;
};

// y = x W^T for the rows of each expert; `tasks` has a plan per expert.
void expert_linear(const InstructionSet& isa, DType dtype, bool transposed, int64_t block_out, int64_t block_sum,
                   const ExpertGroups& groups, Matrix x, const void* values, void* y, int64_t out_features,
                   const RowTasks* const* tasks);

// values = the stored blocks of grad^T x for the rows of each expert; 0 for an expert without rows. `row` and `col` are
// the places of all blocks, each within its expert's weight.
void expert_linear_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in,
                         const ExpertGroups& groups, Matrix grad, Matrix x, void* values, const int32_t* row,
                         const int32_t* col);

}  // namespace blocksparse
