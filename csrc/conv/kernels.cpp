// Convolutions for one instruction set (BLOCKSPARSE_ISA).
//
// The register tile is that of the linear products with exchanged roles: rows are positions along one axis of an image,
// which is read in place at a constant stride, and lanes are outputs. Nothing is unfolded, padded or transposed; each
// tap only changes an address. (On AMX tiles most convolutions read copies with borders, see tiles_driver.cpp.)
#include "conv/conv.hpp"
#include "core/parallel.hpp"
#include "isa/activation.hpp"
#include "isa/amx.hpp"
#include "isa/element.hpp"
#include "isa/tile.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

// Units summed at a time: their weights stay in the L1 cache for all positions.
constexpr int64_t kConvGroup = 128;

template <class E>
void convert(const void* from, int64_t count, void* to) {
  using Storage = typename E::Storage;
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  if constexpr (E::kPack == 1) {
    const Storage* x = static_cast<const Storage*>(from);
    Sum* y = static_cast<Sum*>(to);
    int64_t i = 0;
    for (; i + n <= count; i += n) store(y + i, E::units(x + i));
    for (; i < count; ++i) y[i] = E::to_sum(x[i]);
  } else {
    memcpy(to, from, count * sizeof(Storage));
  }
}

template <class E>
typename E::Unit unit_of(const typename E::Storage* from, int64_t next) {
  if constexpr (E::kPack == 1) {
    (void)next;
    return E::to_sum(*from);
  } else {
    return typename E::Unit(from[0]) | typename E::Unit(from[next]) << 16;
  }
}

template <class E>
void pack_block(const PackedBlock& block) {
  using Unit = typename E::Unit;
  const typename E::Storage* from = static_cast<const typename E::Storage*>(block.from);
  Unit* to = static_cast<Unit*>(block.to);
  const int64_t sum_step = block.transposed ? block.lanes * block.taps : block.taps;
  const int64_t lane_step = block.transposed ? block.taps : block.sum * block.taps;
  const int64_t steps = block.sum / E::kPack, tap_units = steps * block.padded;
  for (int64_t k = 0; k < steps; ++k) {
    for (int64_t l = 0; l < block.lanes; ++l) {
      const auto* at = from + k * E::kPack * sum_step + l * lane_step;
      Unit* unit = to + k * block.padded + l;
      for (int64_t t = 0; t < block.taps; ++t) unit[t * tap_units] = unit_of<E>(at + t, sum_step);
    }
    for (int64_t t = 0; t < block.taps; ++t)
      for (int64_t l = block.lanes; l < block.padded; ++l) to[t * tap_units + k * block.padded + l] = 0;
  }
}

// -- y = W * x -------------------------------------------------------------------------------------------------------

// Some terms of one class, at all of its positions.
template <class E>
struct ClassTerms {
  using Unit = typename E::Unit;
  const Unit* w[kConvGroup];
  int64_t offset[kConvGroup];  // from a run's input
  int64_t count, begin, end;

  ClassTerms(const ConvPiece& piece, int64_t c, int64_t first, int64_t last)
      : count(last - first), begin(piece.class_begin[c]), end(piece.class_end[c]) {
    const int64_t start = piece.class_start[c], taps = piece.class_start[c + 1] - start;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = (first + i) / taps, tap = start + (first + i) % taps;
      w[i] = static_cast<const Unit*>(piece.weights) +
             (block * piece.all_taps + piece.tap[tap]) * piece.steps * piece.padded;
      offset[i] = piece.at[tap] + piece.col[block] * piece.steps;
    }
  }
};

// Prefetch share number `part` of `parts` of the next lines. Too many prefetches at once would wait for each other.
template <class E>
void fetch_next(const ConvPiece& piece, int64_t part, int64_t parts) {
  const int64_t lines = piece.next_lines, count = piece.next_blocks * lines, end = count * (part + 1) / parts;
  for (int64_t i = count * part / parts; i < end;) {
    const int64_t block = i / lines, last = smaller(end, (block + 1) * lines);
    const char* x = static_cast<const char*>(piece.x) + piece.next_col[block] * piece.steps * sizeof(typename E::Unit);
    for (; i < last; ++i) __builtin_prefetch(x + piece.next[i - block * lines]);
  }
}

// Called when the sums of a run are ready, so that its stores overlap with the products of the next run.
template <class E>
void write_run(const ConvPiece& piece, int64_t run, const typename E::Sum* sums) {
  using Sum = typename E::Sum;
  using Storage = typename E::Storage;
  constexpr int n = kLanes<Sum>;
  const Storage* bias = static_cast<const Storage*>(piece.bias);
  for (int64_t o = 0; o < piece.outputs; o += n) {
    const int64_t wide = smaller<int64_t>(n, piece.outputs - o);
    Vector<Sum> shift = {};
    if (bias)
      for (int64_t i = 0; i < wide; ++i) shift[i] = E::to_sum(bias[o + i]);
    const Sum* from = sums + o;
    Storage* to = static_cast<Storage*>(piece.y) + piece.output[run] + o;
    for (int64_t p = 0; p < piece.length; ++p, from += piece.padded, to += piece.output_step) {
      Vector<Sum> v = load(from);
      if (bias) v = v + shift;
      if (piece.activation != Activation::kNone) v = activated(v, piece.activation);
      if (wide == n && piece.streams && sizeof *to == sizeof v[0]) {
        stream(to, v);
      } else if (wide == n) {
        E::store_sums(to, v);
      } else {
        write_sums<E>(to, v, wide, false);
      }
    }
  }
}

template <class E>
void multiply_runs(const ConvPiece& piece, const ClassTerms<E>& terms, int64_t part, int64_t parts, bool add,
                   typename E::Sum* sums) {
  using Unit = typename E::Unit;
  const Unit* x = static_cast<const Unit*>(piece.x) + terms.begin * piece.input_step;
  const Unit* in[kConvGroup];
  for (int64_t r = 0; r < piece.runs; ++r) {
    fetch_next<E>(piece, part * piece.runs + r, parts * piece.runs);
    for (int64_t i = 0; i < terms.count; ++i) in[i] = x + piece.input[r] + terms.offset[i];
    const Terms<E> run = {in, terms.w, int(terms.count), piece.input_step, 1, piece.padded, piece.steps};
    even_tiles<E>(run, piece.padded / kLanes<Unit>, terms.end - terms.begin, add,
                  sums + (r * piece.length + terms.begin) * piece.padded, piece.padded);
    if (part + 1 == parts) write_run<E>(piece, r, sums + r * piece.length * piece.padded);
  }
}

#if defined(BLOCKSPARSE_TILES)
// Some terms of a class at the positions of a run, and outputs from `column` on.
template <class E>
struct RunTerms {
  static constexpr int64_t kLines = 0;
  const uint32_t* x;
  const ClassTerms<E>& terms;
  int64_t column, count, steps, a_row, a_step, a_below, b_row, b_step, b_beside;

  const uint32_t* a(int64_t t) const { return x + terms.offset[t]; }
  const uint32_t* b(int64_t t) const { return terms.w[t] + column; }
};

// Whole tiles of all runs come first, since changing the height of tiles is slow.
template <class E>
void multiply_runs_on_tiles(const ConvPiece& piece, const ClassTerms<E>& terms, bool add, float* sums) {
  const uint32_t* x = static_cast<const uint32_t*>(piece.x);
  const int64_t depth = smaller(kTile, piece.steps), whole = terms.begin + (terms.end - terms.begin) / kTile * kTile;
  for (int64_t first = terms.begin; first < terms.end; first = first < whole ? whole : terms.end) {
    const int64_t rows = (first < whole ? whole : terms.end) - first;
    configure_tiles(smaller(kTile, rows), depth, kTile);
    for (int64_t r = 0; r < piece.runs; ++r) {
      float* const to = sums + (r * piece.length + first) * piece.padded;
      for (int64_t c = 0; c < piece.padded; c += 2 * kTile) {
        float* const at[2] = {to + c, to + c + kTile};
        const RunTerms<E> run = {x + piece.input[r] + first * piece.input_step,
                                 terms,
                                 c,
                                 terms.count,
                                 piece.steps / depth,
                                 piece.input_step,
                                 depth,
                                 kTile * piece.input_step,
                                 piece.padded,
                                 depth * piece.padded,
                                 kTile};
        tile_columns(run, ceil_div(rows, kTile), c + kTile < piece.padded ? 2 : 1, add, at, piece.padded);
      }
    }
  }
}
#endif

template <class E>
void multiply_piece(const ConvPiece& piece, typename E::Sum* sums) {
  const int64_t most = piece.steps < kConvGroup ? kConvGroup / piece.steps : 1;
  for (int64_t c = 0; c < piece.classes; ++c) {
    const int64_t terms = piece.blocks * (piece.class_start[c + 1] - piece.class_start[c]);
    const int64_t groups = ceil_div(terms, most);
    for (int64_t g = 0; g < groups; ++g) {
      const ClassTerms<E> some(piece, c, terms * g / groups, terms * (g + 1) / groups);
      const bool add = c > 0 || g > 0 || !piece.covered;
#if defined(BLOCKSPARSE_TILES)
      if constexpr (E::kPack == 2) {
        if (fills_tiles(piece.steps)) {
          fetch_next<E>(piece, c * groups + g, piece.classes * groups);
          multiply_runs_on_tiles<E>(piece, some, add, sums);
          if (c + 1 == piece.classes && g + 1 == groups)
            for (int64_t r = 0; r < piece.runs; ++r) write_run<E>(piece, r, sums + r * piece.length * piece.padded);
          continue;
        }
      }
#endif
      multiply_runs<E>(piece, some, c * groups + g, piece.classes * groups, add, sums);
    }
  }
}

#if defined(BLOCKSPARSE_TILES)
// The terms of a row at the positions from `first` on, and outputs from `column` on.
struct BorderedTerms {
  static constexpr int64_t kLines = 0;
  const uint32_t *x, *weights;
  const int64_t *input, *weight;
  int64_t count, steps, a_row, a_step, a_below, b_row, b_step, b_beside;

  BorderedTerms(const BorderedPiece& piece, int64_t first, int64_t column, int64_t depth)
      : x(static_cast<const uint32_t*>(piece.x) + first * piece.x_step),
        weights(static_cast<const uint32_t*>(piece.weights) + column),
        input(piece.input),
        weight(piece.weight),
        count(piece.terms),
        steps(piece.steps / depth),
        a_row(piece.x_step),
        a_step(depth),
        a_below(kTile * piece.x_step),
        b_row(piece.outputs),
        b_step(depth * piece.outputs),
        b_beside(kTile) {}

  const uint32_t* a(int64_t t) const { return x + input[t]; }
  const uint32_t* b(int64_t t) const { return weights + weight[t]; }
};

void bordered_piece(const BorderedPiece& piece) {
  float* sums = static_cast<float*>(piece.sums);
  if (piece.terms == 0) {
    for (int64_t p = 0; p < piece.positions; ++p) memset(sums + p * piece.sums_row, 0, piece.outputs * sizeof *sums);
    return;
  }
  const int64_t depth = smaller(kTile, piece.steps);
  configure_tiles(kTile, depth, kTile);
  for (int64_t c = 0; c < piece.outputs; c += 2 * kTile)
    for (int64_t p = 0; p < piece.positions; p += 2 * kTile) {
      float* const left = sums + p * piece.sums_row + c;
      float* const to[2] = {left, left + kTile};
      tile_columns(BorderedTerms(piece, p, c, depth), smaller<int64_t>(2, (piece.positions - p) / kTile),
                   c + kTile < piece.outputs ? 2 : 1, false, to, piece.sums_row);
    }
}

void write_positions(const PositionOutputs& outputs) {
  const auto* bias = static_cast<const uint16_t*>(outputs.bias);
  const auto* sums = static_cast<const float*>(outputs.sums);
  for (int64_t p = 0; p < outputs.positions; ++p, sums += outputs.sums_row) {
    if (outputs.at[p] < 0) continue;
    auto* y = static_cast<uint16_t*>(outputs.y) + outputs.at[p];
    const auto finished = [&](int64_t o) __attribute__((always_inline)) {
      Vector<float> v = load(sums + o);
      if (bias) v = v + BFloat16Bits::widen(bias + o);
      return activated(v, outputs.activation);
    };
    int64_t o = 0;
    for (; o + 2 * kTile <= outputs.outputs; o += 2 * kTile) {
      const Vector<uint32_t> line = BFloat16Pairs::joined(finished(o), finished(o + kTile));
      if (outputs.streams)
        stream(y + o, line);
      else
        memcpy(y + o, &line, sizeof line);
    }
    if (o < outputs.outputs) BFloat16Pairs::store_sums(y + o, finished(o));
  }
}
constexpr auto kBorderedPiece = bordered_piece;
constexpr auto kWritePositions = write_positions;
#else
constexpr decltype(ConvKernels::bordered_piece) kBorderedPiece = nullptr;
constexpr decltype(ConvKernels::write_positions) kWritePositions = nullptr;
#endif

template <class E>
void conv_piece(const ConvPiece& piece) {
  using Sum = typename E::Sum;
  const bool multiplies = piece.blocks > 0 && piece.classes > 0;
  const int64_t size = (multiplies ? piece.runs : 1) * piece.length * piece.padded * int64_t(sizeof(Sum));
  Sum* sums = static_cast<Sum*>(scratch(Scratch::kSums, size));
  if (!multiplies || !piece.covered) memset(sums, 0, size);
  if (multiplies) return multiply_piece<E>(piece, sums);
  fetch_next<E>(piece, 0, 1);
  for (int64_t r = 0; r < piece.runs; ++r) write_run<E>(piece, r, sums);
}

// -- the gradient of the values
// ----------------------------------------------------------------------------------------

template <class E>
void sample(const SampledRows& rows) {
  if constexpr (E::kPack == 1) {
    using Unit = typename E::Unit;
    const Terms<E> terms = {reinterpret_cast<const Unit* const*>(rows.left),
                            reinterpret_cast<const Unit* const*>(rows.right),
                            int(rows.count),
                            1,
                            rows.left_step,
                            rows.right_step,
                            rows.steps};
    constexpr int n = kLanes<Unit>;
    typename E::Sum* sums = static_cast<typename E::Sum*>(rows.sums);
    const int64_t vectors = rows.padded / n, columns = ceil_div(vectors, kTileVectors);
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t first = vectors * c / columns, here = vectors * (c + 1) / columns - first;
      column_of_tiles<E, Gather::kTerm>(terms, here, first * n, rows.rows, true, sums + first * n, rows.padded);
    }
  }
}

template <class E>
void unpack_block(const UnpackedBlock& block) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  Sum* sums = static_cast<Sum*>(block.sums);
  for (int64_t slice = 1; slice < block.slices; ++slice)
    for (int64_t i = 0; i < block.taps * block.rows * block.padded; i += n)
      store(sums + i, load(sums + i) + load(sums + slice * block.slice + i));
  typename E::Storage* to = static_cast<typename E::Storage*>(block.to);
  const int64_t outer = block.swapped ? block.lanes : block.rows, inner = block.swapped ? block.rows : block.lanes;
  const int64_t outer_step = block.swapped ? 1 : block.padded, inner_step = block.swapped ? block.padded : 1;
  const int64_t tap_step = block.rows * block.padded;
  Sum part[n];
  int64_t filled = 0;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t i = 0; i < inner; ++i)
      for (int64_t t = 0; t < block.taps; ++t) {
        part[filled++] = sums[t * tap_step + o * outer_step + i * inner_step];
        if (filled < n) continue;
        E::store_sums(to, load(part));
        to += n;
        filled = 0;
      }
  if (filled) {
    for (int64_t i = filled; i < n; ++i) part[i] = 0;
    write_sums<E>(to, load(part), filled, false);
  }
}

template <class E>
constexpr ConvKernels table() {
  return {E::kPack,
          kLanes<typename E::Sum>,
          sizeof(typename E::Unit),
          sizeof(typename E::Sum),
          E::kConvertsWeights,
          convert<E>,
          pack_block<E>,
          conv_piece<E>,
          kBorderedPiece,
          kWritePositions,
          sample<E>,
          unpack_block<E>};
}

}  // namespace

const ConvKernels& select_conv(DType dtype, int64_t block_sum) {
#if defined(BLOCKSPARSE_PAIRS)
  static constexpr ConvKernels pairs = table<BFloat16Pairs>();
  return dtype == DType::kBFloat16 && block_sum % 2 == 0 ? pairs : avx512::select_conv(dtype, block_sum);
#else
  static constexpr ConvKernels float32 = table<Float32>(), float64 = table<Float64>(), bfloat16 = table<BFloat16>(),
                               float16 = table<Float16>();
  (void)block_sum;
  return by_dtype(dtype, float32, float64, bfloat16, float16);
#endif
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
