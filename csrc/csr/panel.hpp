// The packed panel [features, tokens] of products with unstructured weights: parts of vectors for few tokens, packing,
// and sums over tokens.
#pragma once

#include <type_traits>

#include "isa/element.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

template <class T, int kWide>
struct PartOf {
  typedef T type __attribute__((vector_size(kWide * sizeof(T))));
};
template <class T>
struct PartOf<T, 1> {
  using type = T;
};
template <class T, int kWide>
using Part = typename PartOf<T, kWide>::type;

template <class V, class T>
BLOCKSPARSE_INLINE V read(const T* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

// Keep a value in a register; the compiler would load it again for each instruction.
template <class V>
BLOCKSPARSE_INLINE V kept(V v) {
#if defined(__x86_64__) && !defined(BLOCKSPARSE_EMULATED_VECTORS)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

// Transpose kWide x kWide elements, as `transpose` does whole vectors.
template <class T, int kWide>
BLOCKSPARSE_INLINE void transpose_part(Part<T, kWide>* v) {
  if constexpr (kWide > 1) {
    for (int round = 1; round < kWide; round *= 2) {
      Part<T, kWide> w[kWide];
      for (int i = 0; i < kWide / 2; ++i)
        interleave(v[i], v[i + kWide / 2], w[2 * i], w[2 * i + 1], std::make_index_sequence<kWide>{});
      for (int i = 0; i < kWide; ++i) v[i] = w[i];
    }
  }
}

// Call `body` with the width as a constant, if it is a power of two below a vector.
template <class T, int kWide, class Body>
BLOCKSPARSE_INLINE bool with_part(int64_t width, Body body) {
  if constexpr (kWide < kLanes<T>) {
    if (width == kWide) return body(std::integral_constant<int, kWide>{}), true;
    return with_part<T, 2 * kWide>(width, body);
  }
  return false;
}

// -- sums -----------------------------------------------------------------------------------------------------------

// Sum the lanes of as many vectors as a vector has lanes; sum i goes to lane i.
template <class T>
BLOCKSPARSE_INLINE Vector<T> totals(Vector<T>* v) {
  constexpr int n = kLanes<T>;
#pragma GCC unroll 4
  for (int left = n / 2; left >= 1; left /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i) {
      Vector<T> low, high;
      interleave(v[i], v[i + left], low, high, std::make_index_sequence<n>{});
      v[i] = low + high;
    }
  }
  return v[0];
}

// Sum the products of a few tokens for each connection, by halves.
template <class T, int kWide>
BLOCKSPARSE_INLINE T total_of(const T* products) {
  if constexpr (kWide == 1) {
    return products[0];
  } else {
    return total_of<T, kWide / 2>(products) + total_of<T, kWide / 2>(products + kWide / 2);
  }
}

// Sum the lanes of each of up to a vector's number of vectors or parts of vectors.
template <class T, int kWide>
BLOCKSPARSE_INLINE void totals_of(Part<T, kWide>* v, int64_t count, T* sums) {
  if constexpr (kWide == kLanes<T>) {
    (void)count;
    store(sums, totals<T>(v));
  } else {
    for (int64_t i = 0; i < count; ++i) {
      T numbers[kWide];
      memcpy(numbers, v + i, sizeof numbers);
      sums[i] = total_of<T, kWide>(numbers);
    }
  }
}

// -- packing -------------------------------------------------------------------------------------------------------

template <class E>
BLOCKSPARSE_INLINE Vector<typename E::Sum> numbers_up_to(const typename E::Storage* from, int64_t count) {
  constexpr int64_t n = kLanes<typename E::Sum>;
  if (count >= n) return E::units(from);
  typename E::Storage padded[n] = {};
  if (count > 0) memcpy(padded, from, count * sizeof *from);
  return E::units(padded);
}

template <class E, int kWide>
void pack_part(const typename E::Storage* x, int64_t stride, int64_t tokens, int64_t first, int64_t last,
               typename E::Sum* panel) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  for (int64_t k = first; k < last; k += n) {
    const int64_t count = smaller<int64_t>(n, last - k);
    Sum rows[kWide][n] = {};
    for (int t = 0; t < kWide; ++t)
      if (t < tokens) store(rows[t], numbers_up_to<E>(x + t * stride + k, count));
    Sum turned[n * kWide];
#pragma GCC unroll 16
    for (int i = 0; i < n; i += kWide) {
      Part<Sum, kWide> v[kWide];
      for (int t = 0; t < kWide; ++t) v[t] = read<Part<Sum, kWide>>(rows[t] + i);
      transpose_part<Sum, kWide>(v);
      memcpy(turned + i * kWide, v, sizeof v);
    }
    memcpy(panel + k * kWide, turned, count * kWide * sizeof(Sum));
  }
}

template <class E>
void pack(const void* from, int64_t stride, int64_t tokens, int64_t first, int64_t last, int64_t width, void* to) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  const auto* x = static_cast<const typename E::Storage*>(from);
  Sum* panel = static_cast<Sum*>(to);
  if (with_part<Sum, 1>(width,
                        [&](auto part) { pack_part<E, decltype(part)::value>(x, stride, tokens, first, last, panel); }))
    return;
  for (int64_t k = first; k < last; k += n) {
    const int64_t count = smaller<int64_t>(n, last - k);
    for (int64_t t = 0; t < width; t += n) {
      Vector<Sum> v[n];
      if (count == n && t + n <= tokens) {
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) v[i] = E::units(x + (t + i) * stride + k);
      } else {
        for (int i = 0; i < n; ++i)
          v[i] = t + i < tokens ? numbers_up_to<E>(x + (t + i) * stride + k, count) : Vector<Sum>{};
      }
      transpose<Sum>(v);
      if (count == n) {
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) store(panel + (k + i) * width + t, v[i]);
      } else {
        for (int i = 0; i < count; ++i) store(panel + (k + i) * width + t, v[i]);
      }
    }
  }
}

}  // namespace
}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
