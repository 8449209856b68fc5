// Attention in which a layout says which blocks of queries see which blocks of keys, by rows and, for the gradients of
// keys and values, by columns of blocks.
#pragma once

#include "kernels.hpp"

namespace blocksparse {

// Which blocks are in each row, or in each column.
struct BlockLists {
  const int64_t* start;  // [count + 1]
  const int32_t* other;
  int64_t count;
};

// Matrices are [heads, queries or keys, features], contiguous, of whole vectors of features; those per query are
// [heads, queries]. q comes scaled.
struct AttentionCall {
  int64_t heads, queries, keys, d, d_v, block_q, block_k;
  bool causal;
  const void *q, *k, *v;
};

void attention_forward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                       void* y, void* log_sum);

// `delta` is the sum of grad y over the features of each query; `grad_q` is that of the scaled q.
void attention_backward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                        const BlockLists& columns, const void* grad, const void* log_sum, const void* delta,
                        void* grad_q, void* grad_k, void* grad_v);

}  // namespace blocksparse
