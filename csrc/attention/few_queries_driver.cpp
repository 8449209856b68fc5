// Attention of a few queries. The keys of a block row are cut into tasks by their number, so that a single query keeps
// several threads busy; the last task of a row merges the sums of all.
#include <algorithm>
#include <atomic>
#include <vector>

#include "attention/attention.hpp"
#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const FewQueriesKernels& select_few_queries(DType dtype))

namespace {

constexpr decltype(&portable::select_few_queries) kSelect[] = {BLOCKSPARSE_BY_VECTORS(select_few_queries)};

// Keys per task, at most, unless a block has more.
constexpr int64_t kKeysPerTask = 512;
// Lanes of any vector.
constexpr int64_t kWidest = 16;

// The span of keys of each query, by sequences, or once for all.
struct Spans {
  std::vector<int64_t> start, end;

  explicit Spans(const FewQueriesCall& call) {
    const int64_t count = call.queries * (call.start ? call.span_batches : 1);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = i + call.keys - call.queries;
      const int64_t from = call.start ? call.start[i] : call.left < 0 ? 0 : position - call.left;
      const int64_t to = call.start ? call.end[i] : call.right < 0 ? call.keys : position + call.right + 1;
      start.push_back(std::max<int64_t>(from, 0)), end.push_back(std::min(to, call.keys));
    }
  }
};

// A block row of one sequence and one head of keys, with all of its visible blocks.
struct Row {
  FewQueries queries;
  int64_t first_task, tasks, outputs;  // outputs: queries in memory before its first one
};

}  // namespace

void attention_few_queries(const InstructionSet& isa, DType dtype, const FewQueriesCall& call, const BlockLists& rows,
                           void* y, void* log_sum) {
  const FewQueriesKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype), sum_size = size_of_sum(dtype), shared = call.heads / call.kv_heads;
  const int64_t wide = ceil_div(call.d_v, kWidest) * kWidest, most = std::min(call.queries, call.block_q);
  const int64_t bytes = ceil_div(most * shared * (wide + 2) * sum_size, 64) * 64;  // of the sums of a task
  const Spans spans(call);
  std::vector<Row> block_rows;
  std::vector<int64_t> row_of_task;
  for (int64_t i = 0; i < call.batch * call.kv_heads; ++i) {
    const int64_t sequence = i / call.kv_heads, head = i % call.kv_heads;
    const int64_t* const start = spans.start.data() + (call.span_batches > 1 ? sequence * call.queries : 0);
    const int64_t* const end = spans.end.data() + (start - spans.start.data());
    for (int64_t r = call.row / call.block_q; r * call.block_q < call.row + call.queries; ++r) {
      const int64_t first = std::max<int64_t>(r * call.block_q - call.row, 0);
      const int64_t last = std::min((r + 1) * call.block_q - call.row, call.queries);
      const int32_t *col = rows.other + rows.start[r], *col_end = rows.other + rows.start[r + 1];
      const int64_t from = *std::min_element(start + first, start + last),
                    to = *std::max_element(end + first, end + last);
      while (col < col_end && col_end[-1] * call.block_k >= to) --col_end;
      while (col < col_end && (*col + 1) * call.block_k <= from) ++col;
      const int64_t outputs = i * shared * call.queries + first, blocks = col_end - col;
      const FewQueries queries{last - first,
                               shared,
                               call.queries,
                               call.d,
                               call.d_v,
                               wide,
                               call.scale,
                               call.softcap,
                               advance(call.q, outputs * call.d * size),
                               advance(call.k, (sequence * call.k_strides[0] + head * call.k_strides[1]) * size),
                               advance(call.v, (sequence * call.v_strides[0] + head * call.v_strides[1]) * size),
                               call.k_strides[2],
                               call.v_strides[2],
                               call.block_k,
                               blocks,
                               col,
                               start + first,
                               end + first,
                               nullptr};
      const int64_t tasks =
          std::clamp<int64_t>(ceil_div(blocks * call.block_k, kKeysPerTask), 1, std::max<int64_t>(blocks, 1));
      block_rows.push_back({queries, int64_t(row_of_task.size()), tasks, outputs});
      row_of_task.resize(row_of_task.size() + tasks, int64_t(block_rows.size()) - 1);
    }
  }
  char* const sums = static_cast<char*>(scratch(Scratch::kTurned, int64_t(row_of_task.size()) * bytes));
  std::vector<std::atomic<int64_t>> ended(block_rows.size());
  parallel_tasks(row_of_task.size(), [&](int64_t i) {
    const Row& row = block_rows[row_of_task[i]];
    const int64_t part = i - row.first_task, begin = row.queries.blocks * part / row.tasks;
    FewQueries task = row.queries;
    task.col += begin, task.blocks = row.queries.blocks * (part + 1) / row.tasks - begin;
    task.sums = sums + i * bytes;
    kernels.attend(task);
    if (ended[row_of_task[i]].fetch_add(1, std::memory_order_acq_rel) + 1 < row.tasks) return;
    task.sums = sums + row.first_task * bytes;
    kernels.merge(task, row.tasks, bytes, advance(y, row.outputs * call.d_v * size),
                  log_sum ? advance(log_sum, row.outputs * sum_size) : nullptr);
  });
}

}  // namespace blocksparse
