// Rows of features on their way to kernels: where they begin, and how they are shared among threads.
#pragma once

#include <algorithm>

#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "core/types.hpp"

namespace blocksparse {

// The rows from `at` on, of numbers of `size` bytes.
inline OutputRows from(const OutputRows& rows, int64_t at, int64_t size) {
  return {rows.data ? static_cast<char*>(rows.data) + at * rows.stride * size : nullptr, rows.stride};
}
inline InputRows from(const InputRows& rows, int64_t at, int64_t size) {
  if (rows.index) return {rows.data, rows.stride, rows.index + at};
  return {rows.data ? static_cast<const char*>(rows.data) + at * rows.stride * size : nullptr, rows.stride};
}

inline InputRows read_only(const OutputRows& rows) { return {rows.data, rows.stride}; }

// Calls run(part) for parts of rows and features that take a few microseconds each. They are the same for any number of
// threads, as the results have to be.
template <class Run>
void in_parts(int64_t rows, int64_t features, const Run& run) {
  if (features == 0) return;
  const int64_t cuts = ceil_div(features, kPartNumbers);
  const int64_t rows_of_part = std::max<int64_t>(kPartNumbers / features, 1);
  parallel_tasks(ceil_div(rows, rows_of_part) * cuts, [&](int64_t i) {
    const int64_t row = i / cuts * rows_of_part, begin = i % cuts * kPartNumbers;
    run(RowsPart{row, std::min(row + rows_of_part, rows), begin, std::min(begin + kPartNumbers, features)});
  });
}

}  // namespace blocksparse
