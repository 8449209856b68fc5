// The linear products for one instruction set: compiled once for each, with BLOCKSPARSE_ISA naming it.
#include "activation.hpp"
#include "amx.hpp"
#include "element.hpp"
#include "kernels.hpp"
#include "parallel.hpp"
#include "tile.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

// Units of the sum taken together: so many inputs by a panel stay in the L1 cache while all outputs pass by.
constexpr int64_t kSumGroup = 128;
// Steps of a sampled block taken together: its inputs and gradients stay in the L1 cache.
constexpr int64_t kStepGroup = 128;

template <class E>
Vector<typename E::Unit> units_up_to(const typename E::Storage* from, int64_t count) {
  constexpr int64_t whole = kLanes<typename E::Unit> * E::kFold;
  if (count >= whole) return E::units(from);
  typename E::Storage padded[whole] = {};
  if (count > 0) memcpy(padded, from, count * sizeof *from);
  return E::units(padded);
}

// -- packing -------------------------------------------------------------------------------------------------------

template <class E>
void pack_panel(const void* from, int64_t stride, int64_t tokens, int64_t first_unit, int64_t last_unit, int64_t width,
                void* to) {
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
        for (int i = 0; i < n; ++i) v[i] = E::units(x + (t + i) * stride + k * E::kFold);
      } else {
        for (int i = 0; i < n; ++i)
          v[i] = t + i < tokens ? units_up_to<E>(x + (t + i) * stride + k * E::kFold, whole * E::kFold)
                                : Vector<Unit>{};
      }
      transpose<Unit>(v);
      if (whole == n) {
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) store(panel + (k + i) * width + t, v[i]);
      } else {
        for (int i = 0; i < whole; ++i) store(panel + (k + i) * width + t, v[i]);
      }
    }
  }
}

// One step (kFold tokens) of a block's features to units.
template <class E>
void pack_step(const typename E::Storage* const* token, int64_t block, int64_t padded, typename E::Unit* to) {
  using Unit = typename E::Unit;
  constexpr int n = kLanes<Unit>;
  if constexpr (E::kFold == 1) {
    int64_t i = 0;
    for (; i + n <= block; i += n) store(to + i, E::units(token[0] + i));
    if (i < padded) {
      const Vector<Unit> last = units_up_to<E>(token[0] + i, block - i);
      memcpy(to + i, &last, (padded - i) * sizeof(Unit));
    }
  } else {
    for (int64_t i = 0; i < block; ++i) to[i] = Unit(token[0][i]) | Unit(token[1] ? token[1][i] : 0) << 16;
    for (int64_t i = block; i < padded; ++i) to[i] = 0;
  }
}

template <class E>
void pack_block_columns(const BlockColumns& columns, int64_t first_step, int64_t last_step, int64_t first_block,
                        int64_t last_block) {
  using Storage = typename E::Storage;
  using Unit = typename E::Unit;
  const Storage* from = static_cast<const Storage*>(columns.from);
  Unit* to = static_cast<Unit*>(columns.to);
  for (int64_t b = first_block; b < last_block; ++b) {
    for (int64_t s = first_step; s < last_step; ++s) {
      const Storage* token[E::kFold];
      for (int f = 0; f < E::kFold; ++f) {
        const int64_t t = s * E::kFold + f;
        token[f] = t < columns.tokens ? from + t * columns.stride + b * columns.block : nullptr;
      }
      pack_step<E>(token, columns.block, columns.padded, to + b * columns.to_stride + s * columns.padded);
    }
  }
}

// -- y = x W^T -------------------------------------------------------------------------------------------------------

// Where the tile finds a block's weights: output r, step k at [r * row + k * step], relative to the piece's first output.
template <class E>
struct BlockWeights {
  using Unit = typename E::Unit;
  using Storage = typename E::Storage;
  int64_t row, step, block_units;
  Unit* converted;  // room for a group of blocks, or null where the values are used in place

  BlockWeights(const RowPiece& piece, int64_t group) {
    const int64_t sum_units = piece.block_sum / E::kFold;
    row = piece.transposed ? 1 : sum_units;
    step = piece.transposed ? piece.block_out : 1;
    block_units = piece.block_out * sum_units;
    const bool converts = E::kConvertsWeights || (E::kFold > 1 && piece.transposed);
    converted =
        converts ? static_cast<Unit*>(scratch(Scratch::kWeights, group * block_units * int64_t(sizeof(Unit)))) : nullptr;
  }

  const Unit* prepare(const RowPiece& piece, int64_t position, int64_t slot) const {
    const Storage* block =
        static_cast<const Storage*>(piece.values) + position * (piece.block_out * piece.block_sum);
    if (!converted) return reinterpret_cast<const Unit*>(block) + piece.begin * row;
    Unit* to = converted + slot * block_units;
    if constexpr (E::kFold == 1) {
      pack_step<E>(&block, block_units, block_units, to);
    } else {
      for (int64_t k = 0; k < piece.block_sum / E::kFold; ++k) {
        const Storage* pair[2] = {block + 2 * k * piece.block_out, block + (2 * k + 1) * piece.block_out};
        pack_step<E>(pair, piece.block_out, piece.block_out, to + k * piece.block_out);
      }
    }
    return to + piece.begin * row;
  }
};

template <class E>
void multiply_row(const RowPiece& piece, typename E::Sum* sums) {
  using Unit = typename E::Unit;
  const int64_t sum_units = piece.block_sum / E::kFold;
  const int64_t group = sum_units < kSumGroup ? kSumGroup / sum_units : 1;
  const BlockWeights<E> weights(piece, group);
  const Unit* w[kSumGroup];
  const Unit* x[kSumGroup];
  const Unit* panel = static_cast<const Unit*>(piece.panel);
  for (int64_t first = 0; first < piece.blocks; first += group) {
    const int64_t count = smaller(group, piece.blocks - first);
    for (int64_t i = 0; i < count; ++i) {
      w[i] = weights.prepare(piece, piece.position[first + i], i);
      x[i] = panel + piece.col[first + i] * sum_units * piece.width;
    }
    const Terms<E> terms = {w, x, int(count), weights.row, weights.step, piece.width, sum_units};
    tiles(terms, piece.end - piece.begin, piece.width / kLanes<Unit>, first > 0, sums, piece.width);
  }
}

// Sums [outputs, width] to y [tokens, outputs], with bias and activation.
template <class E>
void write_outputs(const RowPiece& piece, typename E::Sum* sums) {
  using Sum = typename E::Sum;
  using Storage = typename E::Storage;
  constexpr int n = kLanes<Sum>;
  const Storage* bias = static_cast<const Storage*>(piece.bias);
  Storage* y = static_cast<Storage*>(piece.y);
  const int64_t outputs = piece.end - piece.begin;
  for (int64_t o = 0; o < outputs; o += n) {
    const int64_t wide = smaller<int64_t>(n, outputs - o);
    for (int64_t t = 0; t < piece.tokens; t += n) {
      const int64_t long_ = smaller<int64_t>(n, piece.tokens - t);
      Vector<Sum> v[n];
      for (int i = 0; i < n; ++i) {
        v[i] = i < wide ? load(sums + (o + i) * piece.width + t) : Vector<Sum>{};
        if (bias && i < wide) v[i] = v[i] + E::to_sum(bias[o + i]);
        if (piece.activation != Activation::kNone && i < wide) v[i] = activated(v[i], piece.activation);
      }
      transpose<Sum>(v);
      for (int i = 0; i < long_; ++i) {
        Storage* to = y + (t + i) * piece.y_stride + o;
        if (wide == n) {
          E::store_sums(to, v[i]);
        } else {
          Storage part[n];
          E::store_sums(part, v[i]);
          memcpy(to, part, wide * sizeof *part);
        }
      }
    }
  }
}

template <class E>
void row_piece(const RowPiece& piece) {
  using Sum = typename E::Sum;
  const int64_t size = (piece.end - piece.begin) * piece.width * int64_t(sizeof(Sum));
  Sum* sums = static_cast<Sum*>(scratch(Scratch::kSums, size));
  if (piece.blocks == 0) {
    memset(sums, 0, size);
  } else {
#if defined(BLOCKSPARSE_TILES)
    if constexpr (E::kFold == 2) {
      if (!multiply_row_on_tiles(piece, sums)) multiply_row<E>(piece, sums);
    } else
#endif
      multiply_row<E>(piece, sums);
  }
  write_outputs<E>(piece, sums);
}

// -- grad^T x on the layout -----------------------------------------------------------------------------------------

template <class E>
void sampled_block(const SampledBlock& block) {
  using Unit = typename E::Unit;
  using Sum = typename E::Sum;
  using Storage = typename E::Storage;
  constexpr int n = kLanes<Sum>;
  const int64_t size = block.block_out * block.padded_in * int64_t(sizeof(Sum));
  Sum* sums = static_cast<Sum*>(scratch(Scratch::kSums, size));
  if (block.steps == 0) memset(sums, 0, size);
#if defined(BLOCKSPARSE_TILES)
  bool done = false;
  if constexpr (E::kFold == 2) done = sample_on_tiles(block, sums);
  if (!done)
#endif
    for (int64_t first = 0; first < block.steps; first += kStepGroup) {
      const Unit* grad = static_cast<const Unit*>(block.grad) + first * block.block_out;
      const Unit* x = static_cast<const Unit*>(block.x) + first * block.padded_in;
      const int64_t steps = smaller(kStepGroup, block.steps - first);
      const Terms<E> terms = {&grad, &x, 1, 1, block.block_out, block.padded_in, steps};
      tiles(terms, block.block_out, block.padded_in / n, first > 0, sums, block.padded_in);
    }
  Storage* values = static_cast<Storage*>(block.values);
  for (int64_t o = 0; o < block.block_out; ++o) {
    for (int64_t i = 0; i < block.block_in; i += n) {
      const int64_t wide = smaller<int64_t>(n, block.block_in - i);
      Storage* to = values + o * block.block_in + i;
      Vector<Sum> v = load(sums + o * block.padded_in + i);
      Storage part[n] = {};
      if (block.add) {
        memcpy(part, to, wide * sizeof *part);
        for (int l = 0; l < n; ++l) v[l] += E::to_sum(part[l]);
      }
      if (wide == n) {
        E::store_sums(to, v);
      } else {
        E::store_sums(part, v);
        memcpy(to, part, wide * sizeof *part);
      }
    }
  }
}

template <class E>
constexpr LinearKernels table(int max_vectors) {
  return {E::kFold,      kLanes<typename E::Sum>, max_vectors,           sizeof(typename E::Unit),
          pack_panel<E>, row_piece<E>,            pack_block_columns<E>, sampled_block<E>};
}

}  // namespace

const LinearKernels& select_linear(DType dtype, int64_t block_sum) {
  static constexpr LinearKernels float32 = table<Float32>(kTileVectors), float64 = table<Float64>(kTileVectors),
                                 bfloat16 = table<BFloat16>(kTileVectors), float16 = table<Float16>(kTileVectors);
#if defined(__AVX512BF16__)
#if defined(BLOCKSPARSE_TILES)
  static constexpr LinearKernels pairs = table<BFloat16Pairs>(kPanelTiles);
#else
  static constexpr LinearKernels pairs = table<BFloat16Pairs>(kTileVectors);
#endif
  if (dtype == DType::kBFloat16 && block_sum % 2 == 0) return pairs;
#endif
  (void)block_sum;
  switch (dtype) {
    case DType::kFloat32:
      return float32;
    case DType::kFloat64:
      return float64;
    case DType::kBFloat16:
      return bfloat16;
    default:
      return float16;
  }
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
