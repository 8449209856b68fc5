// Linear products for one instruction set (BLOCKSPARSE_ISA).
#include "core/parallel.hpp"
#include "isa/element.hpp"
#include "isa/tile.hpp"
#include "linear/few_tokens.hpp"
#include "linear/linear.hpp"
#include "linear/on_tiles.hpp"
#include "linear/outputs.hpp"
#include "linear/row_tile.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

// Units summed at a time: sums of sums lose less to rounding than one long sum. Converted weights and their inputs also
// stay in the L1 cache while all outputs are computed.
constexpr int64_t kSumGroup = 256, kConvertGroup = 64;
// Steps from which one block ahead is fetched: the lines of a tall block share few sets of the L1 cache.
constexpr int64_t kLargeBlock = 64;
// Steps of a sampled block at a time: its inputs and gradients stay in the L1 cache.
constexpr int64_t kStepGroup = 128;
// Blocks from each one to the one that is fetched while it is packed, if each row of a block fits a cache line.
// Processors foresee longer rows.
constexpr int64_t kPackAhead = 8;

template <class E>
Vector<typename E::Unit> units_up_to(const typename E::Storage* from, int64_t count) {
  constexpr int64_t whole = kLanes<typename E::Unit> * E::kPack;
  if (count >= whole) return E::units(from);
  typename E::Storage padded[whole] = {};
  if (count > 0) memcpy(padded, from, count * sizeof *from);
  return E::units(padded);
}

// -- packing -------------------------------------------------------------------------------------------------------

template <class E>
void pack_panel(const void* from, int64_t stride, int64_t tokens, int64_t first_unit, int64_t last_unit, int64_t width,
                int64_t depth, void* to) {
  using Unit = typename E::Unit;
  using Storage = typename E::Storage;
  constexpr int n = kLanes<Unit>;
  const Storage* x = static_cast<const Storage*>(from);
  Unit* panel = static_cast<Unit*>(to);
  for (int64_t t = 0; t < width; t += n) {
    for (int64_t k = first_unit; k < last_unit; k += n) {
      Vector<Unit> v[n];
      const int64_t whole = smaller<int64_t>(n, last_unit - k);
      if (whole == n && t + n <= tokens) {
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) v[i] = E::units(x + (t + i) * stride + k * E::kPack);
      } else {
        for (int i = 0; i < n; ++i)
          v[i] =
              t + i < tokens ? units_up_to<E>(x + (t + i) * stride + k * E::kPack, whole * E::kPack) : Vector<Unit>{};
      }
      transpose<Unit>(v);
      if (whole == n && (depth == 1 || depth == n)) {
        Unit* const first = panel + k * width + t * depth;
        const int64_t row = depth == 1 ? width : n;
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) store(first + i * row, v[i]);
      } else {
        for (int64_t i = 0; i < whole; ++i)
          store(panel + (k + i) / depth * depth * width + t * depth + (k + i) % depth * (depth == 1 ? 0 : n), v[i]);
      }
    }
  }
}

// Return the units [i, i + lanes) of one step: kPack rows of numbers, the second of which may be missing.
template <class E>
Vector<typename E::Unit> step_units(const typename E::Storage* const* row, int64_t i) {
  if constexpr (E::kPack == 1) {
    return E::units(row[0] + i);
  } else {
    typedef typename E::Storage Narrow __attribute__((vector_size(kVectorBytes / 2)));
    Narrow low, high = {};
    memcpy(&low, row[0] + i, sizeof low);
    if (row[1]) memcpy(&high, row[1] + i, sizeof high);
    using Wide = Vector<typename E::Unit>;
    return __builtin_convertvector(low, Wide) | __builtin_convertvector(high, Wide) << 16;
  }
}

template <class E>
typename E::Unit step_unit(const typename E::Storage* const* row, int64_t i) {
  if constexpr (E::kPack == 1) {
    return E::to_sum(row[0][i]);
  } else {
    return typename E::Unit(row[0][i]) | typename E::Unit(row[1] ? row[1][i] : 0) << 16;
  }
}

template <class E>
void pack_step(const typename E::Storage* const* row, int64_t count, typename E::Unit* to) {
  constexpr int n = kLanes<typename E::Unit>;
  int64_t i = 0;
  for (; i + n <= count; i += n) store(to + i, step_units<E>(row, i));
  for (; i < count; ++i) to[i] = step_unit<E>(row, i);
}

// Pack kPieces blocks per vector: read together, stored apart.
template <class E, int kPieces>
void pack_block_columns(const BlockColumns& columns, int64_t first_step, int64_t last_step, int64_t first_block,
                        int64_t last_block) {
  using Storage = typename E::Storage;
  using Unit = typename E::Unit;
  constexpr int size = kLanes<Unit> / kPieces;
  const Storage* from = static_cast<const Storage*>(columns.from);
  const bool fetches = columns.block * int64_t(sizeof(Storage)) <= kCacheLine;
  for (int64_t b = first_block; b < last_block; b += kPieces) {
    Unit* to = static_cast<Unit*>(columns.to) + b * columns.to_stride;
    const bool whole = kPieces > 1 && b + kPieces <= last_block;
    for (int64_t s = first_step; s < last_step; ++s) {
      const Storage* row[E::kPack];
      for (int f = 0; f < E::kPack; ++f) {
        const int64_t t = s * E::kPack + f;
        row[f] = t < columns.tokens ? from + t * columns.stride + b * columns.block : nullptr;
      }
      Unit* at = to + s * columns.padded;
      if (fetches && row[0]) __builtin_prefetch(row[0] + kPackAhead * columns.block);
      if (!row[0]) {
        for (int64_t p = 0; p < smaller<int64_t>(kPieces, last_block - b); ++p)
          memset(at + p * columns.to_stride, 0, columns.padded * sizeof(Unit));
        continue;
      }
      if (whole) {
        Unit units[kLanes<Unit>];
        store(units, step_units<E>(row, 0));
#pragma GCC unroll 4
        for (int p = 0; p < kPieces; ++p) memcpy(at + p * columns.to_stride, units + p * size, size * sizeof(Unit));
      } else {
        for (int64_t p = 0; p < smaller<int64_t>(kPieces, last_block - b); ++p) {
          const Storage* block[E::kPack];
          for (int f = 0; f < E::kPack; ++f) block[f] = row[f] ? row[f] + p * columns.block : nullptr;
          pack_step<E>(block, columns.block, at + p * columns.to_stride);
          for (int64_t i = columns.block; i < columns.padded; ++i) at[p * columns.to_stride + i] = 0;
        }
      }
    }
  }
}

// Return how many blocks of this width fill a vector: 2 or 4; otherwise 1, since blocks then take whole vectors,
// padded.
template <class E>
int blocks_in_vector(int64_t block) {
  constexpr int n = kLanes<typename E::Sum>;
  return n >= 4 && block * 2 == n ? 2 : n >= 8 && block * 4 == n ? 4 : 1;
}

template <class E>
void pack_block_columns(const BlockColumns& columns, int64_t first_step, int64_t last_step, int64_t first_block,
                        int64_t last_block) {
  const int blocks = blocks_in_vector<E>(columns.padded);
  const auto pack = blocks == 2   ? pack_block_columns<E, 2>
                    : blocks == 4 ? pack_block_columns<E, 4>
                                  : pack_block_columns<E, 1>;
  pack(columns, first_step, last_step, first_block, last_block);
}

// -- y = x W^T -------------------------------------------------------------------------------------------------------

// Convert a block of weights to units, in the order of its numbers or, for pairs, [steps, outputs].
template <class E>
void convert_block(const RowPiece& piece, int64_t position, typename E::Unit* to) {
  using Storage = typename E::Storage;
  const Storage* block = static_cast<const Storage*>(piece.values) + position * (piece.block_out * piece.block_sum);
  if constexpr (E::kPack == 1) {
    pack_step<E>(&block, piece.block_out * piece.block_sum, to);
  } else {
    for (int64_t k = 0; k < piece.block_sum; k += 2, to += piece.block_out) {
      const Storage* pair[2] = {block + k * piece.block_out, block + (k + 1) * piece.block_out};
      pack_step<E>(pair, piece.block_out, to);
    }
  }
}

template <class E, bool kTransposed>
void multiply_row(const RowPiece& piece, const RowPiece& next, typename E::Sum* sums) {
  using Unit = typename E::Unit;
  using Blocks = RowBlocks<E, kTransposed>;
  constexpr int n = kLanes<Unit>;
  constexpr int64_t kMost = Blocks::kConverts ? kConvertGroup : kSumGroup;
  const int64_t steps = piece.block_sum / E::kPack, group = steps < kMost ? kMost / steps : 1;
  const int64_t block = piece.block_out * steps, bytes = group * block * int64_t(sizeof(Unit));
  Unit* const converted = Blocks::kConverts ? static_cast<Unit*>(scratch(Scratch::kWeights, bytes)) : nullptr;
  const Unit* const w = Blocks::kConverts ? converted : static_cast<const Unit*>(piece.values);
  const int64_t vectors = piece.width / n, columns = ceil_div(vectors, kTileVectors);
  const int64_t ahead = steps < kLargeBlock ? kFetchAhead : 1;
  for (int64_t first = 0; first < piece.blocks; first += group) {
    const int64_t count = smaller(group, piece.blocks - first);
    if constexpr (Blocks::kConverts)
      for (int64_t i = 0; i < count; ++i) convert_block<E>(piece, piece.position[first + i], converted + i * block);
    const Blocks blocks = {piece, next, w, first, first + count, Blocks::kConverts ? group : ahead};
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t vector = vectors * c / columns, here = vectors * (c + 1) / columns - vector;
      if (here == 3) row_tiles<E, kTransposed, 3>(blocks, vector, sums + vector * n);
      if (here == 2) row_tiles<E, kTransposed, 2>(blocks, vector, sums + vector * n);
      if (here == 1) row_tiles<E, kTransposed, 1>(blocks, vector, sums + vector * n);
    }
  }
}

template <class E>
void row_piece(const RowPiece& piece, const RowPiece& next, void* to) {
  using Sum = typename E::Sum;
  Sum* sums = static_cast<Sum*>(to);
  if (piece.blocks == 0) {
    memset(sums, 0, (piece.end - piece.begin) * piece.width * sizeof(Sum));
    return;
  }
#if defined(BLOCKSPARSE_TILES)
  if constexpr (E::kPack == 2) {
    if (piece.depth) return multiply_on_tiles(piece, sums);
  }
#endif
  const auto multiply = piece.transposed ? multiply_row<E, true> : multiply_row<E, false>;
  multiply(piece, next, sums);
}

template <class E>
int64_t tile_depth(int64_t block_out, int64_t block_sum) {
#if defined(BLOCKSPARSE_TILES)
  if constexpr (E::kPack == 2) return depth_of_tiles(block_out, block_sum);
#endif
  (void)block_out, (void)block_sum;
  return 0;
}

// With whole tiles, more tokens than these are better on tiles, which read the weights once for all of them.
constexpr int64_t kFewOnTiles = 2;
template <class E>
int64_t copies_for_few_tokens(int64_t tokens, int64_t block_out, int64_t block_sum, bool transposed) {
  const bool whole = tile_depth<E>(block_out, block_sum) == kTileSize && block_out >= kTileSize;
  if (whole && !transposed && tokens > kFewOnTiles) return 0;
  return few_tokens<E>(tokens, block_out, block_sum, transposed);
}

// Load one unit of each of `count` outputs, followed by zeros.
template <class E>
Vector<typename E::Unit> step_units_up_to(const typename E::Storage* const* row, int64_t count) {
  constexpr int n = kLanes<typename E::Unit>;
  if (count >= n && row[0]) return step_units<E>(row, 0);
  typename E::Unit padded[n] = {};
  for (int64_t i = 0; row[0] && i < smaller<int64_t>(n, count); ++i) padded[i] = step_unit<E>(row, i);
  return load(padded);
}

template <class E>
void turn(const TurnedMatrix& matrix) {
#if defined(BLOCKSPARSE_TILES)
  if constexpr (E::kPack == 2) {
    using Storage = typename E::Storage;
    constexpr int64_t n = kTileSize;
    for (int64_t k = 0; k < matrix.units; k += n)
      for (int64_t o = 0; o < matrix.outputs; o += n) {
        const int64_t outputs = smaller(n, matrix.outputs - o), units = smaller(n, matrix.units - k);
        const Storage* from = static_cast<const Storage*>(matrix.from) + 2 * k * matrix.stride + o;
        auto* to = static_cast<typename E::Unit*>(matrix.to) + o * matrix.to_row + k / n * matrix.to_tile;
        Vector<typename E::Unit> v[n];
        if (outputs == n && units == n && 2 * (k + n) <= matrix.sum) {
#pragma GCC unroll 16
          for (int r = 0; r < n; ++r) {
            const Storage* const row[2] = {from + 2 * r * matrix.stride, from + (2 * r + 1) * matrix.stride};
            v[r] = step_units<E>(row, 0);
          }
          transpose<typename E::Unit>(v);
#pragma GCC unroll 16
          for (int r = 0; r < n; ++r) store(to + r * matrix.to_row, v[r]);
          continue;
        }
        for (int64_t r = 0; r < n; ++r) {
          const int64_t s = 2 * (k + r);
          const Storage* const row[2] = {s < matrix.sum ? from + 2 * r * matrix.stride : nullptr,
                                         s + 1 < matrix.sum ? from + (2 * r + 1) * matrix.stride : nullptr};
          v[r] = r < units ? step_units_up_to<E>(row, outputs) : Vector<typename E::Unit>{};
        }
        transpose<typename E::Unit>(v);
        for (int64_t r = 0; r < outputs; ++r) memcpy(to + r * matrix.to_row, &v[r], units * sizeof v[0][0]);
      }
  }
#endif
  (void)matrix;
}

// -- grad^T x on the layout -----------------------------------------------------------------------------------------

// Return the features of a block in packed x: half or a quarter of a vector, or whole vectors.
template <class E>
int64_t padded_in(int64_t block_in) {
  constexpr int n = kLanes<typename E::Sum>;
  return blocks_in_vector<E>(block_in) > 1 ? block_in : ceil_div(block_in, n) * n;
}

// Return how many neighbouring blocks make a tile two or three vectors wide.
template <class E>
int64_t strip(int64_t block_in) {
  const int64_t padded = padded_in<E>(block_in), vector = kLanes<typename E::Sum>;
#if defined(BLOCKSPARSE_TILES)
  if (E::kPack == 2) return kTileStrip;
#endif
  if (padded < vector) return 2 * vector / padded;
  return padded < kTileVectors * vector ? kTileVectors * vector / padded : 1;
}

// Multiply the vectors of a strip. Each starts where its block does in `sums`, `vector` numbers after the one before.
template <class E, Gather kGather>
void multiply_strip(const SampledStrip& strip, int64_t vectors, bool add, typename E::Sum* sums, int64_t row,
                    int64_t vector) {
  using Unit = typename E::Unit;
  constexpr int n = kLanes<Unit>, kPieces = pieces(kGather), size = n / kPieces;
  const int64_t columns = ceil_div(vectors, kTileVectors);
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t first_vector = vectors * c / columns, here = vectors * (c + 1) / columns - first_vector;
    const Unit* x[kTileVectors * kPieces];
    for (int64_t p = 0; p < here * kPieces; ++p) {
      const int64_t at = first_vector * n + p * size;
      const int64_t block = smaller(at / strip.padded_in, strip.blocks - 1);  // the last one again to fill a vector
      const int64_t feature = strip.col[block] * strip.padded_in + at % strip.padded_in, within = feature % strip.chunk;
      x[p] = static_cast<const Unit*>(strip.x) + (feature - within) * strip.steps + within;
    }
    for (int64_t first = 0; first < strip.steps; first += kStepGroup) {
      const Unit* grad = static_cast<const Unit*>(strip.grad) + first * strip.block_out;
      const Terms<E> terms = {&grad, x, 1, 1, strip.block_out, strip.chunk, smaller(kStepGroup, strip.steps - first)};
      column_of_tiles<E, kGather>(terms, here, first * strip.chunk, strip.block_out, add || first > 0,
                                  sums + first_vector * vector, row, vector);
    }
  }
}

template <class E>
void write_strip(const SampledStrip& strip, const typename E::Sum* sums, int64_t sums_row) {
  using Storage = typename E::Storage;
  constexpr int n = kLanes<typename E::Sum>;
  const int in_vector = blocks_in_vector<E>(strip.block_in);
  Storage* to = static_cast<Storage*>(strip.values);
  for (int64_t b = 0; b < strip.blocks; ++b) {
    for (int64_t o = 0; o < strip.block_out; ++o, to += strip.block_in) {
      const typename E::Sum* row = sums + o * sums_row + b * strip.padded_in;
      if (in_vector == 2) {
        write_sums<E>(to, load(row), n / 2, strip.add);
      } else if (in_vector == 4) {
        write_sums<E>(to, load(row), n / 4, strip.add);
      } else {
        int64_t i = 0;
        for (; i + n <= strip.block_in; i += n) write_sums<E>(to + i, load(row + i), n, strip.add);
        if (i < strip.block_in) write_sums<E>(to + i, load(row + i), strip.block_in - i, strip.add);
      }
    }
  }
}

template <class E>
void sampled_strip(const SampledStrip& strip) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  const int64_t vectors = (strip.blocks * strip.padded_in + n - 1) / n, row = vectors * n;
  if constexpr (std::is_same_v<Sum, typename E::Storage>) {
    // Blocks of whole vectors are written by the tiles, which do not wait for the cache lines of the values.
    if (strip.block_in % n == 0 && strip.steps > 0) {
      const int64_t vector = strip.blocks > 1 ? strip.block_out * n : n;
      return multiply_strip<E, Gather::kVectors>(strip, vectors, strip.add, static_cast<Sum*>(strip.values),
                                                 strip.block_in, vector);
    }
  }
  // One more vector than the sums, since the last pieces of the last row are read as whole vectors.
  const int64_t size = (strip.block_out * row + n) * int64_t(sizeof(Sum));
  Sum* sums = static_cast<Sum*>(scratch(Scratch::kSums, size));
  if (strip.steps == 0) {
    memset(sums, 0, size);
#if defined(BLOCKSPARSE_TILES)
  } else if (E::kPack == 2 && fills_tiles(strip.block_out)) {
    sample_on_tiles(strip, reinterpret_cast<float*>(sums), row);
#endif
  } else {
    const int blocks = blocks_in_vector<E>(strip.block_in);
    if (blocks == 1) multiply_strip<E, Gather::kVectors>(strip, vectors, false, sums, row, n);
    if constexpr (n >= 4) {
      if (blocks == 2) multiply_strip<E, Gather::kHalves>(strip, vectors, false, sums, row, n);
    }
    if constexpr (n >= 8) {
      if (blocks == 4) multiply_strip<E, Gather::kQuarters>(strip, vectors, false, sums, row, n);
    }
  }
  write_strip<E>(strip, sums, row);
}

template <class E>
constexpr LinearKernels table(int max_vectors) {
  return {E::kPack,
          kLanes<typename E::Sum>,
          max_vectors,
          sizeof(typename E::Unit),
          pack_panel<E>,
          row_piece<E>,
          write_outputs<E>,
          pack_block_columns<E>,
          padded_in<E>,
          strip<E>,
          sampled_strip<E>,
          copies_for_few_tokens<E>,
          few_tokens_piece<E>,
          tile_depth<E>,
          turn<E>};
}

}  // namespace

const LinearKernels& select_linear(DType dtype, int64_t block_sum) {
#if defined(BLOCKSPARSE_PAIRS)
  // Panels of pairs take half the space, so they are wider: the transposed product pairs its weights once per panel.
#if defined(BLOCKSPARSE_TILES)
  static constexpr LinearKernels pairs = table<BFloat16Pairs>(kPanelTiles);
#else
  static constexpr LinearKernels pairs = table<BFloat16Pairs>(2 * kTileVectors);
#endif
  return dtype == DType::kBFloat16 && block_sum % 2 == 0 ? pairs : avx512::select_linear(dtype, block_sum);
#else
  static constexpr LinearKernels float32 = table<Float32>(kTileVectors), float64 = table<Float64>(kTileVectors),
                                 bfloat16 = table<BFloat16>(kTileVectors), float16 = table<Float16>(kTileVectors);
  (void)block_sum;
  return by_dtype(dtype, float32, float64, bfloat16, float16);
#endif
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
