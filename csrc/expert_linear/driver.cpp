#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "expert_linear/expert_linear.hpp"
#include "linear/plan.hpp"

namespace blocksparse {
namespace {

// Call run(e) for each expert. Those with more than a thread's share of the work run one after another, each on all
// threads. The others run side by side, the costliest first, each on one thread.
void by_expert(const ExpertGroups& groups, const std::function<void(int64_t)>& run) {
  std::vector<int64_t> cost(groups.experts), small;
  int64_t total = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    cost[e] = (groups.rows[e + 1] - groups.rows[e]) * (groups.blocks[e + 1] - groups.blocks[e]);
    total += cost[e];
  }
  const int64_t threads = thread_count();
  for (int64_t e = 0; e < groups.experts; ++e) {
    if (threads > 1 && cost[e] * threads > total)
      run(e);
    else
      small.push_back(e);
  }
  std::stable_sort(small.begin(), small.end(), [&](int64_t a, int64_t b) { return cost[a] > cost[b]; });
  parallel_tasks(int64_t(small.size()), [&](int64_t i) { run(small[i]); });
}

}  // namespace

void expert_linear(const InstructionSet& isa, DType dtype, bool transposed, int64_t block_out, int64_t block_sum,
                   const ExpertGroups& groups, Matrix x, const void* values, void* y, int64_t out_features,
                   const RowTasks* const* tasks) {
  const int64_t size = size_of(dtype), block_bytes = block_out * block_sum * size;
  by_expert(groups, [&](int64_t e) {
    const int64_t first = groups.rows[e], tokens = groups.rows[e + 1] - first;
    if (tokens == 0) return;
    linear(isa, dtype, Activation::kNone, transposed, block_out, block_sum, tokens,
           {advance(x.data, first * x.stride * size), x.stride, x.features},
           advance(values, groups.blocks[e] * block_bytes), nullptr, advance(y, first * out_features * size),
           out_features, *tasks[e]);
  });
}

void expert_linear_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in,
                         const ExpertGroups& groups, Matrix grad, Matrix x, void* values, const int32_t* row,
                         const int32_t* col) {
  const int64_t size = size_of(dtype), area = block_out * block_in;
  by_expert(groups, [&](int64_t e) {
    const int64_t first = groups.rows[e], tokens = groups.rows[e + 1] - first;
    const int64_t begin = groups.blocks[e], blocks = groups.blocks[e + 1] - begin;
    void* to = advance(values, begin * area * size);
    if (tokens == 0) {
      std::memset(to, 0, blocks * area * size);
      return;
    }
    const std::vector<int64_t> start = plan_blocks(blocks, block_out, block_in);
    linear_wgrad(isa, dtype, block_out, block_in, tokens,
                 {advance(grad.data, first * grad.stride * size), grad.stride, grad.features},
                 {advance(x.data, first * x.stride * size), x.stride, x.features}, to,
                 {row + begin, col + begin, start.data(), int64_t(start.size()) - 1});
  });
}

}  // namespace blocksparse
