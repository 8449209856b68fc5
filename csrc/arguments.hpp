// Arguments from Python as the core takes them: names, addresses, index arrays whose lengths must fit each other.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels.hpp"
#include "linear.hpp"

namespace nb = nanobind;

namespace blocksparse {

namespace {

template <class Enum, size_t n>
Enum named(const std::array<const char*, n>& names, const std::string& name) {
  for (size_t i = 0; i < n; ++i)
    if (name == names[i]) return static_cast<Enum>(i);
  throw std::invalid_argument("unknown name " + name);
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("the compiled core: expected ") + what);
}

DType dtype_named(const std::string& name) {
  return named<DType>(std::array{"float32", "float64", "bfloat16", "float16"}, name);
}

Activation activation_named(const std::string& name) {
  return named<Activation>(std::array{"none", "relu", "gelu", "silu"}, name);
}

template <class T>
using Index = nb::ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Where each of `count` things starts, up to `total`.
void require_starts(const Index<int64_t>& start, int64_t count, size_t total, const char* what) {
  require(
      count >= 0 && int64_t(start.size()) == count + 1 && start.data()[0] == 0 && start.data()[count] == int64_t(total),
      what);
}

void require_tasks(const Index<int64_t>& task_start, size_t total) {
  require_starts(task_start, int64_t(task_start.size()) - 1, total, "task_start to rise from 0 to all pieces");
}

int64_t blocks_in(int64_t features, int64_t block) {
  require(block > 0 && features >= 0 && features % block == 0, "features in whole blocks");
  return features / block;
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// (outputs, inputs)
using Sizes = std::pair<int64_t, int64_t>;

// The tasks of a product, compared with its sizes once and kept: taking them from Python in each call would be a
// quarter of a small product's time. The arrays live as long as this does.
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

// The address of row 0, or 0, and the distance between rows.
using PyRows = std::pair<uintptr_t, int64_t>;
InputRows input(const PyRows& rows) { return {pointer(rows.first), rows.second}; }
OutputRows output(const PyRows& rows) { return {pointer(rows.first), rows.second}; }

}  // namespace

}  // namespace blocksparse
