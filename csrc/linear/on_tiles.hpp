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

// The blocks of a row, and their inputs from column `first` of the panel on.
struct PanelTerms {
  const RowPiece& piece;
  int64_t first, count, steps, a_row, a_step, b_row, b_step;

  PanelTerms(const RowPiece& piece, int64_t first)
      : piece(piece),
        first(first),
        count(piece.blocks),
        steps(piece.block_sum / 2 / piece.depth),
        a_row(piece.block_sum / 2),
        a_step(piece.depth),
        b_row(kTile),
        b_step(piece.depth * piece.width) {}

  const uint32_t* a(int64_t t, int64_t row) const {
    const int64_t place = piece.position ? piece.position[t] : t;
    return static_cast<const uint32_t*>(piece.values) + (place * piece.block_out + piece.begin + row) * a_row;
  }
  const uint32_t* b(int64_t t, int64_t column) const {
    return static_cast<const uint32_t*>(piece.panel) + piece.col[t] * a_row * piece.width +
           (first + column * kTile) * piece.depth;
  }
};

static inline void multiply_row_on_tiles(const RowPiece& piece, float* sums) {
  const int64_t rows = piece.end - piece.begin;
  configure_tiles(smaller(kTile, rows), piece.depth, kTile);
  for (int64_t t = 0; t < piece.width; t += 2 * kTile) {
    float* const to[2] = {sums + t, sums + t + kTile};
    tile_columns(PanelTerms(piece, t), ceil_div(rows, kTile), t + kTile < piece.width ? 2 : 1, false, to, piece.width);
  }
  release_tiles();
}

// The turned gradient of a block row, and two columns of tiles of packed x.
struct SampledTerms {
  const SampledStrip& strip;
  const uint32_t* x[2];
  int64_t count, steps, a_row, a_step, b_row, b_step;

  const uint32_t* a(int64_t, int64_t row) const { return static_cast<const uint32_t*>(strip.grad) + row * strip.steps; }
  const uint32_t* b(int64_t, int64_t column) const { return x[column]; }
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
    const SampledTerms terms = {strip, {x[0], x[1]}, 1,           strip.steps / kTile,
                                kTile, rows * kTile, strip.chunk, kTile * strip.chunk};
    tile_columns(terms, ceil_div(strip.block_out, kTile), columns, false, to, sums_row);
  }
  release_tiles();
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
#endif
