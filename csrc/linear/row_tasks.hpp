// The tasks of a row product, held by Python.
#pragma once

#include <nanobind/stl/pair.h>

#include "core/arguments.hpp"
#include "linear/plan.hpp"

namespace blocksparse {

// (outputs, inputs)
using Sizes = std::pair<int64_t, int64_t>;

// The plan of a product, made and checked once: passing its arrays in each call would be a quarter of the time of a
// small product.
struct PyRowTasks {
  Sizes features, block;
  bool transposed;  // whether a block's values are stored [inputs, outputs]
  RowPlan plan;
  RowTasks tasks;

  // Plan y = x W^T, or y = x W if `transposed`, for a layout `grid` of blocks.
  template <class T>
  PyRowTasks(Sizes grid, Sizes block, bool transposed, Index<T> start, Index<T> col)
      : features(grid.first * block.first, grid.second * block.second), block(block), transposed(transposed) {
    require(block.first > 0 && block.second > 0, "a positive block");
    require(grid.first > 0 && int64_t(start.size()) == grid.first + 1, "a start for each block row, and the end");
    const RowLayout<T> layout = {start.data(),        col.data(),  grid.first,  grid.second,
                                 int64_t(col.size()), block.first, block.second};
    check_indices(layout);
    plan = plan_rows(layout, transposed);
    tasks = plan.tasks();
    if (transposed) std::swap(features.first, features.second), std::swap(this->block.first, this->block.second);
  }
  PyRowTasks(const PyRowTasks&) = delete;
  PyRowTasks& operator=(const PyRowTasks&) = delete;
};

}  // namespace blocksparse
