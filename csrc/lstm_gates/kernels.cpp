// The gates of one step of a recurrence in one pass over memory, forward and backward.
#include "isa/activation.hpp"
#include "isa/element.hpp"
#include "lstm_gates/lstm_gates.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

template <class E>
BLOCKSPARSE_INLINE void write(typename E::Storage* to, Vector<typename E::Sum> v, int64_t count) {
  write_sums<E>(to, v, count, false);
}

// Features per pass over the gates. The CPU overlaps the operations of several vectors only if each vector has a short
// chain of them, so the tanh of the states is a second pass: together they take half the time of one.
constexpr int64_t kPassFeatures = 128;

template <class E>
void forward(const GatesForward& step, const RowsPart& part) {
  using Storage = typename E::Storage;
  using Sum = typename E::Sum;
  using V = Vector<Sum>;
  using State = Plain<Sum>;
  const int64_t hidden = step.hidden;
  const Storage* const gain = static_cast<const Storage*>(step.gain);
  for (int64_t row = part.first_row; row < part.last_row; ++row) {
    const Storage *const z = row_of<Storage>(step.z, row), *const add = row_of<Storage>(step.add, row);
    const Sum* const c = row_of<Sum>(step.c, row);
    Storage *const h = row_of<Storage>(step.h, row), *const gates = row_of<Storage>(step.gates, row);
    Sum* const c_out = row_of<Sum>(step.c_out, row);
    for (int64_t begin = part.begin; begin < part.end; begin += kPassFeatures) {
      const int64_t end = smaller(begin + kPassFeatures, part.end);
      Sum output_gates[kPassFeatures];
      Sum* const outputs = output_gates;
      in_vectors<E>(begin, end, [=](int64_t j, int64_t count) __attribute__((always_inline)) {
        const auto before_gate = [=](int64_t at) __attribute__((always_inline)) {
          V v = read_units<E>(z + at, count);
          if (gain) v *= read_units<E>(gain + at, count);
          if (add) v += read_units<E>(add + at, count);
          return v;
        };
        const V i = logistic(before_gate(j)), f = logistic(before_gate(hidden + j));
        const V g = tangent(before_gate(2 * hidden + j)), o = logistic(before_gate(3 * hidden + j));
        write<State>(c_out + j, f * read_units<State>(c + j, count) + i * g, count);
        store(outputs + j - begin, o);
        if (!gates) return;
        write<E>(gates + j, i, count);
        write<E>(gates + hidden + j, f, count);
        write<E>(gates + 2 * hidden + j, g, count);
        write<E>(gates + 3 * hidden + j, o, count);
      });
      in_vectors<E>(begin, end, [=](int64_t j, int64_t count) __attribute__((always_inline)) {
        write<E>(h + j, load(outputs + j - begin) * tangent(read_units<State>(c_out + j, count)), count);
      });
    }
  }
}

template <class E>
void backward(const GatesBackward& step, const RowsPart& part) {
  using Storage = typename E::Storage;
  using Sum = typename E::Sum;
  using V = Vector<Sum>;
  using State = Plain<Sum>;
  const int64_t hidden = step.hidden;
  for (int64_t row = part.first_row; row < part.last_row; ++row) {
    const Storage* const gates = row_of<Storage>(step.gates, row);
    const Storage *const grad_h = row_of<Storage>(step.grad_h, row), *const grad_y = row_of<Storage>(step.grad_y, row);
    const Sum *const c_before = row_of<Sum>(step.c_before, row), *const c = row_of<Sum>(step.c, row);
    const Sum* const grad_c = row_of<Sum>(step.grad_c, row);
    Storage* const grad_pre = row_of<Storage>(step.grad_pre, row);
    Sum* const grad_c_before = row_of<Sum>(step.grad_c_before, row);
    in_vectors<E>(part.begin, part.end, [=](int64_t j, int64_t count) __attribute__((always_inline)) {
      const V i = read_units<E>(gates + j, count), f = read_units<E>(gates + hidden + j, count);
      const V g = read_units<E>(gates + 2 * hidden + j, count), o = read_units<E>(gates + 3 * hidden + j, count);
      const V before = read_units<State>(c_before + j, count), t = tangent(read_units<State>(c + j, count));
      V at_h = {};
      if (grad_h) at_h += read_units<E>(grad_h + j, count);
      if (grad_y) at_h += read_units<E>(grad_y + j, count);
      V at_c = at_h * o * (Sum(1) - t * t);
      if (grad_c) at_c += read_units<State>(grad_c + j, count);
      write<State>(grad_c_before + j, at_c * f, count);
      write<E>(grad_pre + j, at_c * g * (i * (Sum(1) - i)), count);
      write<E>(grad_pre + hidden + j, at_c * before * (f * (Sum(1) - f)), count);
      write<E>(grad_pre + 2 * hidden + j, at_c * i * (Sum(1) - g * g), count);
      write<E>(grad_pre + 3 * hidden + j, at_h * t * (o * (Sum(1) - o)), count);
    });
  }
}

template <class E>
void hidden_forward(const HiddenForward& step, const RowsPart& part) {
  using Storage = typename E::Storage;
  using V = Vector<typename E::Sum>;
  const int64_t hidden = step.hidden;
  const Hidden kind = step.kind;
  const Storage* const bias = static_cast<const Storage*>(step.bias);
  for (int64_t row = part.first_row; row < part.last_row; ++row) {
    const Storage *const z = row_of<Storage>(step.z, row), *const add = row_of<Storage>(step.add, row);
    const Storage* const h = row_of<Storage>(step.h, row);
    Storage* const h_out = row_of<Storage>(step.h_out, row);
    in_vectors<E>(part.begin, part.end, [=](int64_t j, int64_t count) __attribute__((always_inline)) {
      const auto of_state = [=](int64_t at) __attribute__((always_inline)) {
        const V v = read_units<E>(z + at, count);
        return bias ? v + read_units<E>(bias + at, count) : v;
      };
      const V first = read_units<E>(add + j, count) + of_state(j);
      V out;
      if (kind == Hidden::kGru) {
        const V u = logistic(read_units<E>(add + hidden + j, count) + of_state(hidden + j));
        const V n = tangent(read_units<E>(add + 2 * hidden + j, count) + logistic(first) * of_state(2 * hidden + j));
        out = n + u * (read_units<E>(h + j, count) - n);
      } else {
        out = kind == Hidden::kTanh ? tangent(first) : activated(first, Activation::kRelu);
      }
      write<E>(h_out + j, out, count);
    });
  }
}

template <class E>
void hidden_backward(const HiddenBackward& step, const RowsPart& part) {
  using Storage = typename E::Storage;
  using Sum = typename E::Sum;
  using V = Vector<Sum>;
  const int64_t hidden = step.hidden;
  const Hidden kind = step.kind;
  const Storage* const bias = static_cast<const Storage*>(step.bias);
  for (int64_t row = part.first_row; row < part.last_row; ++row) {
    const Storage *const z = row_of<Storage>(step.z, row), *const add = row_of<Storage>(step.add, row);
    const Storage *const h = row_of<Storage>(step.h, row), *const h_out = row_of<Storage>(step.h_out, row);
    const Storage *const grad_h = row_of<Storage>(step.grad_h, row), *const grad_y = row_of<Storage>(step.grad_y, row);
    Storage *const carried = row_of<Storage>(step.carried, row), *const grad_z = row_of<Storage>(step.grad_z, row);
    Storage* const grad_add = row_of<Storage>(step.grad_add, row);
    in_vectors<E>(part.begin, part.end, [=](int64_t j, int64_t count) __attribute__((always_inline)) {
      V at_h = read_units<E>(grad_h + j, count) + read_units<E>(grad_y + j, count);
      if (kind != Hidden::kGru) {
        const V y = read_units<E>(h_out + j, count);
        write<E>(grad_z + j, kind == Hidden::kTanh ? at_h * (Sum(1) - y * y) : y > Sum(0) ? at_h : V{}, count);
        return;
      }
      const auto of_state = [=](int64_t at) __attribute__((always_inline)) {
        const V v = read_units<E>(z + at, count);
        return bias ? v + read_units<E>(bias + at, count) : v;
      };
      at_h += read_units<E>(carried + j, count);
      const V r = logistic(read_units<E>(add + j, count) + of_state(j));
      const V u = logistic(read_units<E>(add + hidden + j, count) + of_state(hidden + j));
      const V of_n = of_state(2 * hidden + j), n = tangent(read_units<E>(add + 2 * hidden + j, count) + r * of_n);
      const V at_n = at_h * (Sum(1) - u) * (Sum(1) - n * n), at_r = at_n * of_n * (r * (Sum(1) - r));
      const V at_u = at_h * (read_units<E>(h + j, count) - n) * (u * (Sum(1) - u));
      write<E>(carried + j, at_h * u, count);
      for (Storage* const to : {grad_z, grad_add}) {
        write<E>(to + j, at_r, count);
        write<E>(to + hidden + j, at_u, count);
      }
      write<E>(grad_z + 2 * hidden + j, at_n * r, count);
      write<E>(grad_add + 2 * hidden + j, at_n, count);
    });
  }
}

}  // namespace

const GatesKernels& select_gates(DType dtype) {
  static constexpr GatesKernels float32 = {forward<Float32>, backward<Float32>, hidden_forward<Float32>,
                                           hidden_backward<Float32>},
                                float64 = {forward<Float64>, backward<Float64>, hidden_forward<Float64>,
                                           hidden_backward<Float64>},
                                bfloat16 = {forward<BFloat16>, backward<BFloat16>, hidden_forward<BFloat16>,
                                            hidden_backward<BFloat16>},
                                float16 = {forward<Float16>, backward<Float16>, hidden_forward<Float16>,
                                           hidden_backward<Float16>};
  return by_dtype(dtype, float32, float64, bfloat16, float16);
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
