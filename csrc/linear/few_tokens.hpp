// The product for a few tokens, too few to fill a vector: the time is that of reading the weights once.
//
// Forward, lanes are inputs: each output is a dot product over its row of blocks, whose lanes are summed at the end.
// Transposed, lanes are outputs, which are contiguous in the blocks. x is read in place.
#pragma once

#include "core/parallel.hpp"
#include "isa/activation.hpp"
#include "isa/element.hpp"
#include "linear/linear.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

// Tokens whose sums are kept in registers at the same time.
constexpr int kTokensAtOnce = 4;
// Blocks to look ahead when prefetching.
constexpr int64_t kFetchAhead = 2;

// Return how many rows of a block fill a vector of weights: 1 (also if a row fills several vectors), 2 or 4; 0 if the
// block does not fit.
template <class E>
int64_t rows_in_vector(int64_t block_out, int64_t block_sum) {
  constexpr int64_t n = kLanes<typename E::Sum>, numbers = n * E::kPack;
  if (block_sum % numbers == 0) return 1;
  const int64_t rows = numbers / block_sum;
  return (rows == 2 || rows == 4) && rows < n && rows * block_sum == numbers && block_out % rows == 0 ? rows : 0;
}

template <class E>
int64_t few_tokens(int64_t tokens, int64_t block_out, int64_t block_sum, bool transposed) {
  constexpr int64_t n = kLanes<typename E::Sum>;
  if (tokens > n / 2) return 0;  // with more, the panels' lanes of tokens do as well
  return transposed ? block_out % n == 0 : rows_in_vector<E>(block_out, block_sum);
}

// Compute one tile of outputs and tokens over all blocks of the row. A row is `steps` vectors of weights: those of one
// output, or one vector with several outputs of a narrow block.
template <class E, int kRows, int kTokens>
BLOCKSPARSE_INLINE void dot_tile(const RowPiece& piece, const typename E::Storage* values, int64_t steps,
                                 const typename E::Storage* x, typename E::Sum* sums, int64_t sums_token) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>, numbers = n * E::kPack;
  const int64_t row = steps * numbers, block = piece.block_out * piece.block_sum;
  Vector<Sum> sum[kRows][kTokens] = {};
  for (int64_t b = 0; b < piece.blocks; ++b) {
    const auto* w = values + piece.position[b] * block;
    const auto* next = values + piece.position[smaller(b + kFetchAhead, piece.blocks - 1)] * block;
    const auto* in = x + piece.col[b] * row;
    for (int64_t s = 0; s < steps; ++s, w += numbers, next += numbers, in += numbers) {
      Vector<typename E::Unit> units[kTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) units[t] = E::units(in + t * piece.width);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        __builtin_prefetch(next + r * row);
        const Vector<typename E::Unit> weights = E::units(w + r * row);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) sum[r][t] = E::multiply_add_lanes(weights, units[t], sum[r][t]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) store(sums + t * sums_token + r * n, sum[r][t]);
}

template <class E, int kTokens>
void dot_rows(const RowPiece& piece, int64_t rows, int64_t steps, const typename E::Storage* x, typename E::Sum* sums,
              int64_t sums_token) {
  constexpr int n = kLanes<typename E::Sum>, numbers = n * E::kPack;
  constexpr int kMost = kTileRows == 8 ? (kTokens <= 2 ? 8 : 4) : kTokens == 1 ? 8 : kTokens == 2 ? 4 : 2;
  const auto* values = static_cast<const typename E::Storage*>(piece.values) + piece.begin * piece.block_sum;
  int64_t r = 0;
#define BLOCKSPARSE_ROWS(count)         \
  for (; r + count <= rows; r += count) \
  dot_tile<E, count, kTokens>(piece, values + r * steps * numbers, steps, x, sums + r * n, sums_token)
  BLOCKSPARSE_ROWS(kMost);
  if constexpr (kMost > 4) BLOCKSPARSE_ROWS(4);
  if constexpr (kMost > 2) BLOCKSPARSE_ROWS(2);
  BLOCKSPARSE_ROWS(1);
#undef BLOCKSPARSE_ROWS
}

// Sum the lanes of vectors that hold the lanes of `kOutputs` outputs each, in log2(lanes) rounds. If a vector holds
// several outputs, the first rounds only sort. The outputs end up in order.
template <class Sum, int kOutputs>
BLOCKSPARSE_INLINE Vector<Sum> sum_lanes(Vector<Sum>* v) {
  constexpr int n = kLanes<Sum>;
  int count = n / kOutputs;
#pragma GCC unroll 2
  for (int outputs = kOutputs; outputs > 1; outputs /= 2) {
    Vector<Sum> w[n];
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; ++i)
      interleave(v[i], v[i + count / 2], w[2 * i], w[2 * i + 1], std::make_index_sequence<n>{});
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) v[i] = w[i];
  }
#pragma GCC unroll 4
  for (; count > 1; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; ++i) {
      Vector<Sum> low, high;
      interleave(v[i], v[i + count / 2], low, high, std::make_index_sequence<n>{});
      v[i] = low + high;
    }
  }
  return v[0];
}

// Compute one tile of outputs and tokens of the transposed product. Odd steps have sums of their own, since a few sums
// would wait for each other. This holds for any number of tokens, so that the bits of a token do not depend on it.
template <class E, int kVectors, int kTokens>
BLOCKSPARSE_INLINE void spread_tile(const RowPiece& piece, const typename E::Storage* values,
                                    const typename E::Storage* x, typename E::Sum* sums, int64_t sums_token) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>, kParts = 2;
  const int64_t block = piece.block_out * piece.block_sum;
  Vector<Sum> sum[kParts][kVectors][kTokens] = {};
  const auto step = [&](int part, const typename E::Storage* w,
                        const typename E::Storage* in) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Vector<typename E::Unit> weights = E::units(w + v * n);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t)
        sum[part][v][t] = E::multiply_add(E::to_sum(in[t * piece.width]), weights, sum[part][v][t]);
    }
  };
  for (int64_t b = 0; b < piece.blocks; ++b) {
    const auto* w = values + piece.position[b] * block;
    const auto* next = values + piece.position[smaller(b + kFetchAhead, piece.blocks - 1)] * block;
    const auto* in = x + piece.col[b] * piece.block_sum;
    int64_t k = 0;
    for (; k + kParts <= piece.block_sum; k += kParts) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) __builtin_prefetch(next + (k + part) * piece.block_out + v * n);
        step(part, w + (k + part) * piece.block_out, in + k + part);
      }
    }
    for (; k < piece.block_sum; ++k) step(0, w + k * piece.block_out, in + k);
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      Vector<Sum> all = sum[0][v][t];
#pragma GCC unroll 4
      for (int part = 1; part < kParts; ++part) all += sum[part][v][t];
      store(sums + t * sums_token + v * n, all);
    }
}

template <class E, int kTokens>
void spread_outputs(const RowPiece& piece, const typename E::Storage* x, typename E::Sum* sums, int64_t sums_token) {
  constexpr int n = kLanes<typename E::Sum>;
  const auto* values = static_cast<const typename E::Storage*>(piece.values) + piece.begin;
  const int64_t outputs = piece.end - piece.begin;
  int64_t o = 0;
  if constexpr (kTileRows == 8)  // the registers suffice
    for (; o + 2 * n <= outputs; o += 2 * n) spread_tile<E, 2, kTokens>(piece, values + o, x, sums + o, sums_token);
  for (; o < outputs; o += n) spread_tile<E, 1, kTokens>(piece, values + o, x, sums + o, sums_token);
}

// Write the sums of one token to y with bias and activation. `outputs_of(o, count)` returns those of the outputs from o
// on.
template <class E, class OutputsOf>
BLOCKSPARSE_INLINE void write_token(const LinearOutputs& outputs, int64_t token, const OutputsOf& outputs_of) {
  const auto* bias = static_cast<const typename E::Storage*>(outputs.bias);
  auto* y = static_cast<typename E::Storage*>(outputs.y) + token * outputs.y_stride;
  in_vectors<E>(0, outputs.count, [&](int64_t o, int64_t count) {
    Vector<typename E::Sum> v = outputs_of(o, count);
    if (bias) v += read_units<E>(bias + o, count);
    if (outputs.activation != Activation::kNone) v = activated(v, outputs.activation);
    write_sums<E>(y + o, v, count, false);
  });
}

template <class E, int kOutputs>
void write_dots(const LinearOutputs& outputs, typename E::Sum* sums, int64_t sums_token) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  for (int64_t t = 0; t < outputs.tokens; ++t)
    write_token<E>(outputs, t, [&](int64_t o, int64_t count) {
      Vector<Sum> v[n];
      for (int i = 0; i < n / kOutputs; ++i)
        v[i] = i * kOutputs < count ? load(sums + t * sums_token + (o / kOutputs + i) * n) : Vector<Sum>{};
      return sum_lanes<Sum, kOutputs>(v);
    });
}

// Call run(std::integral_constant<int, count>, first) for a few tokens at a time.
template <class Run>
BLOCKSPARSE_INLINE void tokens_at_once(int64_t tokens, const Run& run) {
  static_assert(kTokensAtOnce == 4, "one case for each rest");
  int64_t t = 0;
  for (; t + 4 <= tokens; t += 4) run(std::integral_constant<int, 4>{}, t);
  if (tokens - t == 3) run(std::integral_constant<int, 3>{}, t);
  if (tokens - t == 2) run(std::integral_constant<int, 2>{}, t);
  if (tokens - t == 1) run(std::integral_constant<int, 1>{}, t);
}

// The element type whose vectors hold as many elements as vectors of sums.
template <class E>
struct SingleOf {
  using type = E;
};
#if defined(BLOCKSPARSE_PAIRS)
template <>
struct SingleOf<BFloat16Pairs> {
  using type = BFloat16;
};
#endif

// `piece.panel` is x [tokens, features] or its repeated copy; `piece.width` is the distance between tokens in elements.
template <class E>
void few_tokens_piece(const RowPiece& piece, const LinearOutputs& outputs) {
  using Sum = typename E::Sum;
  using Single = typename SingleOf<E>::type;
  constexpr int n = kLanes<Sum>;
  const int64_t tokens = outputs.tokens, count = outputs.count;
  const auto* x = static_cast<const typename E::Storage*>(piece.panel);
  if (piece.transposed) {
    Sum* sums = static_cast<Sum*>(scratch(Scratch::kSums, tokens * count * int64_t(sizeof(Sum))));
    tokens_at_once(tokens, [&](auto at_once, int64_t t) {
      spread_outputs<Single, decltype(at_once)::value>(piece, x + t * piece.width, sums + t * count, count);
    });
    for (int64_t t = 0; t < tokens; ++t)
      write_token<Single>(outputs, t, [&](int64_t o, int64_t) { return load(sums + t * count + o); });
    return;
  }
  const int64_t in_vector = rows_in_vector<E>(piece.block_out, piece.block_sum), rows = count / in_vector;
  const int64_t steps = in_vector == 1 ? piece.block_sum / (n * E::kPack) : 1;
  Sum* sums = static_cast<Sum*>(scratch(Scratch::kSums, tokens * rows * n * int64_t(sizeof(Sum))));
  tokens_at_once(tokens, [&](auto at_once, int64_t t) {
    dot_rows<E, decltype(at_once)::value>(piece, rows, steps, x + t * piece.width, sums + t * rows * n, rows * n);
  });
  if (in_vector == 1) write_dots<Single, 1>(outputs, sums, rows * n);
  if constexpr (n >= 4) {
    if (in_vector == 2) write_dots<Single, 2>(outputs, sums, rows * n);
    if (in_vector == 4) write_dots<Single, 4>(outputs, sums, rows * n);
  }
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
