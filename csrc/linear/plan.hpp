// Plans: how the linear products of a layout are cut into tasks for threads.
//
// Costs are multiply-adds per token. A thread takes one task at a time. Cutting never changes the order of any sum, so
// results depend neither on the plan nor on the number of threads.
#pragma once

#include <vector>

#include "linear/linear.hpp"

namespace blocksparse {

// A layout by rows, as Python passes it.
template <class Index>
struct RowLayout {
  const Index* start;  // [rows + 1]
  const Index* col;    // [blocks]
  int64_t rows, cols, blocks;
  int64_t block_out, block_in;
};

// Throws std::invalid_argument unless the starts rise from 0 to all blocks and the columns are within the layout.
template <class Index>
void check_indices(const RowLayout<Index>& layout);

// Tasks of y = x W^T, or of y = x W for the transposed layout. Piece p computes the outputs [begin[p], end[p]) of block
// row row[p]. Task t is the pieces [task_start[t], task_start[t + 1]), the costliest first.
struct RowPlan {
  std::vector<int64_t> start;            // [rows + 1], where each row's blocks start in `col` and `position`
  std::vector<int32_t> col;              // [blocks], the block of inputs
  std::vector<int64_t> position;         // [blocks], the place in `values`
  std::vector<int32_t> row, begin, end;  // [pieces]
  std::vector<int64_t> task_start;       // [tasks + 1]

  RowTasks tasks() const {
    return {start.data(), col.data(), position.data(),   row.data(),
            begin.data(), end.data(), task_start.data(), int64_t(task_start.size()) - 1};
  }
};

// Return the plan of a row product: long rows in pieces, neighbouring small rows together, sorted by cost.
template <class Index>
RowPlan plan_rows(const RowLayout<Index>& layout, bool transposed);

// Return the starts of the tasks, and the end, of the sampled product, which computes blocks in their order.
std::vector<int64_t> plan_blocks(int64_t blocks, int64_t block_out, int64_t block_in);

}  // namespace blocksparse
