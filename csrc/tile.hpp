// The register tile: the one inner loop of all CPU products.
//
//   sums[r][lane] += sum over terms t and steps k of  w[t][r * w_row + k * w_step] * x[t][k * x_step + lane]
//
// Weights are broadcast, one unit to a whole vector; x is read a vector at a time. In the forward and the transposed
// product the lanes are tokens, the terms the blocks of a row; in the sampled product the lanes are input features,
// the steps tokens, and "w" is the gradient of the output.
#pragma once

#include "element.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

template <class E>
struct Terms {
  using Unit = typename E::Unit;
  const Unit* const* w;
  const Unit* const* x;
  int count;
  int64_t w_row, w_step, x_step, steps;
};

template <class E, int kRows, int kVectors>
BLOCKSPARSE_INLINE void register_tile(const Terms<E>& terms, int64_t w_offset, int64_t x_offset, bool add,
                                      typename E::Sum* sums, int64_t sums_row) {
  using Unit = typename E::Unit;
  using Sum = typename E::Sum;
  constexpr int kWide = kLanes<Sum>;
  Vector<Sum> sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = add ? load(sums + r * sums_row + v * kWide) : Vector<Sum>{};

  const int64_t w_row = terms.w_row;
  for (int t = 0; t < terms.count; ++t) {
    const Unit* w = terms.w[t] + w_offset;
    const Unit* x = terms.x[t] + x_offset;
    for (int64_t k = 0; k < terms.steps; ++k, w += terms.w_step, x += terms.x_step) {
      Vector<Unit> in[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) in[v] = load(x + v * kWide);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Unit weight = w[r * w_row];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = E::multiply_add(weight, in[v], sum[r][v]);
      }
    }
  }

#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + r * sums_row + v * kWide, sum[r][v]);
}

// All rows, in tiles of kTileRows, then 4, 2, 1.
template <class E, int kVectors>
static void column_of_tiles(const Terms<E>& terms, int64_t x_offset, int64_t rows, bool add, typename E::Sum* sums,
                            int64_t sums_row) {
  int64_t r = 0;
#define BLOCKSPARSE_ROWS(count)                                                                            \
  for (; r + count <= rows; r += count)                                                                    \
  register_tile<E, count, kVectors>(terms, r* terms.w_row, x_offset, add, sums + r * sums_row, sums_row)
  if constexpr (kTileRows > 4) BLOCKSPARSE_ROWS(kTileRows);
  BLOCKSPARSE_ROWS(4);
  BLOCKSPARSE_ROWS(2);
  BLOCKSPARSE_ROWS(1);
#undef BLOCKSPARSE_ROWS
}

// `vectors` of lanes side by side, in columns of up to kTileVectors of about equal width.
template <class E>
static void tiles(const Terms<E>& terms, int64_t rows, int64_t vectors, bool add, typename E::Sum* sums,
                  int64_t sums_row) {
  const int64_t columns = (vectors + kTileVectors - 1) / kTileVectors;
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t first = vectors * c / columns, count = vectors * (c + 1) / columns - first;
    const int64_t offset = first * kLanes<typename E::Sum>;
    switch (count) {
      case 3:
        column_of_tiles<E, 3>(terms, offset, rows, add, sums + offset, sums_row);
        break;
      case 2:
        column_of_tiles<E, 2>(terms, offset, rows, add, sums + offset, sums_row);
        break;
      default:
        column_of_tiles<E, 1>(terms, offset, rows, add, sums + offset, sums_row);
    }
  }
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
