#include <algorithm>
#include <vector>

#include "attention/attention.hpp"
#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"
#include "linear/linear.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const AttentionKernels& select_attention(DType dtype))

namespace {

constexpr decltype(&portable::select_attention) kSelect[] = {BLOCKSPARSE_BY_VECTORS(select_attention)};

// Queries per task: their sums stay in the caches.
constexpr int64_t kQueries = 64;

template <class T>
T* at(T* p, int64_t bytes) {
  return p ? reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + bytes) : p;
}

// Transpose the visible blocks of keys or values to [batch * kv_heads, blocks, features, padded].
void* turned(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
             const void* from, int64_t features, int64_t padded, Scratch slot) {
  const LinearKernels& kernels = linear_kernels(isa, dtype, 1);
  const int64_t size = size_of(dtype), blocks = ceil_div(call.keys, call.block_k), bytes = features * padded * size;
  std::vector<char> seen(blocks);  // few queries see few keys
  for (int64_t i = 0; i < rows.start[rows.count]; ++i) seen[rows.other[i]] = 1;
  const int64_t matrices = call.batch * call.kv_heads;
  void* to = scratch(slot, matrices * blocks * bytes);
  parallel_tasks(matrices * blocks, [&](int64_t i) {
    const int64_t first = i % blocks * call.block_k;
    if (!seen[i % blocks]) return;
    kernels.pack_panel(at(from, (i / blocks * call.keys + first) * features * size), features,
                       std::min(call.block_k, call.keys - first), 0, features, padded, 1, at(to, i * bytes));
  });
  return to;
}

int64_t padded(const InstructionSet& isa, DType dtype, int64_t block) {
  const int64_t lanes = linear_kernels(isa, dtype, 1).lanes;
  return ceil_div(block, lanes) * lanes;
}

// Where the matrices of a head begin, and which of its scores count.
struct Head {
  int64_t queries, keys;  // before it, and of earlier kv_heads
  AttentionScores scores;
};

Head head_at(const AttentionCall& call, int64_t head) {
  const int64_t batch = head / call.heads, kv_head = head / (call.heads / call.kv_heads);
  AttentionScores scores = call.scores;
  scores.head = head;
  if (scores.start && call.span_batches > 1) scores.start += batch * call.queries, scores.end += batch * call.queries;
  return {head * call.queries, kv_head, scores};
}

// Call run(head, queries) for up to kQueries queries of a block row at a time.
template <class Run>
void by_rows(const AttentionCall& call, const BlockLists& rows, const Run& run) {
  const int64_t tiles = ceil_div(call.block_q, kQueries), tasks = rows.count * tiles;
  parallel_tasks(call.batch * call.heads * tasks, [&](int64_t i) {
    const int64_t task = i % tasks, row = task / tiles, end = (row + 1) * call.block_q - call.before;
    const int64_t tile = row * call.block_q - call.before + task % tiles * kQueries, start = rows.start[row];
    const int64_t first = std::max<int64_t>(tile, 0), last = std::min({tile + kQueries, end, call.queries});
    if (first < last) run(i / tasks, AttentionQueries{first, last, rows.start[row + 1] - start, rows.other + start});
  });
}

}  // namespace

void attention_forward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                       void* y, void* log_sum) {
  const AttentionKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype), wide = padded(isa, dtype, call.block_k);
  const void* k = turned(isa, dtype, call, rows, call.k, call.d, wide, Scratch::kTurned);
  const int64_t k_bytes = ceil_div(call.keys, call.block_k) * call.d * wide * size;
  by_rows(call, rows, [&](int64_t index, const AttentionQueries& queries) {
    const Head head = head_at(call, index);
    kernels.forward({call.d, call.d_v, call.block_k, wide, head.scores, at(call.q, head.queries * call.d * size),
                     at(k, head.keys * k_bytes), at(call.v, head.keys * call.keys * call.d_v * size),
                     at(y, head.queries * call.d_v * size), at(log_sum, head.queries * size)},
                    queries);
  });
}

void attention_backward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                        const BlockLists& columns, const void* grad, const void* log_sum, const void* delta,
                        void* grad_q, void* grad_k, void* grad_v) {
  const AttentionKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype), wide = padded(isa, dtype, call.block_k);
  const int64_t blocks = ceil_div(call.keys, call.block_k), shared = call.heads / call.kv_heads;
  const void* k = turned(isa, dtype, call, rows, call.k, call.d, wide, Scratch::kTurned);
  const void* v = turned(isa, dtype, call, rows, call.v, call.d_v, wide, Scratch::kPanels);
  const auto of_head = [&](int64_t index) {
    const Head head = head_at(call, index);
    const int64_t first = head.queries * size, keys = head.keys * call.keys * size,
                  turned = head.keys * blocks * wide * size;
    return AttentionBackward{call.d,
                             call.d_v,
                             call.block_k,
                             wide,
                             head.scores,
                             at(call.q, first * call.d),
                             at(call.k, keys * call.d),
                             at(k, turned * call.d),
                             at(v, turned * call.d_v),
                             at(grad, first * call.d_v),
                             at(log_sum, first),
                             at(delta, first),
                             at(grad_q, first * call.d),
                             at(grad_k, keys * call.d),
                             at(grad_v, keys * call.d_v)};
  };
  if (grad_q)
    by_rows(call, rows,
            [&](int64_t head, const AttentionQueries& queries) { kernels.backward_rows(of_head(head), queries); });
  if (grad_k)
    parallel_tasks(call.batch * call.kv_heads * blocks, [&](int64_t i) {
      const int64_t column = i % blocks, start = columns.start[column], count = columns.start[column + 1] - start;
      for (int64_t head = 0; head < shared; ++head)
        kernels.backward_column(
            of_head(i / blocks * shared + head),
            {column, count, columns.other + start, call.block_q, call.before, call.queries, head > 0});
    });
}

}  // namespace blocksparse
