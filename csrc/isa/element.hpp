// Element types: how they are stored, what the register tile multiplies, what it accumulates in.
//
// A Unit is what one lane holds at one step of a sum. It is one number for most types, and a pair of neighbours along
// the sum (kPack = 2) where the CPU multiplies pairs of bfloat16.
#pragma once

#include "core/types.hpp"
#include "isa/simd.hpp"

#if defined(__AVX512BF16__) || defined(BLOCKSPARSE_EMULATED_PAIRS)
#define BLOCKSPARSE_PAIRS
#endif

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

template <class Real>
struct Plain {  // float32 and float64
  using Storage = Real;
  using Unit = Real;
  using Sum = Real;
  static constexpr int kPack = 1;
  static constexpr bool kConvertsWeights = false;
  BLOCKSPARSE_INLINE Vector<Unit> units(const Storage* from) { return load(from); }
  BLOCKSPARSE_INLINE void store_sums(Storage* to, Vector<Sum> v) { store(to, v); }
  BLOCKSPARSE_INLINE Sum to_sum(Storage value) { return value; }
  BLOCKSPARSE_INLINE Vector<Sum> multiply_add(Unit w, Vector<Unit> x, Vector<Sum> sum) { return sum + w * x; }
  BLOCKSPARSE_INLINE Vector<Sum> multiply_add_lanes(Vector<Unit> w, Vector<Unit> x, Vector<Sum> sum) {
    return sum + w * x;
  }
};
using Float32 = Plain<float>;
using Float64 = Plain<double>;

struct BFloat16Bits {
  using Half = uint16_t;
  BLOCKSPARSE_INLINE float widen(Half value) { return bits<float>(uint32_t(value) << 16); }
  BLOCKSPARSE_INLINE Vector<float> widen(const Half* from) {
    typedef Half Narrow __attribute__((vector_size(kVectorBytes / 2)));
    Narrow narrow;
    memcpy(&narrow, from, sizeof narrow);
    return bits<Vector<float>>(__builtin_convertvector(narrow, Vector<uint32_t>) << 16);
  }
  BLOCKSPARSE_INLINE Vector<uint32_t> rounded(Vector<float> v) {
    const Vector<uint32_t> wide = bits<Vector<uint32_t>>(v);
    const Vector<uint32_t> near = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;  // to nearest, ties to even
    const Vector<uint32_t> nan = (wide >> 16) | 0x40;
    return v == v ? near : nan;
  }
  BLOCKSPARSE_INLINE void narrow(Half* to, Vector<float> v) {
    typedef Half Narrow __attribute__((vector_size(kVectorBytes / 2)));
    const Narrow narrow = __builtin_convertvector(rounded(v), Narrow);
    memcpy(to, &narrow, sizeof narrow);
  }
  BLOCKSPARSE_INLINE Vector<uint32_t> pairs(Vector<float> low, Vector<float> high) {
    return rounded(low) | rounded(high) << 16;
  }
};

struct Float16Bits {
  using Half = uint16_t;
  BLOCKSPARSE_INLINE float widen(Half h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return bits<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // A subnormal half is a normal float, which must survive where subnormal floats count as 0.
    return bits<float>(sign | (rest < 0x400 ? bits<uint32_t>(float(rest) * 0x1p-24f) : (rest << 13) + 0x38000000));
#endif
  }
  BLOCKSPARSE_INLINE Half narrow(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    const uint32_t wide = bits<uint32_t>(value), sign = wide >> 16 & 0x8000, rest = wide & 0x7fffffff;
    if (rest > 0x7f800000) return Half(sign | 0x7e00);   // NaN
    if (rest >= 0x477ff000) return Half(sign | 0x7c00);  // rounds to infinity
    if (rest < 0x38800000)                               // subnormal: adding 0.5 leaves its bits, rounded, at the end
      return Half(sign | (bits<uint32_t>(bits<float>(rest) + 0.5f) - 0x3f000000));
    return Half(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
#endif
  }
  BLOCKSPARSE_INLINE Vector<float> widen(const Half* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    Vector<float> v;
    for (int i = 0; i < kLanes<float>; i += 8) {
      const __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
      memcpy(reinterpret_cast<char*>(&v) + i * sizeof(float), &eight, sizeof eight);
    }
    return v;
#else
    Vector<float> v;
    for (int i = 0; i < kLanes<float>; ++i) v[i] = widen(from[i]);
    return v;
#endif
  }
  BLOCKSPARSE_INLINE void narrow(Half* to, Vector<float> v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (int i = 0; i < kLanes<float>; i += 8) {
      __m256 eight;
      memcpy(&eight, reinterpret_cast<const char*>(&v) + i * sizeof(float), sizeof eight);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
    }
#else
    for (int i = 0; i < kLanes<float>; ++i) to[i] = narrow(float(v[i]));
#endif
  }
  BLOCKSPARSE_INLINE Vector<uint32_t> pairs(Vector<float> low, Vector<float> high) {
    typedef Half Narrow __attribute__((vector_size(kVectorBytes / 2)));
    Narrow below, above;
    narrow(reinterpret_cast<Half*>(&below), low);
    narrow(reinterpret_cast<Half*>(&above), high);
    return __builtin_convertvector(below, Vector<uint32_t>) | __builtin_convertvector(above, Vector<uint32_t>) << 16;
  }
};

template <class Bits>
struct Widened {  // 16 bits in memory, float32 in registers
  using Storage = typename Bits::Half;
  using Unit = float;
  using Sum = float;
  static constexpr int kPack = 1;
  static constexpr bool kConvertsWeights = true;
  BLOCKSPARSE_INLINE Vector<Unit> units(const Storage* from) { return Bits::widen(from); }
  BLOCKSPARSE_INLINE void store_sums(Storage* to, Vector<Sum> v) { Bits::narrow(to, v); }
  // Each lane holds two consecutive numbers.
  BLOCKSPARSE_INLINE Vector<uint32_t> pairs(Vector<Sum> low, Vector<Sum> high) { return Bits::pairs(low, high); }
  BLOCKSPARSE_INLINE Sum to_sum(Storage value) { return Bits::widen(value); }
  BLOCKSPARSE_INLINE Vector<Sum> multiply_add(Unit w, Vector<Unit> x, Vector<Sum> sum) { return sum + w * x; }
  BLOCKSPARSE_INLINE Vector<Sum> multiply_add_lanes(Vector<Unit> w, Vector<Unit> x, Vector<Sum> sum) {
    return sum + w * x;
  }
};
using BFloat16 = Widened<BFloat16Bits>;
using Float16 = Widened<Float16Bits>;

#if defined(BLOCKSPARSE_PAIRS)
// Emulates VDPBF16PS (Intel's Software Developer's Manual, volume 2): two fused multiply-adds, the upper numbers first.
// The instruction always flushes subnormal numbers to 0; here the thread's mode decides (FlushSubnormals).
BLOCKSPARSE_INLINE Vector<float> multiply_add_pairs(Vector<uint32_t> a, Vector<uint32_t> b, Vector<float> sum) {
#if defined(BLOCKSPARSE_EMULATED_PAIRS)
  using Floats = Vector<float>;
  const Floats upper = fused_multiply_add(bits<Floats>(a & 0xffff0000u), bits<Floats>(b & 0xffff0000u), sum);
  return fused_multiply_add(bits<Floats>(a << 16), bits<Floats>(b << 16), upper);
#else
  return _mm512_dpbf16_ps(sum, bits<__m512bh>(a), bits<__m512bh>(b));
#endif
}

#if !defined(BLOCKSPARSE_EMULATED_PAIRS)
// Interleave the lower and the upper half.
BLOCKSPARSE_INLINE Vector<uint32_t> interleave_halves(__m512bh halves) {
  const Vector<uint32_t> lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vector<uint32_t> from = lane | (lane + 16) << 16;
  return bits<Vector<uint32_t>>(_mm512_permutexvar_epi16(bits<__m512i>(from), bits<__m512i>(halves)));
}
#endif

struct BFloat16Pairs {  // two products and two sums per lane and instruction
  using Storage = uint16_t;
  using Unit = uint32_t;
  using Sum = float;
  static constexpr int kPack = 2;
  static constexpr bool kConvertsWeights = false;  // forward; the transposed product pairs the rows of each block
  BLOCKSPARSE_INLINE Vector<Unit> units(const Storage* from) {
    Vector<Unit> v;
    memcpy(&v, from, sizeof v);
    return v;
  }
  BLOCKSPARSE_INLINE void store_sums(Storage* to, Vector<Sum> v) { BFloat16Bits::narrow(to, v); }
  BLOCKSPARSE_INLINE Vector<Unit> pairs(Vector<Sum> low, Vector<Sum> high) {
#if defined(BLOCKSPARSE_EMULATED_PAIRS)
    return BFloat16Bits::pairs(low, high);
#else
    return interleave_halves(_mm512_cvtne2ps_pbh(bits<__m512>(high), bits<__m512>(low)));
#endif
  }
  // Round two vectors, and put the second behind the first.
  BLOCKSPARSE_INLINE Vector<Unit> joined(Vector<Sum> first, Vector<Sum> second) {
#if defined(BLOCKSPARSE_EMULATED_PAIRS)
    Storage both[2 * kLanes<Sum>];
    store_sums(both, first);
    store_sums(both + kLanes<Sum>, second);
    return units(both);
#else
    return bits<Vector<Unit>>(_mm512_cvtne2ps_pbh(bits<__m512>(second), bits<__m512>(first)));
#endif
  }
  BLOCKSPARSE_INLINE Sum to_sum(Storage value) { return BFloat16Bits::widen(value); }
  BLOCKSPARSE_INLINE Vector<Sum> multiply_add(Unit w, Vector<Unit> x, Vector<Sum> sum) {
    return multiply_add_pairs(broadcast(w), x, sum);
  }
  BLOCKSPARSE_INLINE Vector<Sum> multiply_add_lanes(Vector<Unit> w, Vector<Unit> x, Vector<Sum> sum) {
    return multiply_add_pairs(w, x, sum);
  }
};
#endif

// Load the first `count` elements, followed by zeros. A whole vector is one load: GCC would copy it through the stack
// in halves, and reading these back stalls for 12 cycles on AVX2.
template <class E>
BLOCKSPARSE_INLINE Vector<typename E::Sum> read_units(const typename E::Storage* from, int64_t count) {
  if (count == kLanes<typename E::Sum>) return E::units(from);
  typename E::Storage part[kLanes<typename E::Sum>] = {};
  memcpy(part, from, count * sizeof *part);
  return E::units(part);
}

// Store, or add, the first `count` elements of a vector of sums. Without `add` a whole vector is one store.
template <class E>
BLOCKSPARSE_INLINE void write_sums(typename E::Storage* to, Vector<typename E::Sum> v, int64_t count, bool add) {
  constexpr int n = kLanes<typename E::Sum>;
  if (!add && count == n) return E::store_sums(to, v);
  typename E::Storage part[n];
  if (add) {
    memset(part, 0, sizeof part);
    memcpy(part, to, count * sizeof *part);
    for (int l = 0; l < n; ++l) v[l] += E::to_sum(part[l]);
  }
  E::store_sums(part, v);
  memcpy(to, part, count * sizeof *part);
}

// Call run(i, count) for the elements [begin, end): whole vectors of sums, then the rest.
template <class E, class Run>
BLOCKSPARSE_INLINE void in_vectors(int64_t begin, int64_t end, const Run& run) {
  constexpr int n = kLanes<typename E::Sum>;
  for (; begin + n <= end; begin += n) run(begin, int64_t(n));
  if (begin < end) run(begin, end - begin);
}

// Return a pointer to a row, or null.
template <class T>
BLOCKSPARSE_INLINE const T* row_of(const InputRows& rows, int64_t row) {
  if (rows.index) row = rows.index[row];
  return rows.data ? static_cast<const T*>(rows.data) + row * rows.stride : nullptr;
}

template <class T>
BLOCKSPARSE_INLINE T* row_of(const OutputRows& rows, int64_t row) {
  return rows.data ? static_cast<T*>(rows.data) + row * rows.stride : nullptr;
}

// Choose the table of a dtype.
template <class Kernels>
BLOCKSPARSE_INLINE const Kernels& by_dtype(DType dtype, const Kernels& float32, const Kernels& float64,
                                           const Kernels& bfloat16, const Kernels& float16) {
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
