// Linear products with unstructured weights for one instruction set. Lanes are tokens; each connection multiplies one
// weight with a row of a packed panel. The order of sums does not depend on the number of threads.
#include <type_traits>

#include "core/parallel.hpp"
#include "csr/csr.hpp"
#include "csr/panel.hpp"
#include "isa/activation.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

// Two sums for each vector of tokens, in 32 or 16 registers.
constexpr int kMostVectors = kVectorBytes == 64 ? 8 : 4;
// Connections summed in registers before they join the total: sums of sums lose less to rounding.
constexpr int64_t kSumGroup = 64;
// Most bytes of sums that wait to be transposed.
constexpr int64_t kSumBytes = 32 << 10;

// -- y = x W^T -----------------------------------------------------------------------------------------------------

// Connections to look ahead when prefetching rows of the panel: more if rows are short.
constexpr int64_t fetch_ahead(int64_t row_bytes) { return row_bytes >= 256 ? 12 : 16; }

template <class T>
BLOCKSPARSE_INLINE void fetch(const T* from, int64_t count) {
  for (int64_t b = 0; b < count * int64_t(sizeof(T)); b += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(from) + b);
}

// Collects products of consecutive connections as vectors until there are enough to sum across lanes.
template <class E, class Index, int kWide>
class Samples {
  using Sum = typename E::Sum;
  using V = Part<Sum, kWide>;
  static constexpr int n = kLanes<Sum>;

  const Index* position_;
  typename E::Storage* to_;
  int64_t waiting_ = 0;
  V waits_[kSumGroup + n];

  void write(V* products, int64_t count) {
    Sum sums[n];
    totals_of<Sum, kWide>(products, count, sums);
    for (int64_t i = 0; i < count; ++i) to_[position_[i]] = sums[i];
    position_ += count;
  }

 public:
  Samples(const Index* position, void* to) : position_(position), to_(static_cast<typename E::Storage*>(to)) {}

  void add(V products) { waits_[waiting_++] = products; }

  // Make room for another group.
  void write_whole() {
    int64_t i = 0;
    for (; i + n <= waiting_; i += n) write(waits_ + i, n);
    waiting_ -= i;
    for (int64_t left = 0; left < waiting_; ++left) waits_[left] = waits_[i + left];
  }
  void write_all() {
    write_whole();
    write(waits_, waiting_);
    waiting_ = 0;
  }
};

template <class E, class Index, int kWide, int kVectors, bool kSampled>
void sum_rows(const CsrRows& p, int64_t first, int64_t last, typename E::Sum* sums) {
  using Sum = typename E::Sum;
  using V = Part<Sum, kWide>;
  constexpr int64_t kWidth = kWide * kVectors, kAhead = fetch_ahead(kWidth * sizeof(Sum));
  const auto *start = static_cast<const Index*>(p.matrix.start), *col = static_cast<const Index*>(p.matrix.col);
  const auto* position = static_cast<const Index*>(p.matrix.position);
  const auto* values = static_cast<const typename E::Storage*>(p.values);
  const Sum *panel = static_cast<const Sum*>(p.panel), *factors = static_cast<const Sum*>(p.factors);
  const int64_t final = p.matrix.connections - 1;
  const bool fetches = p.fetches;
  Samples<E, Index, kWide> samples(kSampled ? position + start[first] : nullptr, p.samples);

  V factor[kVectors];
  const auto multiply = [&](int64_t k, V* sum) __attribute__((always_inline)) {
    if (fetches) {
      const int64_t next = smaller(k + kAhead, final);
      fetch(panel + col[next] * kWidth, kWidth);
      if (position) __builtin_prefetch(values + position[next]);
    }
    const Sum w = E::to_sum(values[position ? position[k] : k]);
    const Sum* x = panel + col[k] * kWidth;
    if constexpr (!kSampled) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[v] = sum[v] + w * read<V>(x + v * kWide);
    } else {
      V even = {}, odd = {};
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const V numbers = kept(read<V>(x + v * kWide));
        sum[v] = sum[v] + w * numbers;
        (v % 2 ? odd : even) += numbers * factor[v];
      }
      samples.add(even + odd);
    }
  };
  for (int64_t r = first; r < last; ++r, sums += kWidth) {
    if constexpr (kSampled)
      for (int v = 0; v < kVectors; ++v) factor[v] = read<V>(factors + r * kWidth + v * kWide);
    const int64_t end = start[r + 1];
    int64_t k = start[r];
    bool add = false;
    do {
      const int64_t stop = smaller(end, k + kSumGroup);
      V even[kVectors] = {}, odd[kVectors] = {};
      for (; k + 2 <= stop; k += 2) {
        multiply(k, even);
        multiply(k + 1, odd);
      }
      if (k < stop) multiply(k++, even);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        V sum = even[v] + odd[v];
        if (add) sum = sum + read<V>(sums + v * kWide);
        memcpy(sums + v * kWide, &sum, sizeof sum);
      }
      add = true;
      if constexpr (kSampled) samples.write_whole();
    } while (k < end);
  }
  if constexpr (kSampled) samples.write_all();
}

template <class E>
BLOCKSPARSE_INLINE Vector<typename E::Sum> finished(Vector<typename E::Sum> v, const CsrRows& p, int64_t output,
                                                    int64_t count) {
  if (p.bias) v = v + numbers_up_to<E>(static_cast<const typename E::Storage*>(p.bias) + output, count);
  return p.activation == Activation::kNone ? v : activated(v, p.activation);
}

// Write up to a vector of outputs; whole cache lines bypass the caches if y `streams`.
template <class E>
BLOCKSPARSE_INLINE void put(typename E::Storage* to, Vector<typename E::Sum> v, int64_t count, bool streams) {
  if (streams && count == kLanes<typename E::Sum> && sizeof *to == sizeof v[0] &&
      reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0)
    return stream(to, v);
  if (count == kLanes<typename E::Sum>) {
    E::store_sums(to, v);
  } else {
    write_sums<E>(to, v, count, false);
  }
}

// Write the sums [outputs, width] of the outputs from `first` on to y [tokens, outputs]. `sums` has a vector of rows to
// spare.
template <class E>
void write_rows(const CsrRows& p, int64_t first, int64_t last, const typename E::Sum* sums) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  auto* y = static_cast<typename E::Storage*>(p.y);
  if (with_part<Sum, 1>(p.width, [&](auto part) {
        constexpr int kWide = decltype(part)::value;
        for (int64_t o = first; o < last; o += n) {
          const int64_t count = smaller<int64_t>(n, last - o);
          Sum turned[kWide][n];
#pragma GCC unroll 16
          for (int i = 0; i < n; i += kWide) {
            Part<Sum, kWide> v[kWide];
            memcpy(v, sums + (o - first + i) * kWide, sizeof v);
            transpose_part<Sum, kWide>(v);
            for (int t = 0; t < kWide; ++t) memcpy(turned[t] + i, v + t, sizeof v[t]);
          }
          for (int t = 0; t < kWide; ++t)
            if (t < p.tokens)
              put<E>(y + t * p.y_stride + o, finished<E>(load(turned[t]), p, o, count), count, p.streams);
        }
      }))
    return;
  for (int64_t t = 0; t < p.tokens; t += n) {
    const int64_t tokens = smaller<int64_t>(n, p.tokens - t);
    for (int64_t o = first; o < last; o += n) {
      const int64_t count = smaller<int64_t>(n, last - o);
      Vector<Sum> v[n];
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) v[i] = load(sums + (o - first + i) * p.width + t);
      transpose<Sum>(v);
      if (tokens == n) {
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i)
          put<E>(y + (t + i) * p.y_stride + o, finished<E>(v[i], p, o, count), count, p.streams);
      } else {
        for (int i = 0; i < tokens; ++i)
          put<E>(y + (t + i) * p.y_stride + o, finished<E>(v[i], p, o, count), count, p.streams);
      }
    }
  }
}

template <class E, class Index, bool kSampled>
void rows_of(const CsrRows& p) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  auto sum = sum_rows<E, Index, n, 1, kSampled>;
  if (p.width > n) {
    static constexpr decltype(sum) kSums[] = {sum_rows<E, Index, n, 1, kSampled>,
                                              sum_rows<E, Index, n, 2, kSampled>,
                                              sum_rows<E, Index, n, 3, kSampled>,
                                              sum_rows<E, Index, n, 4, kSampled>,
                                              sum_rows<E, Index, n, (kMostVectors < 5 ? kMostVectors : 5), kSampled>,
                                              sum_rows<E, Index, n, (kMostVectors < 6 ? kMostVectors : 6), kSampled>,
                                              sum_rows<E, Index, n, (kMostVectors < 7 ? kMostVectors : 7), kSampled>,
                                              sum_rows<E, Index, n, kMostVectors, kSampled>};
    sum = kSums[p.width / n - 1];
  }
  with_part<Sum, 1>(p.width, [&](auto part) { sum = sum_rows<E, Index, decltype(part)::value, 1, kSampled>; });

  const int64_t row_bytes = p.width * int64_t(sizeof(Sum)), fitting = kSumBytes / row_bytes / n * n;
  const int64_t at_once = fitting > n ? fitting : n;
  Sum* sums = static_cast<Sum*>(scratch(Scratch::kSums, (at_once + n) * row_bytes));
  for (int64_t first = p.first; first < p.last; first += at_once) {
    const int64_t last = smaller(p.last, first + at_once);
    sum(p, first, last, sums);
    write_rows<E>(p, first, last, sums);
  }
#if defined(__AVX512F__)
  if (p.streams) _mm_sfence();
#endif
}

template <class E, class Index>
void rows(const CsrRows& p) {
  if constexpr (std::is_same_v<typename E::Storage, typename E::Sum>) {
    if (p.samples) return rows_of<E, Index, true>(p);
  }
  rows_of<E, Index, false>(p);
}

// -- grad^T x on the connections -----------------------------------------------------------------------------------

// Return the row of a connection.
template <class Index>
int64_t row_of(const Csr& matrix, int64_t connection) {
  const auto* start = static_cast<const Index*>(matrix.start);
  int64_t low = 0, high = matrix.rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (start[middle + 1] <= connection) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// kVectors = 0 means any number of whole vectors.
template <class E, class Index, int kWide, int kVectors>
void sample(const CsrSamples& p) {
  using Sum = typename E::Sum;
  using V = Part<Sum, kWide>;
  constexpr int n = kLanes<Sum>;
  const auto *start = static_cast<const Index*>(p.matrix.start), *col = static_cast<const Index*>(p.matrix.col);
  const Sum *grad = static_cast<const Sum*>(p.grad), *x = static_cast<const Sum*>(p.x);
  auto* values = static_cast<typename E::Storage*>(p.values);
  const int64_t vectors = kVectors ? kVectors : p.width / kWide, width = vectors * kWide;
  const int64_t ahead = fetch_ahead(width * int64_t(sizeof(Sum))), final = p.matrix.connections - 1;
  int64_t row = row_of<Index>(p.matrix, p.first);
  V factor[kVectors ? kVectors : 1];
  const auto begin_row = [&] {
    for (int v = 0; v < kVectors; ++v) factor[v] = read<V>(grad + row * width + v * kWide);
  };
  begin_row();
  for (int64_t k = p.first; k < p.last; k += n) {
    const int64_t count = smaller<int64_t>(n, p.last - k);
    V products[n] = {};
    for (int64_t i = 0; i < count; ++i) {
      if (start[row + 1] <= k + i) {
        while (start[row + 1] <= k + i) ++row;
        begin_row();
      }
      if (p.fetches) fetch(x + col[smaller(k + i + ahead, final)] * width, width);
      const Sum *left = grad + row * width, *right = x + col[k + i] * width;
      const auto product = [&](int64_t v) __attribute__((always_inline)) {
        return (kVectors ? factor[v] : read<V>(left + v * kWide)) * read<V>(right + v * kWide);
      };
      V even = {}, odd = {};
#pragma GCC unroll 4
      for (int64_t v = 0; v + 1 < vectors; v += 2) {
        even = even + product(v);
        odd = odd + product(v + 1);
      }
      if (vectors % 2) even = even + product(vectors - 1);
      products[i] = even + odd;
    }
    Sum sums[n];
    totals_of<Sum, kWide>(products, n, sums);
    write_sums<E>(values + k, load(sums), count, p.add);
  }
}

template <class E, class Index>
void samples(const CsrSamples& p) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  if (with_part<Sum, 1>(p.width, [&](auto part) { sample<E, Index, decltype(part)::value, 1>(p); })) return;
  switch (p.width / n) {
    case 1:
      return sample<E, Index, n, 1>(p);
    case 2:
      return sample<E, Index, n, 2>(p);
    case 4:
      return sample<E, Index, n, 4>(p);
    case 8:
      return sample<E, Index, n, 8>(p);
    default:
      return sample<E, Index, n, 0>(p);
  }
}

// -- the sums over tokens ------------------------------------------------------------------------------------------

template <class T, int kWide>
void sum_tokens(const T* panel, int64_t first, int64_t last, int64_t width, T* to) {
  using V = Part<T, kWide>;
  constexpr int n = kLanes<T>;
  for (int64_t f = first; f < last; f += n) {
    const int64_t count = smaller<int64_t>(n, last - f);
    V sums[n] = {};
    for (int64_t i = 0; i < count; ++i)
      for (int64_t t = 0; t < width; t += kWide) sums[i] = sums[i] + read<V>(panel + (f + i) * width + t);
    T found[n];
    totals_of<T, kWide>(sums, count, found);
    memcpy(to + f, found, count * sizeof(T));
  }
}

template <class E>
void sums(const void* panel, int64_t first, int64_t last, int64_t width, void* to) {
  using Sum = typename E::Sum;
  const auto* from = static_cast<const Sum*>(panel);
  auto* found = static_cast<Sum*>(to);
  if (!with_part<Sum, 1>(width,
                         [&](auto part) { sum_tokens<Sum, decltype(part)::value>(from, first, last, width, found); }))
    sum_tokens<Sum, kLanes<Sum>>(from, first, last, width, found);
}

template <class E>
constexpr CsrKernels table() {
  return {kLanes<typename E::Sum>,
          kMostVectors,
          sizeof(typename E::Sum),
          pack<E>,
          {rows<E, int32_t>, rows<E, int64_t>},
          {samples<E, int32_t>, samples<E, int64_t>},
          sums<E>};
}

}  // namespace

const CsrKernels& select_csr(DType dtype) {
  static constexpr CsrKernels float32 = table<Float32>(), float64 = table<Float64>(), bfloat16 = table<BFloat16>(),
                              float16 = table<Float16>();
  return by_dtype(dtype, float32, float64, bfloat16, float16);
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
