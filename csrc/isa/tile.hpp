// The register tile: the inner loop of CPU products (y = x W^T has its own, in linear/row_tile.hpp).
//
//   sums[r][lane] += sum over terms t and steps k of  w[t][r * w_row + k * w_step] * x[t][k * x_step + lane]
//
// One unit of w at a time is broadcast to a vector; x is read a vector at a time. In the sampled linear product lanes
// are input features of neighbouring blocks, steps are tokens, and w is the gradient of the output. In convolutions
// lanes are outputs, rows are positions of an image that is read in place, and w is the image.
#pragma once

#include "isa/element.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

// How a tile finds its vectors of x. kTerm: contiguous within each term; the others (one term only): each whole, half
// or quarter vector at an address of its own.
enum class Gather { kTerm, kVectors, kHalves, kQuarters };
constexpr int pieces(Gather gather) { return gather == Gather::kHalves ? 2 : gather == Gather::kQuarters ? 4 : 1; }

template <class E>
struct Terms {
  using Unit = typename E::Unit;
  const Unit* const* w;
  const Unit* const* x;  // [count], or the pieces of the one term
  int count;
  int64_t w_row, w_step, x_step, steps;
};

template <class V, class Half, size_t... I>
BLOCKSPARSE_INLINE V join(Half low, Half high, std::index_sequence<I...>) {
  return __builtin_shufflevector(low, high, I...);
}

// Join the first kSize units from each address.
template <class Unit, int kSize, int kCount>
BLOCKSPARSE_INLINE auto load_pieces(const Unit* const* x, int64_t offset) {
  typedef Unit Piece __attribute__((vector_size(kSize * kCount * sizeof(Unit))));
  if constexpr (kCount == 1) {
    Piece piece;
    memcpy(&piece, x[0] + offset, sizeof piece);
    return piece;
  } else {
    return join<Piece>(load_pieces<Unit, kSize, kCount / 2>(x, offset),
                       load_pieces<Unit, kSize, kCount / 2>(x + kCount / 2, offset),
                       std::make_index_sequence<kSize * kCount>{});
  }
}

// Load a weight from the caller's values, where a pair may be misaligned.
template <class Unit>
BLOCKSPARSE_INLINE Unit load_unit(const Unit* from) {
  Unit unit;
  memcpy(&unit, from, sizeof unit);
  return unit;
}

// Return the rows of the tallest tile of this width: enough sums to hide the latency of multiplications.
constexpr int tile_rows(int64_t vectors) {
  return vectors > 1 ? kTileRows : kTileRows == 8 ? 2 * kTileRows : 3 * kTileRows;
}

// Call compute(height, row) for tiles of this width that cover all rows: the tallest ones first. The height is a
// constant.
template <int kVectors, class Compute>
BLOCKSPARSE_INLINE void in_tall_tiles(int64_t rows, const Compute& compute) {
  constexpr int kMost = tile_rows(kVectors);
  int64_t r = 0;
  // Two tiles of 8 rows are faster than one of 12 and one of 4.
  if constexpr (kMost == 12)
    for (; r + 12 <= rows && rows - r != 16; r += 12) compute(std::integral_constant<int, 12>{}, r);
  const auto cover = [&](auto height) __attribute__((always_inline)) {
    if constexpr (kMost >= decltype(height)::value)
      for (; r + height <= rows; r += height) compute(height, r);
  };
  if constexpr (kMost == 16) cover(std::integral_constant<int, 16>{});
  cover(std::integral_constant<int, 8>{});
  cover(std::integral_constant<int, 4>{});
  cover(std::integral_constant<int, 2>{});
  cover(std::integral_constant<int, 1>{});
}

template <class E, int kRows, int kVectors, Gather kGather>
BLOCKSPARSE_INLINE void register_tile(const Terms<E>& terms, int64_t row, int64_t x_offset, bool add,
                                      typename E::Sum* sums, int64_t sums_row,
                                      int64_t sums_vector = kLanes<typename E::Sum>) {
  using Unit = typename E::Unit;
  using Sum = typename E::Sum;
  constexpr int kWide = kLanes<Sum>, kPieces = pieces(kGather);
  Vector<Sum> sum[kRows][kVectors] = {};

  const int64_t w_row = terms.w_row;
  // Tall tiles have groups of rows with an address each, which share the registers of their offsets.
  constexpr bool kTall = kVectors == 1 && kTileRows == 4 && kRows > kTileRows;
  constexpr int kGroups = kTall ? kRows / 4 : kRows > 8 ? 2 : 1, kGroup = (kRows + kGroups - 1) / kGroups;
  for (int t = 0; t < terms.count; ++t) {
    const Unit* w[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) w[g] = terms.w[t] + (row + g * kGroup) * w_row;
    const Unit* x = terms.x[t] + x_offset;
    int64_t at = 0;
    for (int64_t k = 0; k < terms.steps; ++k, at += terms.x_step) {
      Vector<Unit> in[kVectors];
      if constexpr (kGather == Gather::kTerm) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) in[v] = load(x + at + v * kWide);
      } else {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          in[v] = load_pieces<Unit, kWide / kPieces, kPieces>(terms.x + v * kPieces, x_offset + at);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Unit weight = load_unit(w[r / kGroup] + r % kGroup * w_row);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = E::multiply_add(weight, in[v], sum[r][v]);
      }
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) w[g] += terms.w_step;
    }
  }

  // Added at the end instead of carried through: sums of sums lose less to rounding than one long sum.
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Sum* to = sums + r * sums_row + v * sums_vector;
      store(to, add ? load(to) + sum[r][v] : sum[r][v]);
    }
}

// Compute all rows in the tallest tiles, and the rest in lower ones.
template <class E, int kVectors, Gather kGather>
static void column_of_tiles(const Terms<E>& terms, int64_t x_offset, int64_t rows, bool add, typename E::Sum* sums,
                            int64_t sums_row, int64_t sums_vector) {
  in_tall_tiles<kVectors>(rows, [&](auto height, int64_t r) __attribute__((always_inline)) {
    register_tile<E, decltype(height)::value, kVectors, kGather>(terms, r, x_offset, add, sums + r * sums_row, sums_row,
                                                                 sums_vector);
  });
}

template <class E, Gather kGather>
static void column_of_tiles(const Terms<E>& terms, int64_t vectors, int64_t x_offset, int64_t rows, bool add,
                            typename E::Sum* sums, int64_t sums_row, int64_t sums_vector = kLanes<typename E::Sum>) {
  const auto columns = vectors == 3   ? column_of_tiles<E, 3, kGather>
                       : vectors == 2 ? column_of_tiles<E, 2, kGather>
                                      : column_of_tiles<E, 1, kGather>;
  columns(terms, x_offset, rows, add, sums, sums_row, sums_vector);
}

// Compute all rows in tiles of about equal height, for few rows, whose sums must not wait for each other.
template <class E, int kVectors>
static void column_of_even_tiles(const Terms<E>& terms, int64_t x_offset, int64_t rows, bool add, typename E::Sum* sums,
                                 int64_t sums_row) {
  constexpr int kMost = kVectors == 3 ? kTileRows : kTileRows == 8 ? 14 : kVectors == 2 ? 6 : 8;
  const int64_t tiles = ceil_div(rows, kMost);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t r = rows * t / tiles;
    switch (rows * (t + 1) / tiles - r) {
#define BLOCKSPARSE_ROWS(count)                                                                                 \
  case count:                                                                                                   \
    if constexpr (count <= kMost)                                                                               \
      register_tile<E, count, kVectors, Gather::kTerm>(terms, r, x_offset, add, sums + r * sums_row, sums_row); \
    break;
      BLOCKSPARSE_ROWS(1)
      BLOCKSPARSE_ROWS(2)
      BLOCKSPARSE_ROWS(3)
      BLOCKSPARSE_ROWS(4)
      BLOCKSPARSE_ROWS(5)
      BLOCKSPARSE_ROWS(6)
      BLOCKSPARSE_ROWS(7)
      BLOCKSPARSE_ROWS(8)
      BLOCKSPARSE_ROWS(9)
      BLOCKSPARSE_ROWS(10)
      BLOCKSPARSE_ROWS(11)
      BLOCKSPARSE_ROWS(12)
      BLOCKSPARSE_ROWS(13)
      BLOCKSPARSE_ROWS(14)
#undef BLOCKSPARSE_ROWS
    }
  }
}

// Compute all rows of the vectors [0, vectors).
template <class E>
static void even_tiles(const Terms<E>& terms, int64_t vectors, int64_t rows, bool add, typename E::Sum* sums,
                       int64_t sums_row) {
  constexpr int n = kLanes<typename E::Sum>;
  const int64_t columns = ceil_div(vectors, kTileVectors);
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t first = vectors * c / columns, here = vectors * (c + 1) / columns - first, at = first * n;
    if (here == 3) column_of_even_tiles<E, 3>(terms, at, rows, add, sums + at, sums_row);
    if (here == 2) column_of_even_tiles<E, 2>(terms, at, rows, add, sums + at, sums_row);
    if (here == 1) column_of_even_tiles<E, 1>(terms, at, rows, add, sums + at, sums_row);
  }
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
