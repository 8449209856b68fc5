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

// Transpose the visible blocks of keys or values to [heads, blocks, features, padded].
void* turned(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
             const void* from, int64_t features, int64_t padded, Scratch slot) {
  const LinearKernels& kernels = linear_kernels(isa, dtype, 1);
  const int64_t size = size_of(dtype), blocks = call.keys / call.block_k, bytes = features * padded * size;
  std::vector<char> seen(blocks);  // few queries see few keys
  for (int64_t i = 0; i < rows.start[rows.count]; ++i) seen[rows.other[i]] = 1;
  void* to = scratch(slot, call.heads * blocks * bytes);
  parallel_tasks(call.heads * blocks, [&](int64_t i) {
    if (!seen[i % blocks]) return;
    kernels.pack_panel(at(from, i * call.block_k * features * size), features, call.block_k, 0, features, padded,
                       at(to, i * bytes));
  });
  return to;
}

int64_t padded(const InstructionSet& isa, DType dtype, int64_t block) {
  const int64_t lanes = linear_kernels(isa, dtype, 1).lanes;
  return ceil_div(block, lanes) * lanes;
}

// Call run(head, queries) for up to kQueries queries of a block row at a time.
template <class Run>
void by_rows(const AttentionCall& call, const BlockLists& rows, const Run& run) {
  const int64_t tiles = ceil_div(call.block_q, kQueries), tasks = rows.count * tiles;
  parallel_tasks(call.heads * tasks, [&](int64_t i) {
    const int64_t task = i % tasks, row = task / tiles, first = row * call.block_q + task % tiles * kQueries;
    const int64_t start = rows.start[row], last = std::min(first + kQueries, (row + 1) * call.block_q);
    run(i / tasks, AttentionQueries{first, last, rows.start[row + 1] - start, rows.other + start});
  });
}

}  // namespace

void attention_forward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                       void* y, void* log_sum) {
  const AttentionKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype), wide = padded(isa, dtype, call.block_k);
  const void* k = turned(isa, dtype, call, rows, call.k, call.d, wide, Scratch::kTurned);
  const int64_t k_bytes = call.keys / call.block_k * call.d * wide * size, v_bytes = call.keys * call.d_v * size;
  by_rows(call, rows, [&](int64_t head, const AttentionQueries& queries) {
    const int64_t first = head * call.queries * size;
    kernels.forward({call.d, call.d_v, call.block_k, wide, call.causal, at(call.q, first * call.d),
                     at(k, head * k_bytes), at(call.v, head * v_bytes), at(y, first * call.d_v), at(log_sum, first)},
                    queries);
  });
}

void attention_backward(const InstructionSet& isa, DType dtype, const AttentionCall& call, const BlockLists& rows,
                        const BlockLists& columns, const void* grad, const void* log_sum, const void* delta,
                        void* grad_q, void* grad_k, void* grad_v) {
  const AttentionKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype), wide = padded(isa, dtype, call.block_k), blocks = call.keys / call.block_k;
  const void* k = turned(isa, dtype, call, rows, call.k, call.d, wide, Scratch::kTurned);
  const void* v = turned(isa, dtype, call, rows, call.v, call.d_v, wide, Scratch::kPanels);
  const auto of_head = [&](int64_t head) {
    const int64_t first = head * call.queries * size, keys = head * call.keys * size,
                  turned = head * blocks * wide * size;
    return AttentionBackward{call.d,
                             call.d_v,
                             call.block_q,
                             call.block_k,
                             wide,
                             call.causal,
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
    parallel_tasks(call.heads * columns.count, [&](int64_t i) {
      const int64_t column = i % columns.count, start = columns.start[column];
      kernels.backward_column(of_head(i / columns.count),
                              {column, columns.start[column + 1] - start, columns.other + start});
    });
}

}  // namespace blocksparse
