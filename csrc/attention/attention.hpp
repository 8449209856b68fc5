// Block-sparse attention: a layout lists which blocks of queries see which blocks of keys. Forward and grad_q run by
// rows of blocks, grad_k and grad_v by columns.
#pragma once

#include "core/types.hpp"

namespace blocksparse {

// Which scores count. Query i sees the keys [start[i], end[i]) of its blocks; without `start` all `keys`. Scores are
// capped as softcap * tanh(score / softcap) unless softcap is 0. A weight is dropped if the hash of seed, head, query
// and key is below `drop_below`, of 2^32.
struct AttentionScores {
  int64_t keys;
  const int32_t *start, *end;
  double softcap;
  uint64_t seed;
  uint32_t drop_below;
  int64_t head;
};

// One head. Matrices are [queries or keys, features]; a `turned` matrix is [key blocks, features, padded], the keys of
// a block side by side, padded with zeros. q is already scaled. The last block of keys may be partly there.
struct AttentionForward {
  int64_t d, d_v, block, padded;  // features of q and of v; keys of a block
  AttentionScores scores;
  const void *q, *k, *v;  // k is transposed per block
  void *y, *log_sum;      // log_sum [queries]: log of the summed exponentials
};
struct AttentionBackward {
  int64_t d, d_v, block_k, padded;
  AttentionScores scores;
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
  int64_t block, before, queries;  // block row r has the queries [r * block - before, (r + 1) * block - before)
  bool add;                        // to the gradients, which another head has written
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

// Matrices are contiguous: [batch, heads, queries, features] and [batch, kv_heads, keys, features], with features
// padded to whole vectors; heads / kv_heads neighbouring heads share keys. Numbers per query are [batch, heads,
// queries]. The first block row begins `before` queries before the first query. Spans are [span_batches, queries] with
// one batch for all or one each. q is already scaled.
struct AttentionCall {
  int64_t batch, heads, kv_heads, queries, keys, d, d_v, block_q, block_k, before;
  AttentionScores scores;
  int64_t span_batches;
  const void *q, *k, *v;
};

void attention_forward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                       void* y, void* log_sum);

// `delta` [heads, queries] is the sum of grad * y over features. `grad_q` is the gradient of the scaled q.
void attention_backward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                        const BlockLists& columns, const void* grad, const void* log_sum, const void* delta,
                        void* grad_q, void* grad_k, void* grad_v);

}  // namespace blocksparse
