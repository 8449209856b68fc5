// Attention in which a layout says which blocks of queries see which blocks of keys, by rows and, for the gradients of
// keys and values, by columns of blocks.
#pragma once

#include "core/types.hpp"

namespace blocksparse {

// Of one head, whose matrices are [queries or keys, features]. `turned` ones are [key blocks, features, padded]: the
// keys of a block side by side, with zeros behind. q is scaled.
struct AttentionForward {
  int64_t d, d_v, block, padded;  // features of q and of v; keys of a block
  bool causal;
  const void *q, *k, *v;  // k is turned
  void *y, *log_sum;      // log_sum [queries], of the exponentials of each query's scores
};
struct AttentionBackward {
  int64_t d, d_v, block_q, block_k, padded;
  bool causal;
  const void *q, *k, *k_turned, *v_turned, *grad, *log_sum, *delta;
  void *grad_q, *grad_k, *grad_v;
};
struct AttentionQueries {  // [first, last), and the blocks of keys that they see
  int64_t first, last, blocks;
  const int32_t* col;
};
struct AttentionKeys {  // a block of them, and the blocks of queries that see it
  int64_t col, blocks;
  const int32_t* row;
};
struct AttentionKernels {
  void (*forward)(const AttentionForward&, const AttentionQueries&);
  void (*backward_rows)(const AttentionBackward&, const AttentionQueries&);  // writes grad_q
  void (*backward_column)(const AttentionBackward&, const AttentionKeys&);   // writes grad_k and grad_v
};

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
