// The tasks of a row product, held by Python.
#pragma once

#include <nanobind/stl/pair.h>

#include "core/arguments.hpp"
#include "linear/linear.hpp"

namespace blocksparse {

// (outputs, inputs)
using Sizes = std::pair<int64_t, int64_t>;

// The tasks of a product, checked once and kept: passing the arrays in each call would be a quarter of the time of a
// small product. The arrays live as long as this object.
struct PyRowTasks {
  Sizes features, block;
  bool transposed;  // whether a block's values are stored [inputs, outputs]
  Index<int64_t> start;
  Index<int32_t> col;
  Index<int64_t> position;
  Index<int32_t> row, begin, end;
  Index<int64_t> task_start;
  RowTasks tasks;

  PyRowTasks(Sizes features, Sizes block, bool transposed, Index<int64_t> start, Index<int32_t> col,
             Index<int64_t> position, Index<int32_t> row, Index<int32_t> begin, Index<int32_t> end,
             Index<int64_t> task_start)
      : features(features),
        block(block),
        transposed(transposed),
        start(start),
        col(col),
        position(position),
        row(row),
        begin(begin),
        end(end),
        task_start(task_start),
        tasks{start.data(), col.data(), position.data(),   row.data(),
              begin.data(), end.data(), task_start.data(), int64_t(task_start.size()) - 1} {
    blocks_in(features.second, block.second);
    require_starts(start, blocks_in(features.first, block.first), col.size(),
                   "start for each block row, up to all blocks");
    require(position.size() == col.size(), "a position for each block");
    require(begin.size() == row.size() && end.size() == row.size(), "row, begin and end of one length");
    require_tasks(task_start, row.size());
  }
};

}  // namespace blocksparse
