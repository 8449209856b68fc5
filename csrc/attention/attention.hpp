// Block-sparse attention: a layout lists which blocks of queries see which blocks of keys. Forward and grad_q run by
// rows of blocks, grad_k and grad_v by columns.
#pragma once

#include "core/types.hpp"

namespace blocksparse {

// One head. Matrices are [queries or keys, features]; a `turned` matrix is [key blocks, features, padded], the keys of
// a block side by side, padded with zeros. q is already scaled.
struct AttentionForward {
  int64_t d, d_v, block, padded;  // features of q and of v; keys of a block
  bool causal;
  const void *q, *k, *v;  // k is transposed per block
  void *y, *log_sum;      // log_sum [queries]: log of the summed exponentials
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

// The blocks of each row, or of each column.
struct BlockLists {
  const int64_t* start;  // [count + 1]
  const int32_t* other;
  int64_t count;
};

// Matrices are contiguous, [heads, queries or keys, features], with features padded to whole vectors. Numbers per query
// are [heads, queries]. q is already scaled.
struct AttentionCall {
  int64_t heads, queries, keys, d, d_v, block_q, block_k;
  bool causal;
  const void *q, *k, *v;
};

void attention_forward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                       void* y, void* log_sum);

// `delta` [heads, queries] is the sum of grad * y over features. `grad_q` is the gradient of the scaled q.
void attention_backward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                        const BlockLists& columns, const void* grad, const void* log_sum, const void* delta,
                        void* grad_q, void* grad_k, void* grad_v);

}  // namespace blocksparse
