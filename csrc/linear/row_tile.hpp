// The register tile of y = x W^T. It walks the blocks of a row of W by their indices, and keeps the sums of all of them
// in registers. Meanwhile it fetches the weights of later blocks.
#pragma once

#include "isa/tile.hpp"
#include "linear/linear.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

// Some neighbouring blocks of a row of W, or of its transpose, whose blocks are stored [sum, output].
template <class E, bool kTransposed>
struct RowBlocks {
  using Unit = typename E::Unit;
  // Whether the tile reads converted weights: those of `begin` and on, one after another, instead of `values` in place.
  static constexpr bool kConverts = E::kConvertsWeights || (E::kPack > 1 && kTransposed);

  const RowPiece& piece;
  const RowPiece& next;  // probably computed next
  const Unit* w;
  int64_t begin, end;
  int64_t ahead;  // blocks from each one to the one that is fetched meanwhile
};

template <class E, bool kTransposed, int kRows, int kVectors>
BLOCKSPARSE_INLINE void row_tile(const RowBlocks<E, kTransposed>& blocks, int64_t row, int64_t vector,
                                 typename E::Sum* sums) {
  using Unit = typename E::Unit;
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  constexpr bool kConverts = RowBlocks<E, kTransposed>::kConverts, kStrided = kTransposed && !kConverts;
  // Groups of rows have an address each, which share the registers of their offsets.
  constexpr int kGroup = kTransposed ? kRows : 4, kGroups = (kRows + kGroup - 1) / kGroup;
  const RowPiece& piece = blocks.piece;
  const int64_t steps = piece.block_sum / E::kPack, width = piece.width;
  const int64_t block = piece.block_out * steps, panel_block = steps * width;
  const int64_t w_row = kTransposed ? 1 : steps, w_step = kTransposed ? piece.block_out : 1;
  const Unit* const weights = blocks.w + (piece.begin + row) * w_row - (kConverts ? blocks.begin * block : 0);
  const Unit* const panel = static_cast<const Unit*>(piece.panel) + vector * n;

  constexpr int64_t kSize = sizeof(typename E::Storage);
  const int64_t fetch_step = kSize * (kStrided ? w_step : kRows * E::kPack), fetch_block = block * E::kPack * kSize;
  const char* const values =
      static_cast<const char*>(piece.values) + (piece.begin + row) * kSize * (kStrided ? 1 : piece.block_sum);
  const int64_t* const next_position = blocks.next.position - piece.blocks;
  const int64_t last = piece.blocks + blocks.next.blocks - 1;

  Vector<Sum> sum[kRows][kVectors] = {};
  for (int64_t t = blocks.begin; t < blocks.end; ++t) {
    const Unit* w[kGroups];
    w[0] = weights + (kConverts ? t : piece.position[t]) * block;
#pragma GCC unroll 4
    for (int g = 1; g < kGroups; ++g) w[g] = w[g - 1] + kGroup * w_row;
    const Unit* const end = w[0] + steps * w_step;
    const Unit* x = panel + piece.col[t] * panel_block;
    const int64_t i = smaller(t + blocks.ahead, last);
    const char* fetch = values + (i < piece.blocks ? piece.position : next_position)[i] * fetch_block;
#pragma GCC unroll 1
    do {
      __builtin_prefetch(fetch);
      fetch += fetch_step;
      Vector<Unit> in[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) in[v] = load(x + v * n);
      x += width;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Unit weight = load_unit(w[r / kGroup] + r % kGroup * w_row);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = E::multiply_add(weight, in[v], sum[r][v]);
      }
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) w[g] += w_step;
    } while (w[0] != end);
  }

#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Sum* to = sums + r * width + v * n;
      store(to, blocks.begin > 0 ? load(to) + sum[r][v] : sum[r][v]);
    }
}

// Compute all outputs of the piece in the tallest tiles, and the rest in lower ones.
template <class E, bool kTransposed, int kVectors>
static void row_tiles(const RowBlocks<E, kTransposed>& blocks, int64_t vector, typename E::Sum* sums) {
  const int64_t rows = blocks.piece.end - blocks.piece.begin, width = blocks.piece.width;
  in_tall_tiles<kVectors>(rows, [&](auto height, int64_t r) __attribute__((always_inline)) {
    row_tile<E, kTransposed, decltype(height)::value, kVectors>(blocks, r, vector, sums + r * width);
  });
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
