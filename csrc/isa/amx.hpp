// Products on AMX tiles of bfloat16 pairs, or of fours of bytes: one instruction for 16 x 16 sums, 16 units deep.
//
// A (rows of weights, or of the transposed gradient) needs no packing in the forward product, since a row of a block is
// a row of pairs already. B is packed so that each tile is contiguous. The same code can be built on emulated tiles, so
// that other CPUs test it.
#pragma once

#include "core/parallel.hpp"
#include "core/types.hpp"
#include "isa/element.hpp"

#if defined(__AMX_BF16__) || defined(BLOCKSPARSE_EMULATED_TILES)
#define BLOCKSPARSE_TILES

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

constexpr int64_t kTile = kTileSize;
constexpr int kPanelTiles = 8;      // vectors of tokens in a panel: more would leave the L2 cache
constexpr int64_t kTileStrip = 16;  // sampled blocks of a row that are written together

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
#define BLOCKSPARSE_TILE_DOT_BYTES(c, a, b) emulated_dot_bytes(emulated[c], emulated[a], emulated[b])

// Stop the program, as a CPU does if tiles have wrong shapes.
static inline void trap_if(bool wrong) {
  if (wrong) __builtin_trap();
}

static inline bool fits_tile(int size) { return size > 0 && size <= kTile; }

static inline void trap_if_shapes_differ(const EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
  trap_if(a.rows != c.rows || b.columns != c.columns || a.columns != b.rows);
}

static inline void emulated_load(EmulatedTile& tile, const void* from, int64_t stride) {
  trap_if(!fits_tile(tile.rows));  // no shapes are set
  for (int r = 0; r < tile.rows; ++r)
    memcpy(tile.unit[r], static_cast<const char*>(from) + r * stride, tile.columns * sizeof(uint32_t));
}

static inline void emulated_store(const EmulatedTile& tile, void* to, int64_t stride) {
  trap_if(!fits_tile(tile.rows));
  for (int r = 0; r < tile.rows; ++r)
    memcpy(static_cast<char*>(to) + r * stride, tile.unit[r], tile.columns * sizeof(uint32_t));
}

// TDPBF16PS (Intel's Software Developer's Manual, volume 2): separate fused multiply-adds of the lower and of the upper
// numbers, starting from 0; their total is added to the tile. Subnormal numbers count as 0, as in VDPBF16PS.
static inline void emulated_dot(EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
  trap_if_shapes_differ(c, a, b);
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

// TDPBUSD: unsigned bytes of A, signed bytes of B, exact sums in int32.
static inline void emulated_dot_bytes(EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
  trap_if_shapes_differ(c, a, b);
  using Sums = Vector<int32_t>;
  for (int m = 0; m < c.rows; ++m) {
    Sums sum = bits<Sums>(load(c.unit[m]));
    for (int k = 0; k < a.columns; ++k)
      for (int i = 0; i < 32; i += 8)
        sum += int32_t(a.unit[m][k] >> i & 255) * (bits<Sums>(load(b.unit[k]) << (24 - i)) >> 24);
    store(c.unit[m], bits<Vector<uint32_t>>(sum));
  }
}
#else
#define BLOCKSPARSE_TILE_ZERO(c) _tile_zero(c)
#define BLOCKSPARSE_TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define BLOCKSPARSE_TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define BLOCKSPARSE_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#define BLOCKSPARSE_TILE_DOT_BYTES(c, a, b) _tile_dpbusd(c, a, b)
#endif

// The tile intrinsics of some compilers do not declare which memory they read, so that earlier stores might move behind
// them.
static inline void finish_stores(const void* to) { __asm__ volatile("" : : "r"(to) : "memory"); }

static inline void release_tiles() {
#if defined(BLOCKSPARSE_EMULATED_TILES)
  for (EmulatedTile& tile : emulated) tile.rows = 0;
#else
  _tile_release();
#endif
}

// Tiles 0 to 3 hold tiles of sums [rows, columns], 4 and 5 hold A [rows, depth], 6 and 7 hold B [depth, columns]. The
// shapes stay until the thread leaves its parallel loop, because setting and releasing them takes as long as ten
// products.
static inline void configure_tiles(int64_t rows, int64_t depth, int64_t columns) {
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  // Kept, because reading what was just written would wait.
  static thread_local Config config;
  LoopState& state = loop_state();
  const uint64_t shapes = uint64_t(rows) << 16 | uint64_t(depth) << 8 | uint64_t(columns);
#if !defined(BLOCKSPARSE_EMULATED_TILES)
  if (state.set_up == shapes) return;
#endif
  config.palette = 1;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = uint8_t(t >= 6 ? depth : rows);
    config.row_bytes[t] = uint16_t(4 * (t == 4 || t == 5 ? depth : columns));
#if defined(BLOCKSPARSE_EMULATED_TILES)
    emulated[t].rows = config.rows[t];
    emulated[t].columns = config.row_bytes[t] / 4;
    trap_if(!fits_tile(emulated[t].rows) || !fits_tile(emulated[t].columns));
#endif
  }
#if !defined(BLOCKSPARSE_EMULATED_TILES)
  finish_stores(&config);
  _tile_loadconfig(&config);
#endif
  state = {shapes, release_tiles};
}

// Compute kRows x kColumns tiles of sums, at most four, row tiles one below the other, columns at `sums[0]`, `sums[1]`
// and so on.
//
// With kBytes, units are fours of bytes, and sums are int32. `terms` has `count` terms of `steps` steps: `a(t)` and
// `b(t)` are where A and B begin in term t. The other members are distances in units, from row to row and from step to
// step; `a_below` and `b_beside` are those of the next tile of rows, and of the next column of tiles. Tiles of B
// that have kLines cache lines, one after another, are fetched a step ahead, a tile after each product.
template <int kRows, int kColumns, bool kBytes, class Terms>
static inline void tile_square(const Terms& terms, int64_t first_row, bool add, float* const* sums, int64_t sums_row) {
  static_assert(kRows * kColumns <= 4, "tiles of sums");
  float* const left = sums[0] + first_row * sums_row;
  float* const right = kColumns > 1 ? sums[1] + first_row * sums_row : nullptr;
  const int64_t row_bytes = sums_row * 4, below = kTile * sums_row;
  if (add) {
    BLOCKSPARSE_TILE_LOAD(0, left, row_bytes);
    if constexpr (kColumns > 1) BLOCKSPARSE_TILE_LOAD(1, right, row_bytes);
    if constexpr (kRows > 1) BLOCKSPARSE_TILE_LOAD(2, left + below, row_bytes);
    if constexpr (kRows > 1 && kColumns > 1) BLOCKSPARSE_TILE_LOAD(3, right + below, row_bytes);
    if constexpr (kColumns > 2) BLOCKSPARSE_TILE_LOAD(2, sums[2] + first_row * sums_row, row_bytes);
    if constexpr (kColumns > 3) BLOCKSPARSE_TILE_LOAD(3, sums[3] + first_row * sums_row, row_bytes);
  } else {
    BLOCKSPARSE_TILE_ZERO(0);
    if constexpr (kColumns > 1) BLOCKSPARSE_TILE_ZERO(1);
    if constexpr (kRows > 1 || kColumns > 2) BLOCKSPARSE_TILE_ZERO(2);
    if constexpr (kRows * kColumns > 3) BLOCKSPARSE_TILE_ZERO(3);
  }
  const int64_t count = terms.count, steps = terms.steps, a_step = terms.a_step, b_step = terms.b_step;
  const int64_t a_bytes = terms.a_row * 4, b_bytes = terms.b_row * 4;
  const int64_t a_first = first_row / kTile * terms.a_below, a_below = terms.a_below, b_beside = terms.b_beside;
  const uint32_t* next = terms.b(0);
  for (int64_t t = 0; t < count; ++t) {
    const uint32_t* a = terms.a(t) + a_first;
    const uint32_t* b = next;
    if (t + 1 < count) next = terms.b(t + 1);
    for (int64_t k = steps; k > 0; --k) {
      const uint32_t* const after = k > 1 ? b + b_step : next;
      const auto fetch = [&](int64_t first) __attribute__((always_inline)) {
        if constexpr (Terms::kLines > 0)
#pragma GCC unroll 16
          for (int64_t r = first; r < first + Terms::kLines; ++r) __builtin_prefetch(after + r * kTile);
      };
#define BLOCKSPARSE_DOT(c, a, b)         \
  if constexpr (kBytes)                  \
    BLOCKSPARSE_TILE_DOT_BYTES(c, a, b); \
  else                                   \
    BLOCKSPARSE_TILE_DOT(c, a, b)
      BLOCKSPARSE_TILE_LOAD(4, a, a_bytes);
      BLOCKSPARSE_TILE_LOAD(6, b, b_bytes);
      BLOCKSPARSE_DOT(0, 4, 6);
      fetch(0);
      if constexpr (kColumns > 1) {
        BLOCKSPARSE_TILE_LOAD(7, b + b_beside, b_bytes);
        BLOCKSPARSE_DOT(1, 4, 7);
        fetch(Terms::kLines);
      }
      if constexpr (kRows > 1) {
        BLOCKSPARSE_TILE_LOAD(5, a + a_below, a_bytes);
        BLOCKSPARSE_DOT(2, 5, 6);
      }
      if constexpr (kRows > 1 && kColumns > 1) {
        BLOCKSPARSE_DOT(3, 5, 7);
      }
      if constexpr (kColumns > 2) {
        BLOCKSPARSE_TILE_LOAD(6, b + 2 * b_beside, b_bytes);
        BLOCKSPARSE_DOT(2, 4, 6);
        fetch(2 * Terms::kLines);
      }
      if constexpr (kColumns > 3) {
        BLOCKSPARSE_TILE_LOAD(7, b + 3 * b_beside, b_bytes);
        BLOCKSPARSE_DOT(3, 4, 7);
        fetch(3 * Terms::kLines);
      }
#undef BLOCKSPARSE_DOT
      a += a_step;
      b += b_step;
    }
  }
  BLOCKSPARSE_TILE_STORE(0, left, row_bytes);
  if constexpr (kColumns > 1) BLOCKSPARSE_TILE_STORE(1, right, row_bytes);
  if constexpr (kRows > 1) BLOCKSPARSE_TILE_STORE(2, left + below, row_bytes);
  if constexpr (kRows > 1 && kColumns > 1) BLOCKSPARSE_TILE_STORE(3, right + below, row_bytes);
  if constexpr (kColumns > 2) BLOCKSPARSE_TILE_STORE(2, sums[2] + first_row * sums_row, row_bytes);
  if constexpr (kColumns > 3) BLOCKSPARSE_TILE_STORE(3, sums[3] + first_row * sums_row, row_bytes);
}

template <bool kBytes = false, class Terms>
static inline void tile_columns(const Terms& terms, int64_t row_tiles, int columns, bool add, float* const* sums,
                                int64_t sums_row) {
  finish_stores(&terms);
  for (int64_t r = 0; r < row_tiles; r += 2) {
    const auto square = r + 1 < row_tiles
                            ? (columns > 1 ? tile_square<2, 2, kBytes, Terms> : tile_square<2, 1, kBytes, Terms>)
                            : (columns > 1 ? tile_square<1, 2, kBytes, Terms> : tile_square<1, 1, kBytes, Terms>);
    square(terms, r * kTile, add, sums, sums_row);
  }
}

// Compute a row of one to four tiles of sums, which share the loads of A.
template <bool kBytes = false, class Terms>
static inline void tile_row(const Terms& terms, int64_t columns, bool add, float* const* sums, int64_t sums_row) {
  finish_stores(&terms);
  const auto square = columns > 3   ? tile_square<1, 4, kBytes, Terms>
                      : columns > 2 ? tile_square<1, 3, kBytes, Terms>
                      : columns > 1 ? tile_square<1, 2, kBytes, Terms>
                                    : tile_square<1, 1, kBytes, Terms>;
  square(terms, 0, add, sums, sums_row);
}

static inline bool fills_tiles(int64_t size) { return size <= kTile || size % kTile == 0; }

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
#endif
