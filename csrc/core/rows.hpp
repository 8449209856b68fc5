// Rows of features: where they begin, and how threads share them.
#pragma once

#include <algorithm>

#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "core/types.hpp"

namespace blocksparse {

// Return the rows from number `at` on; `size` is the bytes of an element.
inline OutputRows from(const OutputRows& rows, int64_t at, int64_t size) {
  return {rows.data ? static_cast<char*>(rows.data) + at * rows.stride * size : nullptr, rows.stride};
}
inline InputRows from(const InputRows& rows, int64_t at, int64_t size) {
  if (rows.index) return {rows.data, rows.stride, rows.index + at};
  return {rows.data ? static_cast<const char*>(rows.data) + at * rows.stride * size : nullptr, rows.stride};
}

inline InputRows read_only(const OutputRows& rows) { return {rows.data, rows.stride}; }

// Call run(first, last) for ranges of `part` elements out of `count`, shared among threads.
template <class Run>
void in_ranges(int64_t count, int64_t part, const Run& run) {
  parallel_tasks(ceil_div(count, part), [&](int64_t i) { run(i * part, std::min((i + 1) * part, count)); });
}

// Call run(part) for parts of the rows and features that take a few microseconds each. The parts do not depend on the
// number of threads, since results must not.
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
