// The softmax of scores that come in parts.
#pragma once

#include "isa/activation.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

template <class Real>
constexpr Real kNothing = -__builtin_inf();  // the score of an invisible key

template <class Real>
void cap(Real* scores, int64_t count, Real softcap) {
  for (int64_t j = 0; j < count; j += kLanes<Real>) store(scores + j, softcap * tangent(load(scores + j) / softcap));
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

// The sum of exponentials relative to the largest score. `sum` is not 0 without scores if one of them is NaN.
template <class Real>
struct SoftmaxSum {
  Real largest = kNothing<Real>, sum = 0;

  bool is_empty() const { return largest == kNothing<Real> && sum == 0; }
  Real log_sum() const { return is_empty() ? kNothing<Real> : largest + ::log(sum); }

  // Replace more scores by their exponentials, and return the factor of sums that were weighted with earlier ones.
  Real add(Real* scores, int64_t width) {
    constexpr int n = kLanes<Real>;
    Vector<Real> most = load(scores);
    for (int64_t j = n; j < width; j += n) {
      const Vector<Real> s = load(scores + j);
      most = s > most ? s : most;
    }
    Real shift = largest;
    for (int i = 0; i < n; ++i) shift = most[i] > shift ? most[i] : shift;
    Vector<Real> all = {};
    for (int64_t j = 0; j < width; j += n) {
      const Vector<Real> p = power(scores + j, shift);
      store(scores + j, p);
      all += p;
    }
    const Real before = largest == kNothing<Real> ? 0 : exponential(broadcast(largest - shift))[0];
    sum = sum * before + sum_of<Real>(all), largest = shift;
    return before;
  }
};

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
