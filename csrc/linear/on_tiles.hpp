// Linear products of bfloat16 pairs on AMX tiles.
//
// Forward, A is a block of weights in place, and B a panel packed in contiguous tiles. The sums stay in tiles over a
// whole row of blocks. The transposed product turns the blocks once a call and then is a forward product. The sampled
// product turns the gradient once a call.
#pragma once

#include "core/parallel.hpp"
#include "isa/amx.hpp"
#include "linear/linear.hpp"

#if defined(BLOCKSPARSE_TILES)

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

// Return the depth of the tiles of a panel in units, or 0 if the sizes of a block do not fill tiles.
static inline int64_t depth_of_tiles(int64_t block_out, int64_t block_sum) {
  const int64_t units = block_sum / 2;
  return fills_tiles(block_out) && fills_tiles(units) ? smaller(kTile, units) : 0;
}

// The blocks of a row, and their inputs from column `first` of the panel on, in tiles of kDepth units; 0 for others.
template <int64_t kDepth>
struct PanelTerms {
  static constexpr int64_t kLines = kDepth;
  const uint32_t* values;
  const uint32_t* panel;
  const int32_t* col;
  int64_t block, panel_block;  // units of a block, and of its inputs
  int64_t count, steps, a_row, a_step, a_below, b_row, b_step, b_beside;

  PanelTerms(const RowPiece& piece, int64_t first)
      : values(static_cast<const uint32_t*>(piece.values) + piece.begin * piece.block_sum / 2),
        panel(static_cast<const uint32_t*>(piece.panel) + first * piece.depth),
        col(piece.col),
        block(piece.block_out * piece.block_sum / 2),
        panel_block(piece.block_sum / 2 * piece.width),
        count(piece.blocks),
        steps(piece.block_sum / 2 / piece.depth),
        a_row(piece.block_sum / 2),
        a_step(piece.depth),
        a_below(kTile * a_row),
        b_row(kTile),
        b_step(piece.depth * piece.width),
        b_beside(kTile * piece.depth) {}

  const uint32_t* a(int64_t t) const { return values + t * block; }
  const uint32_t* b(int64_t t) const { return panel + col[t] * panel_block; }
};

template <int64_t kDepth>
static inline void multiply_row_on_tiles(const RowPiece& piece, float* sums) {
  const int64_t rows = piece.end - piece.begin, at_once = rows > kTile ? 2 : 4;
  configure_tiles(smaller(kTile, rows), piece.depth, kTile);
  for (int64_t t = 0; t < piece.width; t += at_once * kTile) {
    const PanelTerms<kDepth> terms(piece, t);
    const int64_t columns = smaller(at_once, (piece.width - t) / kTile);
    float* const to[4] = {sums + t, sums + t + kTile, sums + t + 2 * kTile, sums + t + 3 * kTile};
    if (rows > kTile)
      tile_columns(terms, ceil_div(rows, kTile), int(columns), false, to, piece.width);
    else
      tile_row(terms, columns, false, to, piece.width);
  }
}

static inline void multiply_on_tiles(const RowPiece& piece, float* sums) {
  switch (piece.depth) {
    case 16:
      return multiply_row_on_tiles<16>(piece, sums);
    case 8:
      return multiply_row_on_tiles<8>(piece, sums);
    case 4:
      return multiply_row_on_tiles<4>(piece, sums);
    default:
      return multiply_row_on_tiles<0>(piece, sums);
  }
}

// The turned gradient of a block row, and one or two columns of tiles of packed x.
struct SampledTerms {
  static constexpr int64_t kLines = 0;
  const uint32_t *grad, *x;
  int64_t count, steps, a_row, a_step, a_below, b_row, b_step, b_beside;

  const uint32_t* a(int64_t) const { return grad; }
  const uint32_t* b(int64_t) const { return x; }
};

// Compute the sums of a strip of sampled blocks.
static inline void sample_on_tiles(const SampledStrip& strip, float* sums, int64_t sums_row) {
  const int64_t rows = smaller(kTile, strip.block_out), width = smaller(kTile, strip.padded_in);
  const int64_t in_block = strip.padded_in / width, tiles = strip.blocks * in_block;
  configure_tiles(rows, kTile, width);
  for (int64_t q = 0; q < tiles; q += 2) {
    const int columns = q + 1 < tiles ? 2 : 1;
    const uint32_t* x[2] = {};
    float* to[2] = {};
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t block = (q + c) / in_block, at = (q + c) % in_block * kTile;
      const int64_t column = strip.col[block] * strip.padded_in + at;
      x[c] = static_cast<const uint32_t*>(strip.x) + column / strip.chunk * strip.steps * strip.chunk +
             column % strip.chunk;
      to[c] = sums + block * strip.padded_in + at;
    }
    const SampledTerms terms = {static_cast<const uint32_t*>(strip.grad),
                                x[0],
                                1,
                                strip.steps / kTile,
                                kTile,
                                rows * kTile,
                                kTile * strip.steps,
                                strip.chunk,
                                kTile * strip.chunk,
                                columns > 1 ? x[1] - x[0] : 0};
    tile_columns(terms, ceil_div(strip.block_out, kTile), columns, false, to, sums_row);
  }
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
#endif
