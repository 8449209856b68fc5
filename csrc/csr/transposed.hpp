// The transposition of row starts and columns.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <stdexcept>

namespace blocksparse {

// Write the start of each column `[cols + 1]`, and the row and the position of each of its entries, rows ascending.
template <class Index, class Start, class Row, class Position>
void transpose_indices(const Index* from, const Index* col, int64_t rows, int64_t cols, Start* start, Row* row,
                       Position* position) {
  const int64_t entries = from[rows];
  // Counts are stored two places ahead; filling then moves each start into its own place.
  std::fill_n(start, cols + 1, Start(0));
  for (int64_t k = 0; k < entries; ++k) {
    if (col[k] < 0 || col[k] >= cols)
      throw std::invalid_argument("the compiled core: expected columns within the matrix");
    if (col[k] + int64_t(2) <= cols) ++start[col[k] + int64_t(2)];
  }
  for (int64_t c = 2; c <= cols; ++c) start[c] += start[c - 1];
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = from[r]; k < from[r + 1]; ++k) {
      const Start to = start[col[k] + int64_t(1)]++;
      row[to] = Row(r);
      position[to] = Position(k);
    }
  }
}

}  // namespace blocksparse
