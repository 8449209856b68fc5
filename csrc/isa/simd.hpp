// Vectors of the width that this file is compiled for, on the compiler's vector types: one source for SSE2, AVX2,
// AVX-512 and NEON. Everything is in the namespace of the instruction set, and uses no library template that emits
// code: the linker must never merge a function compiled for a newer CPU into an older path.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if !defined(BLOCKSPARSE_ISA)
#error "compile with -DBLOCKSPARSE_ISA=<name>"
#endif
#define BLOCKSPARSE_INLINE static inline __attribute__((always_inline))

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

// Vectors of AVX-512 can be emulated, so that any AVX2 CPU tests the kernels: the compiler splits each into halves.
#if defined(__AVX512F__) || defined(BLOCKSPARSE_EMULATED_VECTORS)
constexpr int kVectorBytes = 64;
constexpr int kTileRows = 8;  // of 32 registers: 8 x 3 sums, 3 inputs, the weight
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kTileRows = 4;  // of 16 registers: 4 x 3 sums, 3 inputs, the weight
#else
constexpr int kVectorBytes = 16;
constexpr int kTileRows = 4;
#endif
constexpr int kTileVectors = 3;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  static constexpr int lanes = kVectorBytes / sizeof(T);
};
template <class T>
using Vector = typename VectorOf<T>::type;
template <class T>
constexpr int kLanes = VectorOf<T>::lanes;

template <class T>
BLOCKSPARSE_INLINE Vector<T> load(const T* from) {
  Vector<T> v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class T>
BLOCKSPARSE_INLINE void store(T* to, Vector<T> v) {
  memcpy(to, &v, sizeof v);
}

template <class T>
BLOCKSPARSE_INLINE Vector<T> broadcast(T value) {
  return value - Vector<T>{};  // x - 0 is x, also for -0
}

template <class V, class U>
BLOCKSPARSE_INLINE V bits(U value) {
  static_assert(sizeof(V) == sizeof(U), "");
  V v;
  memcpy(&v, &value, sizeof v);
  return v;
}

// Store a vector. If it fills a cache line, it bypasses the caches, and `to` must be aligned to it; smaller vectors
// would write partial lines, so these are stored normally.
template <class V>
BLOCKSPARSE_INLINE void stream(void* to, V v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), bits<__m512i>(v));
#else
  memcpy(to, &v, sizeof v);
#endif
}

// Return a * b + c, rounded once.
#if defined(__AVX512F__) || defined(BLOCKSPARSE_EMULATED_VECTORS)
BLOCKSPARSE_INLINE Vector<float> fused_multiply_add(Vector<float> a, Vector<float> b, Vector<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#else
  struct Halves {
    __m256 half[2];
  };
  const Halves x = bits<Halves>(a), y = bits<Halves>(b), z = bits<Halves>(c);
  return bits<Vector<float>>(
      Halves{{_mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]), _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1])}});
#endif
}
#endif

// Return v, at least `low` and at most `high`; NaN stays NaN. Compilers make a comparison and a blend of each bound.
BLOCKSPARSE_INLINE Vector<float> clamped(Vector<float> v, Vector<float> low, Vector<float> high) {
#if defined(__AVX512F__)
  return _mm512_min_ps(high, _mm512_max_ps(low, v));
#elif defined(__AVX2__) && !defined(BLOCKSPARSE_EMULATED_VECTORS)
  return _mm256_min_ps(high, _mm256_max_ps(low, v));
#else
  v = v < low ? low : v;
  return v > high ? high : v;
#endif
}

template <class V, size_t... I>
BLOCKSPARSE_INLINE void interleave(V a, V b, V& low, V& high, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  low = __builtin_shufflevector(a, b, (I % 2 ? n + I / 2 : I / 2)...);
  high = __builtin_shufflevector(a, b, (I % 2 ? n + n / 2 + I / 2 : n / 2 + I / 2)...);
}

// Transpose kRows vectors (a vector's number of lanes, or fewer): the first lanes of all side by side, then the second
// lanes. log2(kRows) rounds interleave row i with row i + kRows / 2.
template <class T, int kRows = kLanes<T>>
BLOCKSPARSE_INLINE void transpose(Vector<T>* v) {
#pragma GCC unroll 4
  for (int round = 1; round < kRows; round *= 2) {
    Vector<T> w[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows / 2; ++i)
      interleave(v[i], v[i + kRows / 2], w[2 * i], w[2 * i + 1], std::make_index_sequence<kLanes<T>>{});
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) v[i] = w[i];
  }
}

template <class T>
BLOCKSPARSE_INLINE T smaller(T a, T b) {
  return b < a ? b : a;
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
