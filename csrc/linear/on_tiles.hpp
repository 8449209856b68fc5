// Linear products of bfloat16 pairs on AMX tiles.
#pragma once

#include "core/parallel.hpp"
#include "isa/amx.hpp"
#include "linear/linear.hpp"

#if defined(BLOCKSPARSE_TILES)

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

// Compute the sums of a row piece; return false if its sizes do not fill tiles. `prepare` returns a block's pairs,
// [sum, output] for the transposed product, whose A has to be transposed.
template <class Prepare>
static bool multiply_row_on_tiles(const RowPiece& piece, float* sums, Prepare prepare) {
  const int64_t rows = piece.end - piece.begin, units = piece.block_sum / 2;
  if (!fills_tiles(rows) || !fills_tiles(units)) return false;
  const int64_t depth = smaller(kTile, units), group = units < kTileGroup ? kTileGroup / units : 1;
  uint32_t* turned =
      piece.transposed ? static_cast<uint32_t*>(scratch(Scratch::kTurned, group * rows * units * 4)) : nullptr;
  const uint32_t* panel = static_cast<const uint32_t*>(piece.panel);
  const uint32_t* a[kTileGroup];
  const uint32_t* b[2][kTileGroup];
  configure_tiles(smaller(kTile, rows), depth, kTile);
  for (int64_t first = 0; first < piece.blocks; first += group) {
    const int64_t count = smaller(group, piece.blocks - first);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t* block = prepare(piece.position[first + i]);
      if (turned) {
        a[i] = turned + i * rows * units;
        transpose_units(block, piece.block_out, units, rows, turned + i * rows * units, units);
      } else {
        a[i] = block;
      }
    }
    for (int64_t t = 0; t < piece.width; t += 2 * kTile) {
      const int columns = t + kTile < piece.width ? 2 : 1;
      for (int64_t i = 0; i < count; ++i) {
        b[0][i] = panel + piece.col[first + i] * units * piece.width + t;
        b[1][i] = b[0][i] + kTile;
      }
      float* const to[2] = {sums + t, sums + t + kTile};
      tile_columns({a, {b[0], b[1]}, count, units / depth, units, depth, piece.width, depth * piece.width},
                   ceil_div(rows, kTile), columns, first > 0, to, piece.width);
    }
  }
  release_tiles();
  return true;
}

// Compute the sums of a strip of sampled blocks; return false if its sizes do not fill tiles.
[[maybe_unused]] static bool sample_on_tiles(const SampledStrip& strip, float* sums, int64_t sums_row) {
  const int64_t rows = strip.block_out, width = smaller(kTile, strip.padded_in);
  if (!fills_tiles(rows)) return false;
  uint32_t* turned = static_cast<uint32_t*>(scratch(Scratch::kTurned, rows * strip.steps * 4));
  transpose_units(static_cast<const uint32_t*>(strip.grad), rows, strip.steps, rows, turned, strip.steps);
  const int64_t in_block = strip.padded_in / width, tiles = strip.blocks * in_block;
  const int64_t whole = strip.steps / kTile * kTile;
  for (int64_t first = 0; first < strip.steps; first = first < whole ? whole : strip.steps) {
    const int64_t depth = first < whole ? kTile : strip.steps - whole, steps = first < whole ? whole / kTile : 1;
    configure_tiles(smaller(kTile, rows), depth, width);
    for (int64_t q = 0; q < tiles; q += 2) {
      const int columns = q + 1 < tiles ? 2 : 1;
      const uint32_t* const a = turned + first;
      const uint32_t* b[2] = {};
      float* to[2] = {};
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t block = (q + c) / in_block, at = (q + c) % in_block * kTile;
        b[c] = static_cast<const uint32_t*>(strip.x) + (strip.col[block] * strip.steps + first) * strip.padded_in + at;
        to[c] = sums + block * strip.padded_in + at;
      }
      tile_columns({&a, {&b[0], &b[1]}, 1, steps, strip.steps, depth, strip.padded_in, depth * strip.padded_in},
                   ceil_div(rows, kTile), columns, first > 0, to, sums_row);
    }
  }
  release_tiles();
  return true;
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
#endif
