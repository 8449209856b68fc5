// Attention for one instruction set. Scores are computed for a few queries and a group of key blocks at a time, so that
// they stay in the caches.
#include <math.h>

#include "attention/attention.hpp"
#include "attention/few_queries.hpp"
#include "attention/softmax.hpp"
#include "core/parallel.hpp"
#include "isa/tile.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

// Keys per group (backward by columns: queries per group).
constexpr int64_t kGroup = 256;

// sums[rows, width] = (or += with `add`) the sum over terms of w[rows, ...] x[..., width].
template <class Real>
void multiply(const Terms<Plain<Real>>& terms, int64_t rows, int64_t width, bool add, Real* sums, int64_t sums_row) {
  constexpr int n = kLanes<Real>;
  const int64_t vectors = width / n, columns = ceil_div(vectors, kTileVectors);
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t first = vectors * c / columns, here = vectors * (c + 1) / columns - first;
    column_of_tiles<Plain<Real>, Gather::kTerm>(terms, here, first * n, rows, add, sums + first * n, sums_row);
  }
}

template <class Real>
Terms<Plain<Real>> terms_of(const Real* const* w, const Real* const* x, int64_t count, int64_t w_row, int64_t w_step,
                            int64_t x_step, int64_t steps) {
  return {w, x, int(count), w_row, w_step, x_step, steps};
}

// sums[rows, padded] = w[rows, features] x[features, padded].
template <class Real>
void multiply_block(const Real* w, const Real* x, int64_t rows, int64_t features, int64_t padded, Real* sums,
                    int64_t sums_row) {
  multiply<Real>(terms_of<Real>(&w, &x, 1, features, 1, padded, features), rows, padded, false, sums, sums_row);
}

// The keys that several queries see: [first, end) is seen by one of them, [all_first, all_end) by each of them.
struct Extent {
  int64_t first, end, all_first, all_end;

  bool meets(int64_t key, int64_t count) const { return key < end && key + count > first; }
  bool covers(int64_t key, int64_t count) const { return key >= all_first && key + count <= all_end; }
};

Extent extent_of(const AttentionScores& a, int64_t first_query, int64_t last_query) {
  if (!a.start) return {0, a.keys, 0, a.keys};
  Extent all = {a.keys, 0, 0, a.keys};
  for (int64_t i = first_query; i < last_query; ++i) {
    const int64_t start = a.start[i] < 0 ? 0 : a.start[i], end = smaller(int64_t(a.end[i]), a.keys);
    if (start >= end) {
      all.all_end = 0;
      continue;
    }
    all.first = smaller(all.first, start), all.all_end = smaller(all.all_end, end);
    if (end > all.end) all.end = end;
    if (start > all.all_first) all.all_first = start;
  }
  return all;
}

// Set the scores of invisible keys and of the padding behind a block.
template <class Real>
void hide(Real* scores, int64_t stride, const AttentionScores& a, const Extent& extent, int64_t first_query,
          int64_t queries, int64_t first_key, int64_t block, int64_t padded) {
  if (block == padded && extent.covers(first_key, block)) return;
  const int64_t valid = smaller(block, a.keys - first_key);
  for (int64_t r = 0; r < queries; ++r) {
    int64_t from = 0, to = valid;
    if (a.start) {
      const int64_t start = a.start[first_query + r] - first_key, end = a.end[first_query + r] - first_key;
      from = start < 0 ? 0 : smaller(start, padded), to = end < from ? from : smaller(end, valid);
    }
    for (int64_t j = 0; j < from; ++j) scores[r * stride + j] = kNothing<Real>;
    for (int64_t j = to; j < padded; ++j) scores[r * stride + j] = kNothing<Real>;
  }
}

// Scores [queries, padded] of a block of keys, which lie side by side in k.
template <class Real>
void score_block(const AttentionScores& a, const Extent& extent, const Real* q, const Real* k, int64_t first_query,
                 int64_t queries, int64_t first_key, int64_t d, int64_t block, int64_t padded, Real* scores,
                 int64_t stride) {
  multiply_block(q, k, queries, d, padded, scores, stride);
  if (a.softcap != 0)
    for (int64_t r = 0; r < queries; ++r) cap(scores + r * stride, padded, Real(a.softcap));
  hide(scores, stride, a, extent, first_query, queries, first_key, block, padded);
}

// A permutation of 32 bits (Wellons, Prospecting for hash functions, 2018: lowbias32).
BLOCKSPARSE_INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du;
  x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Drop some weights of a query, or their gradients, and scale the others to keep the expectation.
template <class Real>
void drop(Real* weights, int64_t count, const AttentionScores& a, int64_t query, int64_t first_key) {
  const uint32_t of_head = mix(uint32_t(a.seed) ^ mix(uint32_t(a.seed >> 32) + uint32_t(a.head) * 0x9e3779b9u));
  const uint32_t of_query = mix(of_head + uint32_t(query) * 0x85ebca6bu) + uint32_t(first_key) * 0x9e3779b9u;
  const Real scale = Real(4294967296.0 / (4294967296.0 - a.drop_below));
  for (int64_t j = 0; j < count; ++j)
    weights[j] = mix(of_query + uint32_t(j) * 0x9e3779b9u) < a.drop_below ? 0 : weights[j] * scale;
}

// Leave out the blocks whose keys no query sees; they ascend.
AttentionQueries visible(AttentionQueries queries, const Extent& extent, int64_t block) {
  while (queries.blocks > 0 && !extent.meets(queries.col[queries.blocks - 1] * block, block)) --queries.blocks;
  while (queries.blocks > 0 && !extent.meets(*queries.col * block, block)) ++queries.col, --queries.blocks;
  return queries;
}

// Terms of a product over blocks of keys: whole blocks together, and each block that is partly visible on its own, so
// that a NaN in a key that no query sees stays there.
template <class Real>
struct KeyTerms {
  const Real *w[kGroup], *x[kGroup];
  int64_t count = 0;

  // Add the visible keys of a block, with weights w [queries, stride] and vectors x [block, width].
  void add(const Real* weights, const Real* vectors, int64_t first_key, int64_t block, const Extent& extent,
           int64_t queries, int64_t stride, int64_t width, Real* sums, bool& started) {
    const int64_t from = extent.first > first_key ? extent.first - first_key : 0;
    const int64_t to = smaller(block, extent.end - first_key);
    if (from == 0 && to == block) {
      w[count] = weights, x[count++] = vectors;
    } else if (from < to) {
      const Real *part_w = weights + from, *part_x = vectors + from * width;
      multiply<Real>(terms_of<Real>(&part_w, &part_x, 1, stride, 1, width, to - from), queries, width, started, sums,
                     width);
      started = true;
    }
  }
  void multiply_whole(int64_t block, int64_t queries, int64_t stride, int64_t width, Real* sums, bool& started) {
    if (count == 0) return;
    multiply<Real>(terms_of<Real>(w, x, count, stride, 1, width, block), queries, width, started, sums, width);
    started = true;
  }
};

template <class Real>
void forward(const AttentionForward& a, const AttentionQueries& all_queries) {
  constexpr int n = kLanes<Real>;
  const Extent extent = extent_of(a.scores, all_queries.first, all_queries.last);
  const AttentionQueries queries = visible(all_queries, extent, a.block);
  const int64_t count = queries.last - queries.first, blocks = queries.blocks;
  const int64_t group = a.block < kGroup ? kGroup / a.block : 1, stride = group * a.padded;
  const Real* q = static_cast<const Real*>(a.q) + queries.first * a.d;
  Real* scores = static_cast<Real*>(scratch(Scratch::kSums, count * stride * int64_t(sizeof(Real))));
  auto* softmax = static_cast<SoftmaxSum<Real>*>(scratch(Scratch::kWeights, count * int64_t(sizeof(SoftmaxSum<Real>))));
  Real* y = static_cast<Real*>(a.y) + queries.first * a.d_v;
  bool started = false;
  for (int64_t r = 0; r < count; ++r) softmax[r] = {};
  for (int64_t b = 0; b < blocks; b += group) {
    const int64_t here = smaller(group, blocks - b), width = here * a.padded;
    for (int64_t i = 0; i < here; ++i) {
      const int64_t col = queries.col[b + i];
      score_block(a.scores, extent, q, static_cast<const Real*>(a.k) + col * a.d * a.padded, queries.first, count,
                  col * a.block, a.d, a.block, a.padded, scores + i * a.padded, stride);
    }
    for (int64_t r = 0; r < count; ++r) {
      Real* of_query = scores + r * stride;
      const Real before = softmax[r].add(of_query, width);
      if (started && before != 1)
        for (int64_t j = 0; j < a.d_v; j += n) store(y + r * a.d_v + j, load(y + r * a.d_v + j) * before);
      if (a.scores.drop_below)
        for (int64_t i = 0; i < here; ++i)
          drop(of_query + i * a.padded, a.padded, a.scores, queries.first + r, queries.col[b + i] * a.block);
    }
    KeyTerms<Real> terms;
    for (int64_t i = 0; i < here; ++i) {
      const int64_t key = queries.col[b + i] * a.block;
      terms.add(scores + i * a.padded, static_cast<const Real*>(a.v) + key * a.d_v, key, a.block, extent, count, stride,
                a.d_v, y, started);
    }
    terms.multiply_whole(a.block, count, stride, a.d_v, y, started);
  }
  Real* log_sum = static_cast<Real*>(a.log_sum) + queries.first;
  for (int64_t r = 0; r < count; ++r) {
    const bool nothing = softmax[r].is_empty();
    for (int64_t j = 0; j < a.d_v; j += n)
      store(y + r * a.d_v + j, nothing ? Vector<Real>{} : load(y + r * a.d_v + j) / softmax[r].sum);
    log_sum[r] = softmax[r].log_sum();
  }
  if (count == 1 || !a.scores.start) return;
  // 0 * NaN: a query may have met a NaN in a value that it does not see, but that another query sees.
  for (int64_t r = 0; r < count; ++r) {
    Vector<Real> zero = {};
    for (int64_t j = 0; j < a.d_v; j += n) zero += load(y + r * a.d_v + j) * Real(0);
    if (sum_of<Real>(zero) != 0) {
      const int64_t query = queries.first + r;
      forward<Real>(a, {query, query + 1, all_queries.blocks, all_queries.col});
    }
  }
}

// Turn scores into attention weights, and gradients of the weights into gradients of the scores.
template <class Real>
void back_through_softmax(Real* scores, Real* grads, int64_t width, Real log_sum, Real delta, Real softcap) {
  for (int64_t j = 0; j < width; j += kLanes<Real>) {
    const Vector<Real> s = load(scores + j), p = power(scores + j, log_sum);
    Vector<Real> grad = p * (load(grads + j) - delta);
    if (softcap != 0) grad *= Real(1) - (s / softcap) * (s / softcap);
    store(scores + j, p);
    store(grads + j, s == kNothing<Real> ? Vector<Real>{} : grad);
  }
}

template <class Real>
void backward_rows(const AttentionBackward& a, const AttentionQueries& all_queries) {
  const Extent extent = extent_of(a.scores, all_queries.first, all_queries.last);
  const AttentionQueries queries = visible(all_queries, extent, a.block_k);
  const int64_t count = queries.last - queries.first, blocks = queries.blocks;
  const int64_t group = a.block_k < kGroup ? kGroup / a.block_k : 1, stride = group * a.padded;
  const int64_t bytes = count * stride * int64_t(sizeof(Real));
  const Real* q = static_cast<const Real*>(a.q) + queries.first * a.d;
  const Real* grad = static_cast<const Real*>(a.grad) + queries.first * a.d_v;
  Real *scores = static_cast<Real*>(scratch(Scratch::kSums, bytes)),
       *grads = static_cast<Real*>(scratch(Scratch::kGradients, bytes)),
       *grad_q = static_cast<Real*>(a.grad_q) + queries.first * a.d;
  bool started = false;
  for (int64_t b = 0; b < blocks; b += group) {
    const int64_t here = smaller(group, blocks - b);
    for (int64_t i = 0; i < here; ++i) {
      const int64_t col = queries.col[b + i];
      Real *s = scores + i * a.padded, *g = grads + i * a.padded;
      score_block(a.scores, extent, q, static_cast<const Real*>(a.k_turned) + col * a.d * a.padded, queries.first,
                  count, col * a.block_k, a.d, a.block_k, a.padded, s, stride);
      multiply_block(grad, static_cast<const Real*>(a.v_turned) + col * a.d_v * a.padded, count, a.d_v, a.padded, g,
                     stride);
      for (int64_t r = 0; a.scores.drop_below && r < count; ++r)
        drop(g + r * stride, a.padded, a.scores, queries.first + r, col * a.block_k);
    }
    for (int64_t r = 0; r < count; ++r)
      back_through_softmax(scores + r * stride, grads + r * stride, here * a.padded,
                           static_cast<const Real*>(a.log_sum)[queries.first + r],
                           static_cast<const Real*>(a.delta)[queries.first + r], Real(a.scores.softcap));
    KeyTerms<Real> terms;
    for (int64_t i = 0; i < here; ++i) {
      const int64_t key = queries.col[b + i] * a.block_k;
      terms.add(grads + i * a.padded, static_cast<const Real*>(a.k) + key * a.d, key, a.block_k, extent, count, stride,
                a.d, grad_q, started);
    }
    terms.multiply_whole(a.block_k, count, stride, a.d, grad_q, started);
  }
  if (!started) memset(grad_q, 0, count * a.d * sizeof(Real));
}

template <class Real>
void backward_column(const AttentionBackward& a, const AttentionKeys& keys) {
  // Take a few queries of a long block at a time, or several short blocks.
  const int64_t most = smaller(keys.block, kGroup), tiles = ceil_div(keys.block, most);
  const int64_t group = tiles > 1 ? 1 : kGroup / keys.block, tile_size = most * a.padded;
  const int64_t first_key = keys.col * a.block_k, bytes = group * tile_size * int64_t(sizeof(Real));
  const int64_t rows = smaller(a.block_k, a.scores.keys - first_key);
  const Real* k = static_cast<const Real*>(a.k_turned) + keys.col * a.d * a.padded;
  const Real* v = static_cast<const Real*>(a.v_turned) + keys.col * a.d_v * a.padded;
  Real* scores = static_cast<Real*>(scratch(Scratch::kSums, bytes));
  Real* grads = static_cast<Real*>(scratch(Scratch::kGradients, bytes));
  Real* grad_k = static_cast<Real*>(a.grad_k) + first_key * a.d;
  Real* grad_v = static_cast<Real*>(a.grad_v) + first_key * a.d_v;
  const Real *weights[kGroup], *of_scores[kGroup], *q[kGroup], *grad[kGroup];
  int64_t here = 0, steps = 0;
  bool add = keys.add;
  const auto flush = [&] {  // multiply the collected tiles, which have equally many queries
    if (here == 0) return;
    multiply<Real>(terms_of<Real>(weights, grad, here, 1, a.padded, a.d_v, steps), rows, a.d_v, add, grad_v, a.d_v);
    multiply<Real>(terms_of<Real>(of_scores, q, here, 1, a.padded, a.d, steps), rows, a.d, add, grad_k, a.d);
    here = 0, add = true;
  };
  for (int64_t p = 0; p < keys.blocks * tiles; ++p) {
    const int64_t row = keys.row[p / tiles], tile = row * keys.block - keys.before + p % tiles * most;
    const int64_t block_end = (row + 1) * keys.block - keys.before, tile_end = smaller(tile + most, block_end);
    const int64_t query = tile < 0 ? 0 : tile, count = smaller(tile_end, keys.queries) - query;
    if (count <= 0) continue;
    const Extent extent = extent_of(a.scores, query, query + count);
    if (!extent.meets(first_key, a.block_k)) continue;
    if (here == group || (here > 0 && count != steps)) flush();
    Real *s = scores + here * tile_size, *g = grads + here * tile_size;
    weights[here] = s, of_scores[here] = g, steps = count;
    q[here] = static_cast<const Real*>(a.q) + query * a.d,
    grad[here] = static_cast<const Real*>(a.grad) + query * a.d_v;
    score_block(a.scores, extent, q[here], k, query, count, first_key, a.d, a.block_k, a.padded, s, a.padded);
    multiply_block(grad[here], v, count, a.d_v, a.padded, g, a.padded);
    for (int64_t r = 0; r < count; ++r) {
      Real *of_query = s + r * a.padded, *of_grad = g + r * a.padded;
      if (a.scores.drop_below) drop(of_grad, a.padded, a.scores, query + r, first_key);
      back_through_softmax(of_query, of_grad, a.padded, static_cast<const Real*>(a.log_sum)[query + r],
                           static_cast<const Real*>(a.delta)[query + r], Real(a.scores.softcap));
      if (a.scores.drop_below) drop(of_query, a.padded, a.scores, query + r, first_key);
    }
    ++here;
  }
  flush();
  if (!add) {
    memset(grad_k, 0, rows * a.d * sizeof(Real));
    memset(grad_v, 0, rows * a.d_v * sizeof(Real));
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

const FewQueriesKernels& select_few_queries(DType dtype) {
  static constexpr FewQueriesKernels float32 = {attend<Float32>, merge<Float32>},
                                     float64 = {attend<Float64>, merge<Float64>},
                                     bfloat16 = {attend_bfloat16, merge_bfloat16},
                                     float16 = {attend<Float16>, merge<Float16>};
  return by_dtype(dtype, float32, float64, bfloat16, float16);
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
