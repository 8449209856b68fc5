// Elementwise ops for one instruction set, in one pass over memory.
#include "elementwise/elementwise.hpp"
#include "isa/activation.hpp"
#include "isa/element.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

// Eight 64-bit SFC64 generators side by side (Doty-Humphrey, PractRand).
struct Random {
  typedef uint64_t Lanes __attribute__((vector_size(64)));
  static constexpr int64_t kDraws = sizeof(Lanes) / sizeof(uint16_t);
  Lanes a, b, c, counter;

  BLOCKSPARSE_INLINE void start(Random& r, uint64_t seed, uint64_t stream) {
    const Lanes zero = {}, lane = {0, 1, 2, 3, 4, 5, 6, 7};
    r.a = zero + seed, r.b = zero + 8 * stream + lane, r.c = zero, r.counter = zero + 1;
    for (int i = 0; i < 18; ++i) step(r);
  }
  BLOCKSPARSE_INLINE void step(Random& r) {
    Lanes drawn;
    step(r, drawn);
  }
  BLOCKSPARSE_INLINE void step(Random& r, Lanes& drawn) {
    drawn = r.a + r.b + r.counter;
    r.counter += 1;
    r.a = r.b ^ (r.b >> 11);
    r.b = r.c + (r.c << 3);
    r.c = ((r.c << 24) | (r.c >> 40)) + drawn;
  }
};

// Convert as many small integers as a vector of sums has lanes, between memory and lanes.
template <class Sum>
struct Lanewise {
  using Wide = std::conditional_t<sizeof(Sum) == 8, uint64_t, uint32_t>;
  template <class Small>
  BLOCKSPARSE_INLINE Vector<Wide> widened(const Small* from) {
    typedef Small Narrow __attribute__((vector_size(kLanes<Sum> * sizeof(Small))));
    Narrow narrow;
    memcpy(&narrow, from, sizeof narrow);
    return __builtin_convertvector(narrow, Vector<Wide>);
  }
  BLOCKSPARSE_INLINE void write(uint8_t* to, Vector<Wide> v, int64_t count) {
    typedef uint8_t Narrow __attribute__((vector_size(kLanes<Sum>)));
    const Narrow narrow = __builtin_convertvector(v, Narrow);
    memcpy(to, &narrow, count);
  }
};

template <class E>
void dropout_forward(const DropoutForward& d, int64_t first, int64_t last) {
  using Sum = typename E::Sum;
  using V = Vector<Sum>;
  using Codes = Lanewise<Sum>;
  using Wide = Vector<typename Codes::Wide>;
  const auto* x = static_cast<const typename E::Storage*>(d.x);
  auto* y = static_cast<typename E::Storage*>(d.y);
  const V positive = broadcast(Sum(d.factor[1])), negative = broadcast(Sum(d.factor[2]));
  const Wide one = Wide{} + 1, two = Wide{} + 2;
  Random random;
  if (d.least) Random::start(random, d.seed, first / kPartNumbers);
  for (int64_t at = first; at < last; at += Random::kDraws) {
    Random::Lanes lanes{};
    if (d.least) Random::step(random, lanes);
    uint16_t drawn[Random::kDraws];
    memcpy(drawn, &lanes, sizeof drawn);
    in_vectors<E>(at, smaller(at + Random::kDraws, last), [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const V v = read_units<E>(x + i, count);
      const auto kept = Codes::widened(drawn + (i - at)) >= Wide{} + d.least;
      const auto above = v > Sum(0);
      write_sums<E>(y + i, kept ? v * (above ? positive : negative) : V{}, count, false);
      Codes::write(d.code + i, kept ? (above ? one : two) : Wide{}, count);
    });
  }
}

template <class E>
void dropout_backward(const DropoutBackward& d, int64_t first, int64_t last) {
  using Sum = typename E::Sum;
  using V = Vector<Sum>;
  using Codes = Lanewise<Sum>;
  const auto* grad = static_cast<const typename E::Storage*>(d.grad);
  auto* grad_x = static_cast<typename E::Storage*>(d.grad_x);
  const V positive = broadcast(Sum(d.factor[1])), negative = broadcast(Sum(d.factor[2]));
  in_vectors<E>(first, last, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
    uint8_t code[kLanes<Sum>] = {};
    memcpy(code, d.code + i, count);
    const auto drawn = Codes::widened(code);
    const V v = read_units<E>(grad + i, count);
    write_sums<E>(grad_x + i, drawn != 0 ? v * (drawn == 1 ? positive : negative) : V{}, count, false);
  });
}

// Call run(i, count, at, kept) for vectors of x: their outputs are at `at` and `at + features`, and `kept` masks the
// outputs that are not dropped.
template <class E, class Run>
void in_both_signs(const ConcatElu& c, int64_t first, int64_t last, const Run& run) {
  using Codes = Lanewise<typename E::Sum>;
  using Wide = Vector<typename Codes::Wide>;
  constexpr int64_t kDraws = Random::kDraws;
  Random random;
  if (c.least) Random::start(random, c.seed, first / kConcatEluPart);
  uint16_t drawn[2][kDraws + kLanes<typename E::Sum>] = {};
  int64_t row = first / c.features;
  for (int64_t at = first; at < last; at += kDraws) {
    for (int i = 0; i < 2 && c.least; ++i) {
      Random::Lanes lanes;
      Random::step(random, lanes);
      memcpy(drawn[i], &lanes, sizeof lanes);
    }
    const int64_t end = smaller(at + kDraws, last);
    for (int64_t begin = at; begin < end;) {
      const int64_t row_end = smaller((row + 1) * c.features, end);
      in_vectors<E>(begin, row_end, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const auto below = Wide{} + c.least;
        run(i, count, i + row * c.features, Codes::widened(drawn[0] + (i - at)) >= below,
            Codes::widened(drawn[1] + (i - at)) >= below);
      });
      begin = row_end;
      row += begin == (row + 1) * c.features;
    }
  }
}

template <class E>
void concat_elu_forward(const ConcatElu& c, int64_t first, int64_t last) {
  using V = Vector<typename E::Sum>;
  const auto* x = static_cast<const typename E::Storage*>(c.x);
  auto* y = static_cast<typename E::Storage*>(c.to);
  const V scale = broadcast(typename E::Sum(c.scale));
  in_both_signs<E>(
      c, first, last,
      [=](int64_t i, int64_t count, int64_t at, auto kept, auto kept_below) __attribute__((always_inline)) {
        const V v = read_units<E>(x + i, count);
        const auto above = v > 0;
        const V low = exponential_minus_1(above ? -v : v);
        write_sums<E>(y + at, kept ? (above ? v : low) * scale : V{}, count, false);
        write_sums<E>(y + at + c.features, kept_below ? (above ? low : -v) * scale : V{}, count, false);
      });
}

template <class E>
void concat_elu_backward(const ConcatElu& c, int64_t first, int64_t last) {
  using V = Vector<typename E::Sum>;
  const auto *x = static_cast<const typename E::Storage*>(c.x), *grad = static_cast<const typename E::Storage*>(c.grad);
  auto* grad_x = static_cast<typename E::Storage*>(c.to);
  const V scale = broadcast(typename E::Sum(c.scale));
  in_both_signs<E>(
      c, first, last,
      [=](int64_t i, int64_t count, int64_t at, auto kept, auto kept_below) __attribute__((always_inline)) {
        const V v = read_units<E>(x + i, count);
        const auto above = v > 0;
        const V slope = exponential(above ? -v : v);
        const V g = read_units<E>(grad + at, count), below = read_units<E>(grad + at + c.features, count);
        const V of_x = kept ? (above ? g : g * slope) : V{},
                of_minus_x = kept_below ? (above ? below * slope : below) : V{};
        write_sums<E>(grad_x + i, (of_x - of_minus_x) * scale, count, false);
      });
}

template <class E>
void gated_sum(const GatedSum& c, const RowsPart& part) {
  using Storage = typename E::Storage;
  for (int64_t row = part.first_row; row < part.last_row; ++row) {
    const Storage* const x = static_cast<const Storage*>(c.x) + row * c.features;
    const Storage* const a = static_cast<const Storage*>(c.pair) + 2 * row * c.features;
    Storage* const y = static_cast<Storage*>(c.to) + row * c.features;
    in_vectors<E>(part.begin, part.end, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      const auto gate = logistic(read_units<E>(a + c.features + i, count));
      write_sums<E>(y + i, read_units<E>(x + i, count) + read_units<E>(a + i, count) * gate, count, false);
    });
  }
}

template <class E>
void gated_sum_backward(const GatedSum& c, const RowsPart& part) {
  using Storage = typename E::Storage;
  for (int64_t row = part.first_row; row < part.last_row; ++row) {
    const Storage* const grad = static_cast<const Storage*>(c.grad) + row * c.features;
    const Storage* const a = static_cast<const Storage*>(c.pair) + 2 * row * c.features;
    Storage* const to = static_cast<Storage*>(c.to) + 2 * row * c.features;
    in_vectors<E>(part.begin, part.end, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      const auto gate = logistic(read_units<E>(a + c.features + i, count)), g = read_units<E>(grad + i, count) * gate;
      write_sums<E>(to + i, g, count, false);
      write_sums<E>(to + c.features + i, g * read_units<E>(a + i, count) * (1 - gate), count, false);
    });
  }
}

template <class E>
void momentum_step(const MomentumStep& step, int64_t first, int64_t last) {
  using Sum = typename E::Sum;
  using V = Vector<Sum>;
  using Storage = typename E::Storage;
  const V momentum = broadcast(Sum(step.momentum)), rate = broadcast(Sum(step.rate)), keep = broadcast(Sum(step.keep));
  auto *weight = static_cast<Storage*>(step.weight), *velocity = static_cast<Storage*>(step.velocity);
  const auto* grad = static_cast<const Storage*>(step.grad);
  in_vectors<E>(first, last, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
    const V v = momentum * read_units<E>(velocity + i, count) - rate * read_units<E>(grad + i, count);
    write_sums<E>(velocity + i, v, count, false);
    write_sums<E>(weight + i, keep * read_units<E>(weight + i, count) + v, count, false);
  });
}

template <class E>
void multiply(const RowsProduct& product, const RowsPart& part) {
  using Storage = typename E::Storage;
  for (int64_t row = part.first_row; row < part.last_row; ++row) {
    const Storage *const a = row_of<Storage>(product.a, row), *const b = row_of<Storage>(product.b, row);
    Storage* const y = row_of<Storage>(product.y, row);
    in_vectors<E>(part.begin, part.end, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
      write_sums<E>(y + i, read_units<E>(a + i, count) * read_units<E>(b + i, count), count, false);
    });
  }
}

template <class E>
constexpr ElementwiseKernels table() {
  return {dropout_forward<E>, dropout_backward<E>,   concat_elu_forward<E>, concat_elu_backward<E>,
          gated_sum<E>,       gated_sum_backward<E>, momentum_step<E>,      multiply<E>};
}

}  // namespace

const ElementwiseKernels& select_elementwise(DType dtype) {
  static constexpr ElementwiseKernels float32 = table<Float32>(), float64 = table<Float64>(),
                                      bfloat16 = table<BFloat16>(), float16 = table<Float16>();
  return by_dtype(dtype, float32, float64, bfloat16, float16);
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
