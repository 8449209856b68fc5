// Layer norms for one instruction set. Rows stay in the L1 cache while they are read several times.
#include <math.h>

#include "isa/element.hpp"
#include "norm/norm.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

// Sum term(i, count) over the elements [0, features), in an order that depends on `features` alone. Four sums run side
// by side, since each addition waits for the one before.
template <class E, class Term>
BLOCKSPARSE_INLINE typename E::Sum sum_of(int64_t features, const Term& term) {
  using Sum = typename E::Sum;
  constexpr int n = kLanes<Sum>;
  Vector<Sum> sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * n <= features; i += 4 * n)
    for (int k = 0; k < 4; ++k) sums[k] += term(i + k * n, int64_t(n));
  for (; i + n <= features; i += n) sums[0] += term(i, int64_t(n));
  if (i < features) {
    const Vector<Sum> last = term(i, features - i);
    for (int l = 0; l < features - i; ++l) sums[1][l] += last[l];
  }
  const Vector<Sum> all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  Sum sum = 0;
  for (int l = 0; l < n; ++l) sum += all[l];
  return sum;
}

template <class E>
void forward(const NormForward& norm, int64_t first_row, int64_t last_row) {
  using Storage = typename E::Storage;
  using Sum = typename E::Sum;
  using V = Vector<Sum>;
  const int64_t features = norm.features, groups = norm.groups;
  for (int64_t at = first_row * groups; at < last_row * groups; ++at) {
    const int64_t row = at / groups, offset = at % groups * features;
    const Storage* const x = row_of<Storage>(norm.x, row) + offset;
    const Sum mean = sum_of<E>(features, [=](int64_t i, int64_t count)
                                             __attribute__((always_inline)) { return read_units<E>(x + i, count); }) /
                     features;
    const Sum variance = sum_of<E>(features,
                                   [=](int64_t i, int64_t count) __attribute__((always_inline)) {
                                     const V v = read_units<E>(x + i, count) - mean;
                                     return v * v;
                                   }) /
                         features;
    const Sum scale = 1 / Sum(sqrt(variance + Sum(norm.epsilon)));
    if (norm.scale) static_cast<Sum*>(norm.scale)[at] = scale;
    Storage *const normed = row_of<Storage>(norm.normed, row), *const y = row_of<Storage>(norm.y, row);
    const Storage *const factor = row_of<Storage>(norm.factor, row), *const term = row_of<Storage>(norm.term, row);
    const auto *const gain = static_cast<const Storage*>(norm.gain), *bias = static_cast<const Storage*>(norm.bias);
    in_vectors<E>(0, features, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      V v = (read_units<E>(x + i, count) - mean) * scale;
      if (normed) write_sums<E>(normed + offset + i, v, count, false);
      if (!y) return;
      v = v * read_units<E>(gain + offset + i, count) + read_units<E>(bias + offset + i, count);
      if (factor) v *= read_units<E>(factor + offset + i, count);
      if (term) v += read_units<E>(term + offset + i, count);
      if (norm.relu) v = v < Sum(0) ? V{} : v;
      write_sums<E>(y + offset + i, v, count, false);
    });
  }
}

template <class E>
void backward(const NormBackward& norm, int64_t first_row, int64_t last_row) {
  using Storage = typename E::Storage;
  using Sum = typename E::Sum;
  using V = Vector<Sum>;
  const int64_t features = norm.features, groups = norm.groups;
  for (int64_t at = first_row * groups; at < last_row * groups; ++at) {
    const int64_t row = at / groups, offset = at % groups * features;
    const Storage* const normed = row_of<Storage>(norm.normed, row) + offset;
    const Storage* const gain = static_cast<const Storage*>(norm.gain) + offset;
    const Storage* grad = row_of<Storage>(norm.grad, row) + offset;
    if (norm.grad_affine.data) {
      const auto* const bias = static_cast<const Storage*>(norm.bias) + offset;
      const Storage *const y = row_of<Storage>(norm.y, row), *const factor = row_of<Storage>(norm.factor, row);
      Storage *const to = row_of<Storage>(norm.grad_affine, row) + offset, *grad_factor = nullptr;
      if (factor) grad_factor = row_of<Storage>(norm.grad_factor, row);
      in_vectors<E>(0, features, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
        V v = read_units<E>(grad + i, count);
        if (y) v = read_units<E>(y + offset + i, count) <= Sum(0) ? V{} : v;
        if (factor) {
          const V affine =
              read_units<E>(normed + i, count) * read_units<E>(gain + i, count) + read_units<E>(bias + i, count);
          write_sums<E>(grad_factor + offset + i, v * affine, count, false);
          v *= read_units<E>(factor + offset + i, count);
        }
        write_sums<E>(to + i, v, count, false);
      });
      grad = to;
    }
    const auto at_normed = [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      return read_units<E>(grad + i, count) * read_units<E>(gain + i, count);
    };
    const Sum scale = static_cast<const Sum*>(norm.scale)[at];
    const Sum mean = sum_of<E>(features, at_normed) / features;
    const Sum slope = sum_of<E>(features,
                                [=](int64_t i, int64_t count) __attribute__((always_inline)) {
                                  return at_normed(i, count) * read_units<E>(normed + i, count);
                                }) /
                      features;
    Storage* const grad_x = row_of<Storage>(norm.grad_x, row) + offset;
    in_vectors<E>(0, features, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      const V v = at_normed(i, count) - mean - read_units<E>(normed + i, count) * slope;
      write_sums<E>(grad_x + i, v * scale, count, false);
    });
  }
}

template <class E>
void sums(const NormBackward& norm, int64_t rows, int64_t first, int64_t last) {
  using Storage = typename E::Storage;
  using Sum = typename E::Sum;
  using V = Vector<Sum>;
  using Wide = Plain<Sum>;
  const InputRows grad = norm.grad_affine.data ? InputRows{norm.grad_affine.data, norm.grad_affine.stride} : norm.grad;
  auto *const gains = static_cast<Sum*>(norm.grad_gain), *const biases = static_cast<Sum*>(norm.grad_bias);
  in_vectors<E>(first, last, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
    V gain = {}, bias = {};
    for (int64_t row = 0; row < rows; ++row) {
      const V v = read_units<E>(row_of<Storage>(grad, row) + i, count);
      gain += v * read_units<E>(row_of<Storage>(norm.normed, row) + i, count);
      bias += v;
    }
    write_sums<Wide>(gains + i, read_units<Wide>(gains + i, count) + gain, count, false);
    write_sums<Wide>(biases + i, read_units<Wide>(biases + i, count) + bias, count, false);
  });
}

template <class Real>
void weights(const WeightNorm& norm, int64_t row) {
  using E = Plain<Real>;
  const auto *values = static_cast<const Real*>(norm.values), *grad = static_cast<const Real*>(norm.grad);
  const auto* gains = static_cast<const Real*>(norm.gain);
  for (int64_t o = 0; o < norm.outputs; ++o) {
    const auto in_blocks = [&](const auto& run) __attribute__((always_inline)) {
      for (int64_t b = norm.start[row]; b < norm.start[row + 1]; ++b) {
        const int64_t at = (b * norm.outputs + o) * norm.inner;
        in_vectors<E>(at, at + norm.inner, run);
      }
    };
    Vector<Real> squares = {}, products = {};
    in_blocks([&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vector<Real> v = read_units<E>(values + i, count);
      squares += v * v;
      if (grad) products += v * read_units<E>(grad + i, count);
    });
    Real square = 0, product = 0;
    for (int l = 0; l < kLanes<Real>; ++l) square += squares[l], product += products[l];
    const Real length = __builtin_sqrt(square), least = Real(norm.least), divisor = length < least ? least : length;
    const int64_t output = row * norm.outputs + o;
    const Real scale = (gains ? gains[output] : Real(1)) / divisor;
    // Below the lower bound the divisor is constant.
    const Real slope = length < least ? 0 : scale * product / (length * length);
    Real* const to = static_cast<Real*>(norm.to);
    in_blocks([&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vector<Real> v = read_units<E>(values + i, count);
      write_sums<E>(to + i, grad ? read_units<E>(grad + i, count) * scale - v * slope : v * scale, count, false);
    });
    if (grad && norm.grad_gain) static_cast<Real*>(norm.grad_gain)[output] = product / divisor;
  }
}

template <class E>
constexpr NormKernels table() {
  return {forward<E>, backward<E>, weights<typename E::Sum>, sums<E>};
}

}  // namespace

const NormKernels& select_norm(DType dtype) {
  static constexpr NormKernels float32 = table<Float32>(), float64 = table<Float64>(), bfloat16 = table<BFloat16>(),
                               float16 = table<Float16>();
  return by_dtype(dtype, float32, float64, bfloat16, float16);
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
