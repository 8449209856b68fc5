// Attention for one instruction set. Scores are computed for a few queries and a group of key blocks at a time, so that
// they stay in the caches.
#include <math.h>

#include "attention/attention.hpp"
#include "core/parallel.hpp"
#include "isa/activation.hpp"
#include "isa/tile.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

// Keys per group (backward by columns: queries per group).
constexpr int64_t kGroup = 256;

template <class Real>
constexpr Real kNothing = -__builtin_inf();  // the score of an invisible key

// sums[rows, width] = (or += with `add`) the sum over terms of w[rows, ...] x[..., width].
template <class Real>
void multiply(const Terms<Plain<Real>>& terms, int64_t rows, int64_t width, bool add, Real* sums, int64_t sums_row) {
  constexpr int n = kLanes<Real>;
  const int64_t vectors = width / n, columns = ceil_div(vectors, kTileVectors);
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t first = vectors * c / columns, here = vectors * (c + 1) / columns - first;
    column_of_tiles<Plain<Real>, Gather::kStream>(terms, here, first * n, rows, add, sums + first * n, sums_row);
  }
}

template <class Real>
Terms<Plain<Real>> terms_of(const Real* const* w, const Real* const* x, int64_t count, int64_t w_row, int64_t w_step,
                            int64_t x_step, int64_t steps) {
  return {w, x, int(count), w_row, w_step, x_step, steps, nullptr, nullptr, 0, 0, 0};
}

// sums[rows, padded] = w[rows, features] x[features, padded].
template <class Real>
void multiply_block(const Real* w, const Real* x, int64_t rows, int64_t features, int64_t padded, Real* sums,
                    int64_t sums_row) {
  multiply<Real>(terms_of<Real>(&w, &x, 1, features, 1, padded, features), rows, padded, false, sums, sums_row);
}

// Set the scores of invisible keys: padding behind the end of a block and, if causal, later keys.
template <class Real>
void hide(Real* scores, int64_t stride, int64_t first_query, int64_t queries, int64_t first_key, int64_t block,
          int64_t padded, bool causal) {
  const bool crosses = causal && first_key + block - 1 > first_query;
  if (!crosses && block == padded) return;
  for (int64_t r = 0; r < queries; ++r) {
    const int64_t seen = crosses ? smaller(block, first_query + r - first_key + 1) : block;
    for (int64_t j = seen < 0 ? 0 : seen; j < padded; ++j) scores[r * stride + j] = kNothing<Real>;
  }
}

// Replace each score by its exponential, and those of invisible keys by 0.
template <class Real>
BLOCKSPARSE_INLINE Vector<Real> power(const Real* score, Real shift) {
  const Vector<Real> s = load(score);
  return s == kNothing<Real> ? Vector<Real>{} : exponential(s - shift);
}

template <class Real>
Real sum_of(Vector<Real> v) {
  Real sum = 0;
  for (int i = 0; i < kLanes<Real>; ++i) sum += v[i];
  return sum;
}

// Count the blocks before the first one whose keys all come after the last query.
int64_t seen_blocks(const AttentionQueries& queries, int64_t block, bool causal) {
  int64_t count = queries.blocks;
  while (causal && count > 0 && queries.col[count - 1] * block >= queries.last) --count;
  return count;
}

template <class Real>
void forward(const AttentionForward& a, const AttentionQueries& queries) {
  constexpr int n = kLanes<Real>;
  const int64_t count = queries.last - queries.first, blocks = seen_blocks(queries, a.block, a.causal);
  const int64_t group = a.block < kGroup ? kGroup / a.block : 1, stride = group * a.padded;
  const Real* q = static_cast<const Real*>(a.q) + queries.first * a.d;
  Real* scores = static_cast<Real*>(scratch(Scratch::kSums, count * stride * int64_t(sizeof(Real))));
  Real* largest = static_cast<Real*>(scratch(Scratch::kWeights, 2 * count * int64_t(sizeof(Real))));
  Real *sum = largest + count, *y = static_cast<Real*>(a.y) + queries.first * a.d_v;
  for (int64_t r = 0; r < count; ++r) largest[r] = kNothing<Real>, sum[r] = 0;
  for (int64_t b = 0; b < blocks; b += group) {
    const int64_t here = smaller(group, blocks - b), width = here * a.padded;
    const Real *w[kGroup], *x[kGroup];
    for (int64_t i = 0; i < here; ++i) {
      const int64_t col = queries.col[b + i];
      multiply_block(q, static_cast<const Real*>(a.k) + col * a.d * a.padded, count, a.d, a.padded,
                     scores + i * a.padded, stride);
      hide(scores + i * a.padded, stride, queries.first, count, col * a.block, a.block, a.padded, a.causal);
      w[i] = scores + i * a.padded, x[i] = static_cast<const Real*>(a.v) + col * a.block * a.d_v;
    }
    for (int64_t r = 0; r < count; ++r) {
      Real* of_query = scores + r * stride;
      Vector<Real> most = load(of_query);
      for (int64_t j = n; j < width; j += n) {
        const Vector<Real> s = load(of_query + j);
        most = s > most ? s : most;
      }
      Real shift = largest[r];
      for (int i = 0; i < n; ++i) shift = most[i] > shift ? most[i] : shift;
      Vector<Real> all = {};
      for (int64_t j = 0; j < width; j += n) {
        const Vector<Real> p = power(of_query + j, shift);
        store(of_query + j, p);
        all += p;
      }
      // Rescale the sums that were computed with a smaller shift.
      const Real before = largest[r] == kNothing<Real> ? 0 : exponential(broadcast(largest[r] - shift))[0];
      if (b > 0 && before != 1)
        for (int64_t j = 0; j < a.d_v; j += n) store(y + r * a.d_v + j, load(y + r * a.d_v + j) * before);
      sum[r] = sum[r] * before + sum_of<Real>(all), largest[r] = shift;
    }
    multiply<Real>(terms_of<Real>(w, x, here, stride, 1, a.d_v, a.block), count, a.d_v, b > 0, y, a.d_v);
  }
  Real* log_sum = static_cast<Real*>(a.log_sum) + queries.first;
  for (int64_t r = 0; r < count; ++r) {
    const bool nothing = largest[r] == kNothing<Real> && sum[r] == 0;
    for (int64_t j = 0; j < a.d_v; j += n)
      store(y + r * a.d_v + j, nothing ? Vector<Real>{} : load(y + r * a.d_v + j) / sum[r]);
    log_sum[r] = nothing ? 0 : largest[r] + ::log(sum[r]);
  }
}

// Turn scores into attention weights, and gradients of the weights into gradients of the scores.
template <class Real>
void back_through_softmax(Real* scores, Real* grads, int64_t width, Real log_sum, Real delta) {
  for (int64_t j = 0; j < width; j += kLanes<Real>) {
    const Vector<Real> p = power(scores + j, log_sum);
    store(scores + j, p);
    store(grads + j, p * (load(grads + j) - delta));
  }
}

template <class Real>
void backward_rows(const AttentionBackward& a, const AttentionQueries& queries) {
  const int64_t count = queries.last - queries.first, blocks = seen_blocks(queries, a.block_k, a.causal);
  const int64_t group = a.block_k < kGroup ? kGroup / a.block_k : 1, stride = group * a.padded;
  const int64_t bytes = count * stride * int64_t(sizeof(Real));
  const Real* q = static_cast<const Real*>(a.q) + queries.first * a.d;
  const Real* grad = static_cast<const Real*>(a.grad) + queries.first * a.d_v;
  Real *scores = static_cast<Real*>(scratch(Scratch::kSums, bytes)),
       *grads = static_cast<Real*>(scratch(Scratch::kGradients, bytes)),
       *grad_q = static_cast<Real*>(a.grad_q) + queries.first * a.d;
  if (blocks == 0) memset(grad_q, 0, count * a.d * sizeof(Real));
  for (int64_t b = 0; b < blocks; b += group) {
    const int64_t here = smaller(group, blocks - b);
    const Real *w[kGroup], *x[kGroup];
    for (int64_t i = 0; i < here; ++i) {
      const int64_t col = queries.col[b + i];
      multiply_block(q, static_cast<const Real*>(a.k_turned) + col * a.d * a.padded, count, a.d, a.padded,
                     scores + i * a.padded, stride);
      multiply_block(grad, static_cast<const Real*>(a.v_turned) + col * a.d_v * a.padded, count, a.d_v, a.padded,
                     grads + i * a.padded, stride);
      hide(scores + i * a.padded, stride, queries.first, count, col * a.block_k, a.block_k, a.padded, a.causal);
      w[i] = grads + i * a.padded, x[i] = static_cast<const Real*>(a.k) + col * a.block_k * a.d;
    }
    for (int64_t r = 0; r < count; ++r)
      back_through_softmax(scores + r * stride, grads + r * stride, here * a.padded,
                           static_cast<const Real*>(a.log_sum)[queries.first + r],
                           static_cast<const Real*>(a.delta)[queries.first + r]);
    multiply<Real>(terms_of<Real>(w, x, here, stride, 1, a.d, a.block_k), count, a.d, b > 0, grad_q, a.d);
  }
}

template <class Real>
void backward_column(const AttentionBackward& a, const AttentionKeys& keys) {
  // Take a few queries of a long block at a time, or several short blocks.
  const int64_t queries = smaller(a.block_q, kGroup), parts = ceil_div(a.block_q, queries);
  const int64_t group = parts > 1 ? 1 : kGroup / a.block_q, part_size = queries * a.padded;
  const int64_t first_key = keys.col * a.block_k, bytes = group * part_size * int64_t(sizeof(Real));
  const Real* k = static_cast<const Real*>(a.k_turned) + keys.col * a.d * a.padded;
  const Real* v = static_cast<const Real*>(a.v_turned) + keys.col * a.d_v * a.padded;
  Real* scores = static_cast<Real*>(scratch(Scratch::kSums, bytes));
  Real* grads = static_cast<Real*>(scratch(Scratch::kGradients, bytes));
  Real* grad_k = static_cast<Real*>(a.grad_k) + first_key * a.d;
  Real* grad_v = static_cast<Real*>(a.grad_v) + first_key * a.d_v;
  int64_t first = 0;  // queries that all come before the keys see none of them
  while (a.causal && first < keys.blocks && (keys.row[first] + 1) * a.block_q <= first_key) ++first;
  if (first == keys.blocks) {
    memset(grad_k, 0, a.block_k * a.d * sizeof(Real));
    memset(grad_v, 0, a.block_k * a.d_v * sizeof(Real));
  }
  for (int64_t p = first * parts; p < keys.blocks * parts; p += group) {
    const int64_t here = smaller(group, keys.blocks * parts - p), start = p % parts * queries;
    const int64_t count = smaller(queries, a.block_q - start);
    const Real *weights[kGroup], *at_scores[kGroup], *q[kGroup], *grad[kGroup];
    for (int64_t i = 0; i < here; ++i) {
      const int64_t query = keys.row[(p + i) / parts] * a.block_q + start;
      Real *s = scores + i * part_size, *g = grads + i * part_size;
      weights[i] = s, at_scores[i] = g;
      q[i] = static_cast<const Real*>(a.q) + query * a.d, grad[i] = static_cast<const Real*>(a.grad) + query * a.d_v;
      multiply_block(q[i], k, count, a.d, a.padded, s, a.padded);
      multiply_block(grad[i], v, count, a.d_v, a.padded, g, a.padded);
      hide(s, a.padded, query, count, first_key, a.block_k, a.padded, a.causal);
      for (int64_t r = 0; r < count; ++r)
        back_through_softmax(s + r * a.padded, g + r * a.padded, a.padded,
                             static_cast<const Real*>(a.log_sum)[query + r],
                             static_cast<const Real*>(a.delta)[query + r]);
    }
    const bool add = p > first * parts;
    multiply<Real>(terms_of<Real>(weights, grad, here, 1, a.padded, a.d_v, count), a.block_k, a.d_v, add, grad_v,
                   a.d_v);
    multiply<Real>(terms_of<Real>(at_scores, q, here, 1, a.padded, a.d, count), a.block_k, a.d, add, grad_k, a.d);
  }
}

template <class Real>
constexpr AttentionKernels table() {
  return {forward<Real>, backward_rows<Real>, backward_column<Real>};
}

}  // namespace

const AttentionKernels& select_attention(DType dtype) {
  static constexpr AttentionKernels float32 = table<float>(), float64 = table<double>();
  return dtype == DType::kFloat64 ? float64 : float32;
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
