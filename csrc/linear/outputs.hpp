// Write the sums of a linear product: bias, activation, and the transposition from [outputs, tokens] to [tokens,
// outputs].
//
// Units of 4 bytes are transposed, two outputs each for 16-bit types: half the work, and whole cache lines of a token.
#pragma once

#include "isa/activation.hpp"
#include "isa/element.hpp"
#include "linear/linear.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {

// The last steps when sums are written: bias and ReLU. (GELU and SiLU would be too much code here.)
template <class E>
struct Finish {
  const typename E::Storage* bias;  // of the first output, or null
  bool relu;

  bool needed() const { return bias || relu; }

  __attribute__((always_inline)) Vector<typename E::Sum> operator()(Vector<typename E::Sum> v, int64_t output) const {
    if (bias) v = v + broadcast(E::to_sum(bias[output]));
    return relu ? activated(v, Activation::kRelu) : v;
  }
};

// Read a vector of tokens of one output, or of two neighbouring ones, in the order of memory.
template <class E, class Each>
BLOCKSPARSE_INLINE auto output_units(const typename E::Sum* sums, int64_t width, int64_t output, const Each& each) {
  if constexpr (sizeof(typename E::Storage) == 2) {
    return E::pairs(each(load(sums), output), each(load(sums + width), output + 1));
  } else {
    return each(load(sums), output);
  }
}

// Write kUnits units of up to a vector of tokens. Whole vectors bypass the caches if y `streams`.
template <class E, int kUnits>
void turn_outputs(const typename E::Sum* sums, int64_t width, int64_t tokens, int64_t output, const Finish<E>& finish,
                  typename E::Storage* y, int64_t stride, bool streams) {
  const auto as_they_are = [](Vector<typename E::Sum> v, int64_t) { return v; };
  using Units = decltype(output_units<E>(sums, width, output, as_they_are));
  using Unit = std::remove_reference_t<decltype(Units{}[0])>;
  constexpr int n = kLanes<Unit>, kOutputs = sizeof(Unit) / sizeof(typename E::Storage);
  Units v[kUnits];
  if (finish.needed()) {
#pragma GCC unroll 16
    for (int i = 0; i < kUnits; ++i)
      v[i] = output_units<E>(sums + i * kOutputs * width, width, output + i * kOutputs, finish);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kUnits; ++i) v[i] = output_units<E>(sums + i * kOutputs * width, width, output, as_they_are);
  }
  transpose<Unit, kUnits>(v);
  if (kUnits == n && tokens == n) {
    if (streams && reinterpret_cast<uintptr_t>(y) % kVectorBytes == 0) {
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) stream(y + i * stride, v[i]);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) memcpy(y + i * stride, &v[i], sizeof v[i]);
    }
    return;
  }
  Unit units[kUnits * n];
#pragma GCC unroll 16
  for (int i = 0; i < kUnits; ++i) store(units + i * n, v[i]);
  for (int64_t t = 0; t < tokens; ++t) memcpy(y + t * stride, units + t * kUnits, kUnits * sizeof(Unit));
}

template <class E>
void finish_sums(const LinearOutputs& outputs) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  const auto* bias = static_cast<const typename E::Storage*>(outputs.bias);
  Sum* sums = static_cast<Sum*>(outputs.sums);
  for (int64_t o = 0; o < outputs.count; ++o, sums += outputs.width) {
    const Vector<Sum> shift = broadcast(bias ? E::to_sum(bias[o]) : -Sum(0));  // to which -0 adds as -0
    for (int64_t t = 0; t < outputs.width; t += n)
      store(sums + t, activated(load(sums + t) + shift, outputs.activation));
  }
}

template <class E>
void write_outputs(const LinearOutputs& outputs) {
  using Sum = typename E::Sum;
  using Storage = typename E::Storage;
  constexpr int n = kLanes<Sum>, kPack = sizeof(Storage) == 2 ? 2 : 1;
  const bool relu = outputs.activation == Activation::kRelu, early = !relu && outputs.activation != Activation::kNone;
  const Finish<E> finish = {early ? nullptr : static_cast<const Storage*>(outputs.bias), relu};
  if (early) finish_sums<E>(outputs);
  const int64_t width = outputs.width, stride = outputs.y_stride;
  for (int64_t t = 0; t < outputs.tokens; t += n) {
    const int64_t tokens = smaller<int64_t>(n, outputs.tokens - t);
    const Sum* sums = static_cast<const Sum*>(outputs.sums) + t;
    Storage* y = static_cast<Storage*>(outputs.y) + t * stride;
    int64_t o = 0;
#define BLOCKSPARSE_UNITS(units)                                     \
  for (; o + (units) * kPack <= outputs.count; o += (units) * kPack) \
  turn_outputs<E, (units)>(sums + o * width, width, tokens, o, finish, y + o, stride, outputs.streams)
    BLOCKSPARSE_UNITS(n);
    if constexpr (n >= 4) BLOCKSPARSE_UNITS(n / 2);
    if constexpr (n >= 8) BLOCKSPARSE_UNITS(n / 4);
    BLOCKSPARSE_UNITS(1);
#undef BLOCKSPARSE_UNITS
    if (o < outputs.count) {  // half a unit
      Storage last[n];
      E::store_sums(last, finish(load(sums + o * width), o));
      for (int64_t i = 0; i < tokens; ++i) y[i * stride + o] = last[i];
    }
  }
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
