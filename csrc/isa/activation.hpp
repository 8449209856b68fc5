// Activations and gates on vectors of sums.
#pragma once

#include <math.h>

#include "core/types.hpp"
#include "isa/simd.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

// e^x = power * (1 + rest), as in Cephes' expf: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
struct Exponential {
  Vector<float> power, rest;
};
BLOCKSPARSE_INLINE Exponential exponential_parts(Vector<float> x) {
  using V = Vector<float>;
  x = clamped(x, broadcast(-87.3f), broadcast(88.3f));
  const V magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the lowest bits
  const V shifted = x * 1.44269504088896341f + magic;
  const V n = shifted - magic;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {bits<V>((bits<Vector<uint32_t>>(shifted) << 23) + 0x3f800000u), p * r * r + r};
}

// e^x within 2 ulp; NaN stays NaN.
BLOCKSPARSE_INLINE Vector<float> exponential(Vector<float> x) {
  const Exponential e = exponential_parts(x);
  return (e.rest + 1.0f) * e.power;
}

// e^x - 1, accurate near 0.
BLOCKSPARSE_INLINE Vector<float> exponential_minus_1(Vector<float> x) {
  const Exponential e = exponential_parts(x);
  return e.power * e.rest + (e.power - 1.0f);
}

// The sigmoid; results that would be subnormal are 0, also at -infinity.
BLOCKSPARSE_INLINE Vector<float> logistic(Vector<float> x) {
  return x < -87.0f ? Vector<float>{} : 1.0f / (1.0f + exponential(-x));
}

// x * sigmoid(x) as in PyTorch: -0 if e^-x overflows, NaN at -infinity.
BLOCKSPARSE_INLINE Vector<float> silu(Vector<float> x) {
  return x / (x < -88.3f ? broadcast(__builtin_inff()) : 1.0f + exponential(-x));
}

// tanh as in Cephes' tanhf, within 2 ulp: a polynomial where 1 - 2 / (e^2x + 1) would cancel. NaN stays NaN, -0 stays
// -0.
BLOCKSPARSE_INLINE Vector<float> tangent(Vector<float> x) {
  using V = Vector<float>;
  const V size = x < 0.0f ? -x : x, square = x * x;
  V p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const V near = (p * square + 1.0f) * x, far = 1.0f - 2.0f / (1.0f + exponential(size + size));
  return size < 0.625f ? near : x < 0.0f ? -far : far;
}

// 1 - erf(x) with a relative error of 1.2e-7 (Press et al., Numerical Recipes in C, 1992, section 6.2). Computing erf
// first would lose all digits where GELU is small.
BLOCKSPARSE_INLINE Vector<float> complementary_error(Vector<float> x) {
  using V = Vector<float>;
  const V size = x < 0.0f ? -x : x;
  const V t = 1.0f / (1.0f + 0.5f * size);
  V p = t * 0.17087277f - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const V power = p - size * size, y = power < -87.0f ? V{} : t * exponential(power);
  return x < 0.0f ? 2.0f - y : y;
}

BLOCKSPARSE_INLINE Vector<float> activated(Vector<float> x, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return x < 0.0f ? Vector<float>{} : x;
    case Activation::kGelu:
      return 0.5f * x * complementary_error(x * -0.70710678118654752f);
    case Activation::kSilu:
      return silu(x);
    case Activation::kNone:
      break;
  }
  return x;
}

// float64 is for checks, so it calls the math library.
BLOCKSPARSE_INLINE Vector<double> activated(Vector<double> x, Activation activation) {
  if (activation == Activation::kNone) return x;
  for (int i = 0; i < kLanes<double>; ++i) {
    const double v = x[i];
    if (activation == Activation::kRelu) x[i] = v < 0 ? 0 : v;
    if (activation == Activation::kGelu) x[i] = 0.5 * v * (1 + ::erf(v * 0.70710678118654752440));
    if (activation == Activation::kSilu) x[i] = v / (1 + ::exp(-v));
  }
  return x;
}

BLOCKSPARSE_INLINE Vector<double> exponential(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = ::exp(x[i]);
  return x;
}

BLOCKSPARSE_INLINE Vector<double> exponential_minus_1(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = ::expm1(x[i]);
  return x;
}

BLOCKSPARSE_INLINE Vector<double> logistic(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = 1 / (1 + ::exp(-x[i]));
  return x;
}

BLOCKSPARSE_INLINE Vector<double> tangent(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = ::tanh(x[i]);
  return x;
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
