// Block-sparse attention: a layout lists which blocks of queries see which blocks of keys. Forward and grad_q run by
// rows of blocks, grad_k and grad_v by columns.
#pragma once

#include <array>

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

// Few queries of a block row, whose heads share keys; k and v are those of these heads. Matrices are in the dtype of
// the operands. A key is visible if it is in [start, end) of its query, and in one of the blocks.
struct FewQueries {
  int64_t queries, shared, head_queries;  // of the block row; heads; queries of a head in memory, [heads, queries, d]
  int64_t d, d_v, wide;                   // wide: d_v in whole vectors
  double scale, softcap;
  const void *q, *k, *v;
  int64_t k_token, v_token;  // elements between tokens
  int64_t block, blocks;
  const int32_t* col;
  const int64_t *start, *end;
  void* sums;  // [queries * shared, wide], then the largest score and the sum of exponentials of each row
};
struct FewQueriesKernels {
  void (*attend)(const FewQueries&);  // writes sums
  void (*merge)(const FewQueries&, int64_t tasks, int64_t bytes, void* y, void* log_sum);
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

// Attention of few queries. q and y are [batch, heads, queries, features], and log_sum, which may be null, is [batch,
// heads, queries]; keys and values may be anywhere. The first query is the row `row` of the layout.
struct FewQueriesCall {
  int64_t batch, heads, kv_heads, queries, keys, d, d_v, block_q, block_k, row;
  int64_t left, right;  // the window; -1 for all keys
  const int32_t *start, *end;
  int64_t span_batches;
  double scale, softcap;
  const void *q, *k, *v;
  std::array<int64_t, 3> k_strides, v_strides;  // elements between sequences, heads, tokens
};
void attention_few_queries(const InstructionSet& isa, DType dtype, const FewQueriesCall& call, const BlockLists& rows,
                           void* y, void* log_sum);

void attention_forward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                       void* y, void* log_sum);

// `delta` [heads, queries] is the sum of grad * y over features. `grad_q` is the gradient of the scaled q.
void attention_backward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                        const BlockLists& columns, const void* grad, const void* log_sum, const void* delta,
                        void* grad_q, void* grad_k, void* grad_v);

}  // namespace blocksparse
