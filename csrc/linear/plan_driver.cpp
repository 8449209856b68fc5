#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "core/addresses.hpp"
#include "csr/transposed.hpp"
#include "linear/plan.hpp"

namespace blocksparse {

namespace {

// 10 microseconds of a fast core at 48 tokens: long compared with fetching a task, short compared with a layer.
constexpr int64_t kTaskCost = 16384;
// Rows are cut at multiples of this number of outputs: the height of one AMX tile and of two AVX-512 tiles.
constexpr int64_t kOutputStep = 16;
// Rows of small blocks share a task up to this number of outputs, which in 16 bits are two cache lines of a token.
constexpr int64_t kLineOutputs = 64;

// Return how many rows of this mean cost share a task: enough for whole cache lines of outputs, if not too many.
int64_t rows_per_task(int64_t height, double cost) {
  // A row that is cut shares no task.
  int64_t rows = height <= kOutputStep ? std::max<int64_t>(kLineOutputs / height, 1) : 1;
  while (rows > 1 && double(rows) * cost > 2 * kTaskCost) rows /= 2;
  return rows;
}

// Group consecutive items into tasks of about kTaskCost. Return the start of each task, and the end.
template <class Cost>
std::vector<int64_t> task_starts(int64_t items, const Cost& cost) {
  std::vector<int64_t> starts;
  int64_t before = 0, task = -1;
  for (int64_t i = 0; i < items; before += cost(i++))
    if (before / kTaskCost != task) {
      task = before / kTaskCost;
      starts.push_back(i);
    }
  starts.push_back(items);
  return starts;
}

}  // namespace

template <class Index>
void check_indices(const RowLayout<Index>& layout) {
  bool holds = layout.start[0] == 0 && layout.start[layout.rows] == layout.blocks;
  for (int64_t r = 0; r < layout.rows; ++r) holds &= layout.start[r] <= layout.start[r + 1];
  if (!holds) throw std::invalid_argument("the compiled core: expected row starts that rise from 0 to all blocks");
  for (int64_t k = 0; k < layout.blocks; ++k) holds &= 0 <= layout.col[k] && layout.col[k] < layout.cols;
  if (!holds) throw std::invalid_argument("the compiled core: expected block columns within the layout");
}

template <class Index>
RowPlan plan_rows(const RowLayout<Index>& layout, bool transposed) {
  const int64_t rows = transposed ? layout.cols : layout.rows;
  const int64_t height = transposed ? layout.block_in : layout.block_out;
  const int64_t width = transposed ? layout.block_out : layout.block_in;
  RowPlan plan;
  plan.start.resize(rows + 1), plan.col.resize(layout.blocks), plan.position.resize(layout.blocks);
  if (transposed) {
    transpose_indices(layout.start, layout.col, layout.rows, layout.cols, plan.start.data(), plan.col.data(),
                      plan.position.data());
  } else {
    std::copy_n(layout.start, rows + 1, plan.start.begin());
    std::copy_n(layout.col, layout.blocks, plan.col.begin());
    std::iota(plan.position.begin(), plan.position.end(), int64_t(0));
  }

  // A row that costs more than a task is cut into pieces of one register tile of outputs or more.
  const int64_t tiles = ceil_div(height, kOutputStep);
  std::vector<int32_t> row, begin, end;
  std::vector<int64_t> cost;  // of each piece
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t blocks = plan.start[r + 1] - plan.start[r];
    const int64_t pieces = std::clamp<int64_t>(ceil_div(blocks * height * width, kTaskCost), 1, tiles);
    for (int64_t nth = 0; nth < pieces; ++nth) {
      row.push_back(r);
      begin.push_back(nth * tiles / pieces * kOutputStep);
      end.push_back(std::min((nth + 1) * tiles / pieces * kOutputStep, height));
      // An empty row costs about as much as one block, because its outputs are written too.
      cost.push_back(std::max<int64_t>(blocks, 1) * (end.back() - begin.back()) * width);
    }
  }

  const int64_t pieces = row.size();
  const int64_t together = rows_per_task(height, double(layout.blocks * height * width) / double(rows));
  std::vector<int64_t> group_cost(ceil_div(pieces, together)), order(group_cost.size());
  for (int64_t p = 0; p < pieces; ++p) group_cost[p / together] += cost[p];
  std::iota(order.begin(), order.end(), int64_t(0));
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return group_cost[a] > group_cost[b]; });
  plan.task_start = task_starts(order.size(), [&](int64_t i) { return group_cost[order[i]]; });  // of groups so far
  plan.row.reserve(pieces), plan.begin.reserve(pieces), plan.end.reserve(pieces);
  std::vector<int64_t> group_start;
  for (const int64_t group : order) {
    group_start.push_back(plan.row.size());
    for (int64_t p = group * together; p < std::min((group + 1) * together, pieces); ++p) {
      plan.row.push_back(row[p]);
      plan.begin.push_back(begin[p]);
      plan.end.push_back(end[p]);
    }
  }
  group_start.push_back(pieces);
  for (int64_t& start : plan.task_start) start = group_start[start];
  return plan;
}

std::vector<int64_t> plan_blocks(int64_t blocks, int64_t block_out, int64_t block_in) {
  return task_starts(blocks, [&](int64_t) { return block_out * block_in; });
}

template void check_indices(const RowLayout<int32_t>&);
template void check_indices(const RowLayout<int64_t>&);
template RowPlan plan_rows(const RowLayout<int32_t>&, bool);
template RowPlan plan_rows(const RowLayout<int64_t>&, bool);

}  // namespace blocksparse
