// Products of bfloat16 pairs on AMX tiles: one instruction for 16 x 16 sums, 16 pairs deep.
//
// A (rows of weights, or of the transposed gradient) needs no packing in the forward product, since a row of a block is
// a row of pairs already. B is the packed panel, or packed columns, of the vector kernels. The same code can be built
// on emulated tiles, so that any AVX-512 CPU tests it.
#pragma once

#include "core/parallel.hpp"
#include "core/types.hpp"
#include "isa/element.hpp"

#if defined(__AMX_BF16__) || defined(BLOCKSPARSE_EMULATED_TILES)
#define BLOCKSPARSE_TILES

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

constexpr int64_t kTile = 16;        // rows, and 4-byte columns, of a tile
constexpr int kPanelTiles = 8;       // vectors of tokens in a panel: enough to pay for transposing a block's weights
constexpr int64_t kTileGroup = 128;  // units of the sum taken together
constexpr int64_t kTileStrip = 16;   // sampled blocks of a row, for which the row's gradient is transposed once

#if defined(BLOCKSPARSE_EMULATED_TILES)
struct EmulatedTile {
  int rows, columns;
  uint32_t unit[kTile][kTile];
};
static thread_local EmulatedTile emulated[8];
#define BLOCKSPARSE_TILE_ZERO(c) memset(emulated[c].unit, 0, sizeof emulated[c].unit)
#define BLOCKSPARSE_TILE_LOAD(t, from, stride) emulated_load(emulated[t], from, stride)
#define BLOCKSPARSE_TILE_STORE(t, to, stride) emulated_store(emulated[t], to, stride)
#define BLOCKSPARSE_TILE_DOT(c, a, b) emulated_dot(emulated[c], emulated[a], emulated[b])

static inline void emulated_load(EmulatedTile& tile, const void* from, int64_t stride) {
  for (int r = 0; r < tile.rows; ++r)
    memcpy(tile.unit[r], static_cast<const char*>(from) + r * stride, tile.columns * sizeof(uint32_t));
}

static inline void emulated_store(const EmulatedTile& tile, void* to, int64_t stride) {
  for (int r = 0; r < tile.rows; ++r)
    memcpy(static_cast<char*>(to) + r * stride, tile.unit[r], tile.columns * sizeof(uint32_t));
}

// TDPBF16PS (Intel's Software Developer's Manual, volume 2): separate fused multiply-adds of the lower and of the upper
// numbers, starting from 0; their total is added to the tile. Subnormal numbers count as 0, as in VDPBF16PS.
static inline void emulated_dot(EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
  static_assert(kLanes<uint32_t> == kTile, "a row is a vector");
  for (int m = 0; m < c.rows; ++m) {
    Vector<float> lower = {}, upper = {};
    for (int k = 0; k < a.columns; ++k) {
      const Vector<uint32_t> left = broadcast(a.unit[m][k]), right = load(b.unit[k]);
      lower = fused_multiply_add(bits<Vector<float>>(left << 16), bits<Vector<float>>(right << 16), lower);
      upper =
          fused_multiply_add(bits<Vector<float>>(left & 0xffff0000u), bits<Vector<float>>(right & 0xffff0000u), upper);
    }
    const Vector<float> sum = bits<Vector<float>>(load(c.unit[m])) + (lower + upper);
    store(c.unit[m], bits<Vector<uint32_t>>(sum));
  }
}
#else
#define BLOCKSPARSE_TILE_ZERO(c) _tile_zero(c)
#define BLOCKSPARSE_TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define BLOCKSPARSE_TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define BLOCKSPARSE_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

// The tile intrinsics of some compilers do not declare which memory they read, so that earlier stores might move behind
// them.
static inline void finish_stores(const void* to) { __asm__ volatile("" : : "r"(to) : "memory"); }

// Tiles 0 to 3 hold 2 x 2 tiles of sums [rows, columns], 4 and 5 hold A [rows, depth], 6 and 7 hold B [depth, columns].
static inline void configure_tiles(int64_t rows, int64_t depth, int64_t columns) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = uint8_t(t >= 6 ? depth : rows);
    config.row_bytes[t] = uint16_t(4 * (t == 4 || t == 5 ? depth : columns));
#if defined(BLOCKSPARSE_EMULATED_TILES)
    emulated[t].rows = config.rows[t];
    emulated[t].columns = config.row_bytes[t] / 4;
#endif
  }
#if !defined(BLOCKSPARSE_EMULATED_TILES)
  finish_stores(&config);
  _tile_loadconfig(&config);
#endif
}

static inline void release_tiles() {
#if !defined(BLOCKSPARSE_EMULATED_TILES)
  _tile_release();
#endif
}

struct TileTerms {
  const uint32_t* const* a;     // [terms], of the first row
  const uint32_t* const* b[2];  // [terms], of each column of tiles
  int64_t terms, steps;         // steps of `depth` units in each term
  int64_t a_row, a_step, b_row, b_step;
};

// Compute kRows x kColumns tiles of sums, row tiles one below the other, columns at `sums[0]` and `sums[1]`.
template <int kRows, int kColumns>
static inline void tile_square(const TileTerms& terms, int64_t first_row, bool add, float* const* sums,
                               int64_t sums_row) {
  float* const left = sums[0] + first_row * sums_row;
  float* const right = kColumns > 1 ? sums[1] + first_row * sums_row : nullptr;
  const int64_t row_bytes = sums_row * 4, below = kTile * sums_row;
  if (add) {
    BLOCKSPARSE_TILE_LOAD(0, left, row_bytes);
    if constexpr (kColumns > 1) BLOCKSPARSE_TILE_LOAD(1, right, row_bytes);
    if constexpr (kRows > 1) BLOCKSPARSE_TILE_LOAD(2, left + below, row_bytes);
    if constexpr (kRows > 1 && kColumns > 1) BLOCKSPARSE_TILE_LOAD(3, right + below, row_bytes);
  } else {
    BLOCKSPARSE_TILE_ZERO(0);
    if constexpr (kColumns > 1) BLOCKSPARSE_TILE_ZERO(1);
    if constexpr (kRows > 1) BLOCKSPARSE_TILE_ZERO(2);
    if constexpr (kRows > 1 && kColumns > 1) BLOCKSPARSE_TILE_ZERO(3);
  }
  for (int64_t t = 0; t < terms.terms; ++t) {
    const uint32_t* a = terms.a[t] + first_row * terms.a_row;
    const uint32_t* b0 = terms.b[0][t];
    const uint32_t* b1 = kColumns > 1 ? terms.b[1][t] : nullptr;
    for (int64_t k = 0; k < terms.steps; ++k) {
      BLOCKSPARSE_TILE_LOAD(4, a + k * terms.a_step, terms.a_row * 4);
      if constexpr (kRows > 1) BLOCKSPARSE_TILE_LOAD(5, a + k * terms.a_step + kTile * terms.a_row, terms.a_row * 4);
      BLOCKSPARSE_TILE_LOAD(6, b0 + k * terms.b_step, terms.b_row * 4);
      if constexpr (kColumns > 1) BLOCKSPARSE_TILE_LOAD(7, b1 + k * terms.b_step, terms.b_row * 4);
      BLOCKSPARSE_TILE_DOT(0, 4, 6);
      if constexpr (kColumns > 1) BLOCKSPARSE_TILE_DOT(1, 4, 7);
      if constexpr (kRows > 1) BLOCKSPARSE_TILE_DOT(2, 5, 6);
      if constexpr (kRows > 1 && kColumns > 1) BLOCKSPARSE_TILE_DOT(3, 5, 7);
    }
  }
  BLOCKSPARSE_TILE_STORE(0, left, row_bytes);
  if constexpr (kColumns > 1) BLOCKSPARSE_TILE_STORE(1, right, row_bytes);
  if constexpr (kRows > 1) BLOCKSPARSE_TILE_STORE(2, left + below, row_bytes);
  if constexpr (kRows > 1 && kColumns > 1) BLOCKSPARSE_TILE_STORE(3, right + below, row_bytes);
}

static inline void tile_columns(const TileTerms& terms, int64_t row_tiles, int columns, bool add, float* const* sums,
                                int64_t sums_row) {
  finish_stores(*terms.a);
  for (int64_t r = 0; r < row_tiles; r += 2) {
    const auto square = r + 1 < row_tiles ? (columns > 1 ? tile_square<2, 2> : tile_square<2, 1>)
                                          : (columns > 1 ? tile_square<1, 2> : tile_square<1, 1>);
    square(terms, r * kTile, add, sums, sums_row);
  }
}

static inline bool fills_tiles(int64_t size) { return size <= kTile || size % kTile == 0; }

// Transpose [depth, width] units, rows `from_row` apart, to [width, depth]. Both sizes are whole tiles or less than
// one.
static inline void transpose_units(const uint32_t* from, int64_t from_row, int64_t depth, int64_t width, uint32_t* to,
                                   int64_t to_row) {
  for (int64_t k = 0; k < depth; k += kTile)
    for (int64_t i = 0; i < width; i += kTile) {
      const int64_t high = smaller(kTile, depth - k), wide = smaller(kTile, width - i);
      Vector<uint32_t> v[kTile] = {};
      for (int64_t r = 0; r < high; ++r) memcpy(&v[r], from + (k + r) * from_row + i, wide * sizeof(uint32_t));
      transpose<uint32_t>(v);
      for (int64_t c = 0; c < wide; ++c) memcpy(to + (i + c) * to_row + k, &v[c], high * sizeof(uint32_t));
    }
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
#endif
