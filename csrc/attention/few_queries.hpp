// Attention of a few queries, as in decoding. The time is that of reading keys and values, which happens once for all
// heads that share them, and in place.
//
// A row of scores belongs to a query and a head; the heads of a query follow each other.
#pragma once

#include "attention/attention.hpp"
#include "attention/softmax.hpp"
#include "core/parallel.hpp"
#include "isa/element.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

// Keys whose scores are computed before their values are read. With 8 rows, 128 keys are 6 % slower.
constexpr int64_t kKeysAtOnce = 512;
// Bytes of values that stay in the first cache, while all rows use them.
constexpr int64_t kValueBytes = 8192;
// Keys to look ahead when prefetching; 16 gain nothing.
constexpr int64_t kKeysAhead = 8;
// Keys whose values are added to a row at the same time.
constexpr int kValueKeys = 4;
// Keys whose dot products are summed up together: their sums fill 16 bytes.
template <class Sum>
constexpr int kKeyTile = 16 / sizeof(Sum);

// Elements of a cache line, or of a vector that is longer.
template <class T>
constexpr int kElementsPerLine = 64 / sizeof(T);

template <int n>
struct Count {
  static constexpr int value = n;
};

// Call run(Count) for 1 <= count <= kMost.
template <int kMost, class Run>
BLOCKSPARSE_INLINE void call_with(int64_t count, const Run& run) {
  if constexpr (kMost > 1)
    if (count < kMost) return call_with<kMost - 1>(count, run);
  run(Count<kMost>{});
}

// Call run(first, Count) for tiles of at most kMost <= 8 of `count` items; the last two are as even as possible.
template <int kMost, class Run>
BLOCKSPARSE_INLINE void in_tiles(int64_t count, const Run& run) {
  for (int64_t first = 0, here; first < count; first += here) {
    const int64_t left = count - first;
    here = left >= 2 * kMost ? kMost : left > kMost ? (left + 1) / 2 : left;
    call_with<kMost>(here, [&](auto tile) __attribute__((always_inline)) { run(first, tile); });
  }
}

// bfloat16 whose features come in whole groups. A group has two vectors, its even and its odd numbers, since a shift or
// a mask makes these float32; queries and sums keep this order.
struct GroupedBFloat16 : BFloat16 {};

// Vectors of a group of features; groups of other types have one.
template <class E>
constexpr int kParts = 1;
template <>
constexpr int kParts<GroupedBFloat16> = 2;
template <class E>
constexpr int kFeatures = kParts<E> * kLanes<typename E::Sum>;

// Return a vector of a group, of which `count` features are there; zeros follow.
template <class E, int kPart>
BLOCKSPARSE_INLINE Vector<typename E::Sum> read_part(const typename E::Storage* from, int64_t count) {
  if constexpr (kParts<E> == 1) {
    return read_units<E>(from, count);
  } else {
    Vector<uint32_t> pairs;
    memcpy(&pairs, from, sizeof pairs);
    return bits<Vector<float>>(kPart == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
}

// Call run(Count) for each vector of a group.
template <class E, class Run>
BLOCKSPARSE_INLINE void in_parts(const Run& run) {
  run(Count<0>{});
  if constexpr (kParts<E> == 2) run(Count<1>{});
}

// Call run(first, count) for the groups of `features` features.
template <class E, class Run>
BLOCKSPARSE_INLINE void in_groups(int64_t first, int64_t features, const Run& run) {
  for (; first + kFeatures<E> <= features; first += kFeatures<E>) run(first, int64_t(kFeatures<E>));
  if (first < features) run(first, features - first);
}

// Prefetches rows of features line by line. Hardware follows this order only, not that of tiles, which read several
// rows side by side. The calls that use the same rows share the lines evenly: a burst leaves the memory idle
// afterwards.
class Fetcher {
 public:
  template <class T>
  Fetcher(const T* from, int64_t features, int64_t stride, int64_t rows)
      : row_(reinterpret_cast<const char*>(from)),
        bytes_(features * sizeof(T)),
        stride_(stride * sizeof(T)),
        rows_(rows) {}

  __attribute__((always_inline)) void fetch(int64_t lines) {
    for (; lines > 0 && rows_ > 0; --lines) {
      __builtin_prefetch(row_ + at_);
      at_ += 64;
      if (at_ >= bytes_) at_ = 0, row_ += stride_, --rows_;
    }
  }

 private:
  const char* row_;
  int64_t bytes_, stride_, rows_, at_ = 0;
};

// The share of call `i` of `calls` in some lines.
inline int64_t share_of_call(int64_t lines, int64_t i, int64_t calls) {
  return lines * (i + 1) / calls - lines * i / calls;
}

// The lane of a shuffle of two vectors that collects the even or the odd lanes of each within 16 bytes.
constexpr int lane_of_fold(int n, int part, int i, int odd) {
  const int at = i % part, other = at >= part / 2;
  return other * n + i - at + 2 * (at - other * (part / 2)) + odd;
}
template <class V, size_t... I>
BLOCKSPARSE_INLINE V fold(V a, V b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I), part = 16 / sizeof(a[0]);
  return __builtin_shufflevector(a, b, lane_of_fold(n, part, I, 0)...) +
         __builtin_shufflevector(a, b, lane_of_fold(n, part, I, 1)...);
}

// Store the sum of the lanes of each of kKeyTile vectors.
template <class Sum>
BLOCKSPARSE_INLINE void store_lane_sums(Sum* to, const Vector<Sum>* v) {
  constexpr auto lanes = std::make_index_sequence<kLanes<Sum>>{};
  Vector<Sum> folded = fold(v[0], v[1], lanes);
  if constexpr (kKeyTile<Sum> == 4) folded = fold(folded, fold(v[2], v[3], lanes), lanes);
  typedef Sum Part __attribute__((vector_size(16)));
  Part parts[kVectorBytes / 16];
  memcpy(parts, &folded, sizeof parts);
#pragma GCC unroll 4
  for (int i = 1; i < kVectorBytes / 16; ++i) parts[0] += parts[i];
  memcpy(to, parts, 16);
}

// Add the products of a group of features, of which `count` are there.
template <class E, int kRows, int kKeys>
BLOCKSPARSE_INLINE void add_products(const typename E::Sum* q, int64_t q_row, const typename E::Storage* const* k,
                                     int64_t first, int64_t count, Vector<typename E::Sum> (&sum)[kRows][kKeys]) {
  in_parts<E>([&](auto part) __attribute__((always_inline)) {
    constexpr int kPart = decltype(part)::value;
    Vector<typename E::Sum> w[kRows];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) w[r] = load(q + r * q_row + first + kPart * kLanes<typename E::Sum>);
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const Vector<typename E::Sum> units = read_part<E, kPart>(k[i] + first, count);
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) sum[r][i] = E::multiply_add_lanes(w[r], units, sum[r][i]);
    }
  });
}

// Scores of kRows rows of queries and kKeyTile keys. `q` is padded with zeros. For each line of a key, `lines` lines
// are fetched.
template <class E, int kRows>
BLOCKSPARSE_INLINE void score_tile(const typename E::Sum* q, int64_t q_row, const typename E::Storage* const* k,
                                   int64_t d, Fetcher& fetcher, int64_t lines, typename E::Sum* scores,
                                   int64_t scores_row) {
  using Sum = typename E::Sum;
  constexpr int kKeys = kKeyTile<Sum>;
  Vector<Sum> sum[kRows][kKeys];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) sum[r][i] = Vector<Sum>{};
  constexpr int kLine = kElementsPerLine<typename E::Storage>;
  int64_t first = 0;
  for (; first + kLine <= d; first += kLine) {
    fetcher.fetch(lines);
#pragma GCC unroll 8
    for (int c = 0; c < kLine; c += kFeatures<E>) add_products<E>(q, q_row, k, first + c, kFeatures<E>, sum);
  }
  in_groups<E>(first, d, [&](int64_t at, int64_t count) __attribute__((always_inline)) {
    add_products<E>(q, q_row, k, at, count, sum);
  });
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) store_lane_sums<Sum>(scores + r * scores_row, sum[r]);
}

// Add the values of some keys to the sums of kRows rows, for kGroups whole groups of features or `count` features.
// For each key, `lines` lines are fetched.
template <class E, int kRows, int kGroups, bool kWhole = true>
BLOCKSPARSE_INLINE void value_tile(const typename E::Sum* weights, int64_t weights_row,
                                   const typename E::Storage* values, int64_t token, int64_t keys, Fetcher& fetcher,
                                   int64_t lines, int64_t count, typename E::Sum* sums, int64_t sums_row) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>, kVectors = kGroups * kParts<E>;
  Vector<Sum> sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) sum[r][c] = load(sums + r * sums_row + c * n);
  for (int64_t j = 0; j < keys; ++j, values += token) {
    fetcher.fetch(lines);
    Vector<Sum> units[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kGroups; ++c)
      in_parts<E>([&](auto part) __attribute__((always_inline)) {
        constexpr int kPart = decltype(part)::value;
        units[c * kParts<E> + kPart] = read_part<E, kPart>(values + c * kFeatures<E>, kWhole ? kFeatures<E> : count);
      });
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Sum w = weights[r * weights_row + j];
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) sum[r][c] = E::multiply_add(w, units[c], sum[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) store(sums + r * sums_row + c * n, sum[r][c]);
}

// Add the weighted values of kKeys keys to the sums of one row, which are padded to whole vectors.
template <class E, int kKeys>
BLOCKSPARSE_INLINE void add_weighted(const typename E::Sum* weights, const typename E::Storage* values, int64_t token,
                                     int64_t d, Fetcher& fetcher, typename E::Sum* sums) {
  using Sum = typename E::Sum;
  constexpr int kLine = kElementsPerLine<typename E::Storage>;
  Vector<Sum> w[kKeys];
#pragma GCC unroll 4
  for (int i = 0; i < kKeys; ++i) w[i] = broadcast(weights[i]);
  const auto add = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    in_parts<E>([&](auto part) __attribute__((always_inline)) {
      constexpr int kPart = decltype(part)::value;
      Sum* const to = sums + first + kPart * kLanes<Sum>;
      Vector<Sum> sum = load(to);
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i)
        sum = E::multiply_add_lanes(w[i], read_part<E, kPart>(values + i * token + first, count), sum);
      store(to, sum);
    });
  };
  int64_t first = 0;
  for (; first + kLine <= d; first += kLine) {
    fetcher.fetch(kKeys);
#pragma GCC unroll 8
    for (int c = 0; c < kLine; c += kFeatures<E>) add(first + c, kFeatures<E>);
  }
  in_groups<E>(first, d, add);
}

// Attention of some rows to some keys, added to what the rows have seen.
template <class E>
struct RowsOfQueries {
  using Sum = typename E::Sum;
  using Storage = typename E::Storage;
  static constexpr int64_t n = kLanes<Sum>;
  static constexpr int kRowTile = 3;  // by kKeyTile keys
  // Rows of scores, which are read side by side, do not share a set of the first cache.
  static constexpr int64_t kScoresRow = kKeysAtOnce + 16;

  const FewQueries& a;
  const int64_t wide = ceil_div(a.d, n) * n;
  const Sum* const q = widened_queries();
  Sum* const scores =
      static_cast<Sum*>(scratch(Scratch::kSums, a.queries* a.shared * kScoresRow * int64_t(sizeof(Sum))));
  Sum* const sums = static_cast<Sum*>(a.sums);
  SoftmaxSum<Sum>* const softmax = reinterpret_cast<SoftmaxSum<Sum>*>(sums + a.queries * a.shared * a.wide);

  // The scaled queries in rows, padded with zeros.
  const Sum* widened_queries() const {
    Sum* rows = static_cast<Sum*>(scratch(Scratch::kWeights, a.queries * a.shared * wide * int64_t(sizeof(Sum))));
    for (int64_t i = 0; i < a.queries * a.shared; ++i) {
      const Storage* from = static_cast<const Storage*>(a.q) + (i % a.shared * a.head_queries + i / a.shared) * a.d;
      in_groups<E>(0, a.d, [&](int64_t first, int64_t count) {
        in_parts<E>([&](auto part) {
          constexpr int kPart = decltype(part)::value;
          store(rows + i * wide + first + kPart * n, read_part<E, kPart>(from + first, count) * Sum(a.scale));
        });
      });
    }
    return rows;
  }

  void add(int64_t row, int64_t rows, int64_t from, int64_t to) const {
    for (; from < to; from += kKeysAtOnce) add_keys(row, rows, from, smaller(kKeysAtOnce, to - from));
  }

  void add_keys(int64_t row, int64_t rows, int64_t first, int64_t keys) const {
    score(row, rows, static_cast<const Storage*>(a.k) + first * a.k_token, keys);
    const Storage* const v = static_cast<const Storage*>(a.v) + first * a.v_token;
    Fetcher(v, a.d_v, a.v_token, smaller(keys, kKeysAhead)).fetch(INT64_MAX);
    for (int64_t r = 0; r < rows; ++r) {
      Sum* of_row = scores + r * kScoresRow;
      const int64_t width = ceil_div(keys, n) * n;
      if (a.softcap != 0) cap(of_row, width, Sum(a.softcap));
      for (int64_t j = keys; j < width; ++j) of_row[j] = kNothing<Sum>;
      const Sum before = softmax[row + r].add(of_row, width);
      Sum* of_sums = sums + (row + r) * a.wide;
      if (before != 1)
        for (int64_t c = 0; c < a.wide; c += n) store(of_sums + c, load(of_sums + c) * before);
    }
    add_values(row, rows, v, keys);
  }

  // Whether converting keys and values once is faster than by each tile.
  static bool widens(int64_t rows) { return kParts<E> == 1 && sizeof(Storage) < sizeof(Sum) && rows > kRowTile; }

  void score(int64_t row, int64_t rows, const Storage* k, int64_t keys) const {
    constexpr int kKeys = kKeyTile<Sum>;
    Sum* const widened = static_cast<Sum*>(scratch(Scratch::kPanels, kKeys * wide * int64_t(sizeof(Sum))));
    Fetcher fetcher(k + kKeysAhead * a.k_token, a.d, a.k_token, keys - kKeysAhead);
    for (int64_t j = 0; j < keys; j += kKeys) {
      const Storage* of_keys[kKeys];
      const Sum* of_widened[kKeys];
      for (int i = 0; i < kKeys; ++i) {
        of_keys[i] = k + smaller(j + i, keys - 1) * a.k_token, of_widened[i] = widened + i * wide;
        if (widens(rows)) widen(of_keys[i], a.d, widened + i * wide, fetcher);
      }
      if (widens(rows))
        score_keys<Plain<Sum>>(row, rows, of_widened, wide, fetcher, scores + j);
      else
        score_keys<E>(row, rows, of_keys, a.d, fetcher, scores + j);
    }
  }

  void add_values(int64_t row, int64_t rows, const Storage* v, int64_t keys) const {
    if (rows == 1) {
      Fetcher fetcher(v + kKeysAhead * a.v_token, a.d_v, a.v_token, keys - kKeysAhead);
      int64_t j = 0;
      for (; j + kValueKeys <= keys; j += kValueKeys)
        add_weighted<E, kValueKeys>(scores + j, v + j * a.v_token, a.v_token, a.d_v, fetcher, sums + row * a.wide);
      for (; j < keys; ++j)
        add_weighted<E, 1>(scores + j, v + j * a.v_token, a.v_token, a.d_v, fetcher, sums + row * a.wide);
      return;
    }
    const int64_t step = a.d_v > 0 ? ceil_div(kValueBytes, a.d_v * int64_t(sizeof(Sum))) : keys;
    Sum* const widened = static_cast<Sum*>(scratch(Scratch::kPanels, step * a.wide * int64_t(sizeof(Sum))));
    for (int64_t j = 0; j < keys; j += step, v += step * a.v_token) {
      const int64_t here = smaller(step, keys - j);
      Fetcher next(v + here * a.v_token, a.d_v, a.v_token, smaller(step, keys - j - here));
      if (widens(rows)) {
        for (int64_t i = 0; i < here; ++i) widen(v + i * a.v_token, a.d_v, widened + i * a.wide, next);
        weight_keys<Plain<Sum>>(row, rows, widened, a.wide, here, next, a.wide, scores + j);
      } else {
        weight_keys<E>(row, rows, v, a.v_token, here, next, a.d_v, scores + j);
      }
    }
  }

  static void widen(const Storage* from, int64_t count, Sum* to, Fetcher& fetcher) {
    fetcher.fetch(ceil_div(count, int64_t(kElementsPerLine<Storage>)));
    in_vectors<E>(0, count, [&](int64_t i, int64_t here) { store(to + i, read_units<E>(from + i, here)); });
  }

  template <class F>
  void score_keys(int64_t row, int64_t rows, const typename F::Storage* const* keys, int64_t d, Fetcher& fetcher,
                  Sum* to) const {
    const int64_t calls = ceil_div(rows, int64_t(kRowTile));
    int64_t call = 0;
    in_tiles<kRowTile>(rows, [&](int64_t r, auto count) __attribute__((always_inline)) {
      const int64_t lines = share_of_call(kKeyTile<Sum>, call++, calls);
      score_tile<F, decltype(count)::value>(q + (row + r) * wide, wide, keys, d, fetcher, lines, to + r * kScoresRow,
                                            kScoresRow);
    });
  }

  template <class F>
  void weight_keys(int64_t row, int64_t rows, const typename F::Storage* values, int64_t token, int64_t keys,
                   Fetcher& next, int64_t d, const Sum* weights) const {
    const int64_t lines = ceil_div(a.d_v, int64_t(kElementsPerLine<Storage>));
    const int64_t groups_at_once = (rows <= 2 ? 4 : 3) / kParts<F>;
    const int64_t calls = ceil_div(rows, 4) * ceil_div(ceil_div(d, int64_t(kFeatures<F>)), groups_at_once);
    int64_t call = 0;
    in_tiles<4>(rows, [&](int64_t r, auto count) __attribute__((always_inline)) {
      constexpr int kRows = decltype(count)::value;
      const auto add = [&](int64_t first, int64_t features, auto groups, auto whole) __attribute__((always_inline)) {
        value_tile<F, kRows, decltype(groups)::value, decltype(whole)::value>(
            weights + r * kScoresRow, kScoresRow, values + first, token, keys, next,
            share_of_call(lines, call++, calls), features, sums + (row + r) * a.wide + first, a.wide);
      };
      constexpr int g = kFeatures<F>;
      in_tiles<(kRows <= 2 ? 4 : 3) / kParts<F>>(
          d / g, [&](int64_t group, auto groups) { add(group * g, g, groups, Count<true>{}); });
      if (d % g) add(d / g * g, d % g, Count<1>{}, Count<false>{});
    });
  }
};

// Attention to the blocks of a task. Keys that all queries see are read once, and those that some see, once for each:
// no query meets a key that it does not see, whose value may be NaN.
template <class E>
void attend(const FewQueries& a) {
  using Sum = typename E::Sum;
  const RowsOfQueries<E> rows{a};
  const int64_t count = a.queries * a.shared;
  memset(a.sums, 0, count * a.wide * sizeof(Sum));
  for (int64_t r = 0; r < count; ++r) rows.softmax[r] = {};
  int64_t all_start = 0, all_end = INT64_MAX;
  for (int64_t i = 0; i < a.queries; ++i) {
    if (a.start[i] > all_start) all_start = a.start[i];
    all_end = smaller(all_end, a.end[i]);
  }
  for (int64_t b = 0, next; b < a.blocks; b = next) {
    for (next = b + 1; next < a.blocks && a.col[next] == a.col[next - 1] + 1;) ++next;
    const int64_t from = a.col[b] * a.block, to = (a.col[next - 1] + 1) * a.block;
    int64_t first = from > all_start ? from : all_start, last = smaller(to, all_end);
    if (first >= last) first = last = to;
    for (int64_t i = 0; i < a.queries; ++i)
      rows.add(i * a.shared, a.shared, from > a.start[i] ? from : a.start[i], smaller(first, a.end[i]));
    rows.add(0, count, first, last);
    for (int64_t i = 0; i < a.queries; ++i)
      rows.add(i * a.shared, a.shared, last > a.start[i] ? last : a.start[i], smaller(to, a.end[i]));
  }
}

// Merge the sums of `tasks` tasks, `bytes` apart, which have attended to different blocks.
template <class E>
void merge(const FewQueries& a, int64_t tasks, int64_t bytes, void* y, void* log_sum) {
  using Sum = typename E::Sum;
  const int64_t rows = a.queries * a.shared;
  Sum* factors = static_cast<Sum*>(scratch(Scratch::kWeights, tasks * int64_t(sizeof(Sum))));
  const auto sums_of = [&](int64_t task) {
    return reinterpret_cast<const Sum*>(static_cast<const char*>(a.sums) + task * bytes);
  };
  const auto softmax_of = [&](int64_t task, int64_t row) {
    return reinterpret_cast<const SoftmaxSum<Sum>*>(sums_of(task) + rows * a.wide)[row];
  };
  for (int64_t r = 0; r < rows; ++r) {
    SoftmaxSum<Sum> whole;
    for (int64_t t = 0; t < tasks; ++t) {
      const Sum other = softmax_of(t, r).largest;
      whole.largest = other > whole.largest ? other : whole.largest;
    }
    for (int64_t t = 0; t < tasks; ++t) {
      const SoftmaxSum<Sum> part = softmax_of(t, r);
      factors[t] = part.largest == kNothing<Sum> ? Sum(!part.is_empty())
                                                 : exponential(broadcast(part.largest - whole.largest))[0];
      whole.sum += part.sum * factors[t];
    }
    const int64_t at = r % a.shared * a.head_queries + r / a.shared;
    in_groups<E>(0, a.d_v, [&](int64_t first, int64_t count) {
      constexpr int n = kLanes<Sum>;
      Vector<Sum> sum[2] = {}, ordered[2];
      for (int part = 0; part < kParts<E>; ++part) {
        for (int64_t t = 0; t < tasks; ++t) sum[part] += load(sums_of(t) + r * a.wide + first + part * n) * factors[t];
        if (!whole.is_empty()) sum[part] /= whole.sum;
      }
      if constexpr (kParts<E> == 2)
        interleave(sum[0], sum[1], ordered[0], ordered[1], std::make_index_sequence<n>{});
      else
        ordered[0] = sum[0];
      typename E::Storage* const to = static_cast<typename E::Storage*>(y) + at * a.d_v + first;
      for (int part = 0; part * n < count; ++part)
        write_sums<E>(to + part * n, ordered[part], smaller(count - part * n, int64_t(n)), false);
    });
    if (log_sum) static_cast<Sum*>(log_sum)[at] = whole.log_sum();
  }
}

inline bool in_whole_groups(const FewQueries& a) {
  return a.d % kFeatures<GroupedBFloat16> == 0 && a.d_v % kFeatures<GroupedBFloat16> == 0;
}

inline void attend_bfloat16(const FewQueries& a) {
  in_whole_groups(a) ? attend<GroupedBFloat16>(a) : attend<BFloat16>(a);
}

inline void merge_bfloat16(const FewQueries& a, int64_t tasks, int64_t bytes, void* y, void* log_sum) {
  (in_whole_groups(a) ? merge<GroupedBFloat16> : merge<BFloat16>)(a, tasks, bytes, y, log_sum);
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
