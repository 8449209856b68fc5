// Convolutions over planes for one instruction set (BLOCKSPARSE_ISA). The register tile is that of the linear products:
// rows are outputs, lanes are positions of a padded copy of the image; each tap only changes an address.
#include "conv_planes/conv_planes.hpp"
#include "core/parallel.hpp"
#include "isa/activation.hpp"
#include "isa/element.hpp"
#include "isa/tile.hpp"

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

template <class Real>
bool all_finite(const void* values, int64_t count) {
  using E = Plain<Real>;
  const Real* v = static_cast<const Real*>(values);
  Vector<Real> sum = {};  // 0 unless a value is infinite or NaN
  in_vectors<E>(0, count, [&](int64_t i, int64_t n) { sum += Real(0) * read_units<E>(v + i, n); });
  Real total = 0;
  for (int l = 0; l < kLanes<Real>; ++l) total += sum[l];
  return total == 0;
}

template <class Real>
void pack(const PackedPlanes& p) {
  for (int64_t c = 0; c < p.channels; ++c) {
    const Real* from = static_cast<const Real*>(p.from) + c * p.from_plane;
    Real* const to = static_cast<Real*>(p.to) + c * p.to_plane;
    const int64_t begin = p.left > 0 ? p.left : 0, end = smaller(p.left + p.width, p.pitch);
    for (int64_t r = 0; r < p.rows; ++r) {
      const int64_t row = p.first_row + r;
      Real* const line = to + r * p.pitch;
      if (row < 0 || row >= p.from_rows || begin >= end) {
        memset(line, 0, p.pitch * sizeof(Real));
        continue;
      }
      const Real* const source = from + row * p.width - p.left;
      for (int64_t i = 0; i < begin; ++i) line[i] = 0;
      memcpy(line + begin, source + begin, (end - begin) * sizeof(Real));
      for (int64_t i = end; i < p.pitch; ++i) line[i] = 0;
    }
    memset(to + p.rows * p.pitch, 0, (p.to_plane - p.rows * p.pitch) * sizeof(Real));
  }
}

template <class Real>
void row(const PlaneRow& p) {
  using E = Plain<Real>;
  constexpr int n = kLanes<Real>;
  const int64_t sums_row = p.vectors * n;
  Real* const sums = static_cast<Real*>(scratch(Scratch::kSums, p.outputs * sums_row * sizeof(Real)));
  if (p.terms == 0) {
    memset(sums, 0, p.outputs * sums_row * sizeof(Real));
  } else {
    const Terms<E> terms = {reinterpret_cast<const Real* const*>(p.w),
                            reinterpret_cast<const Real* const*>(p.x),
                            int(p.terms),
                            p.w_row,
                            p.w_step,
                            p.x_step,
                            p.steps};
    const int64_t columns = ceil_div(p.vectors, kTileVectors);
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t first = p.vectors * c / columns, here = p.vectors * (c + 1) / columns - first;
      column_of_tiles<E, Gather::kTerm>(terms, here, first * n, p.outputs, false, sums + first * n, sums_row);
    }
  }
  const Real* const bias = static_cast<const Real*>(p.bias);
  for (int64_t o = 0; o < p.outputs; ++o) {
    const Vector<Real> shift = broadcast(bias ? bias[o] : Real(0));
    for (int64_t r = 0; r < p.rows; ++r) {
      const Real* const from = sums + o * sums_row + r * p.pitch;
      Real* const to = static_cast<Real*>(p.y) + o * p.y_plane + r * p.width;
      in_vectors<E>(0, p.width, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        Vector<Real> v = read_units<E>(from + i, count);
        if (bias) v = v + shift;
        if (p.activation != Activation::kNone) v = activated(v, p.activation);
        write_sums<E>(to + i, v, count, false);
      });
    }
  }
}

// The last vector of each line of x may hold positions of the next line; there the gradient's copy has zeros, and
// `tail` clears x, which may be NaN.
template <class Real, int kRows, int kColumns, bool kTail>
void sample_tile(const PlaneSamples& p, int64_t first_row, int64_t first_column, Vector<Real> tail) {
  constexpr int n = kLanes<Real>;
  using Bits = Vector<std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>>;
  Vector<Real> sum[kRows][kColumns];
  Real* const sums = static_cast<Real*>(p.sums) + (first_row * p.columns + first_column) * n;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) sum[r][c] = load(sums + (r * p.columns + c) * n);
  const Real* const grad = static_cast<const Real*>(p.grad) + first_row * p.grad_plane;
  const Real* x[kColumns];
#pragma GCC unroll 4
  for (int c = 0; c < kColumns; ++c) x[c] = static_cast<const Real*>(p.x[first_column + c]);
  const int64_t vectors = ceil_div(p.width, int64_t(n));
  for (int64_t line = 0; line < p.rows; ++line) {
    const Real* g = grad + line * p.grad_pitch;
    const int64_t at = line * p.pitch;
    for (int64_t v = 0; v < vectors; ++v, g += n) {
      Vector<Real> in[kColumns];
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        in[c] = load(x[c] + at + v * n);
        if (kTail && v + 1 == vectors) in[c] = bits<Vector<Real>>(bits<Bits>(in[c]) & bits<Bits>(tail));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vector<Real> left = load(g + r * p.grad_plane);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) sum[r][c] = sum[r][c] + left * in[c];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) store(sums + (r * p.columns + c) * n, sum[r][c]);
}

template <class Real, int kRows, bool kTail>
void sample_rows(const PlaneSamples& p, int64_t row, Vector<Real> tail) {
  int64_t c = 0;
  for (; c + 3 <= p.columns; c += 3) sample_tile<Real, kRows, 3, kTail>(p, row, c, tail);
  if (p.columns - c == 2) sample_tile<Real, kRows, 2, kTail>(p, row, c, tail);
  if (p.columns - c == 1) sample_tile<Real, kRows, 1, kTail>(p, row, c, tail);
}

template <class Real, bool kTail>
void sample_all(const PlaneSamples& p) {
  using Integer = std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>;
  Vector<Integer> tail;
  for (int l = 0; l < kLanes<Real>; ++l) tail[l] = l < p.width % kLanes<Real> ? ~Integer(0) : 0;
  const Vector<Real> mask = bits<Vector<Real>>(tail);
  int64_t r = 0;
  if constexpr (kTileRows == 8)
    for (; r + 8 <= p.outputs; r += 8) sample_rows<Real, 8, kTail>(p, r, mask);
  for (; r + 4 <= p.outputs; r += 4) sample_rows<Real, 4, kTail>(p, r, mask);
  for (; r + 2 <= p.outputs; r += 2) sample_rows<Real, 2, kTail>(p, r, mask);
  for (; r < p.outputs; ++r) sample_rows<Real, 1, kTail>(p, r, mask);
}

template <class Real>
void sample(const PlaneSamples& p) {
  if (p.width % kLanes<Real>) return sample_all<Real, true>(p);
  sample_all<Real, false>(p);
}

template <class Real>
void add_up(const void* sums, int64_t slices, int64_t slice, int64_t count, void* to) {
  const Real* const from = static_cast<const Real*>(sums);
  for (int64_t i = 0; i < count; ++i) {
    Vector<Real> v = load(from + i * kLanes<Real>);
    for (int64_t s = 1; s < slices; ++s) v = v + load(from + s * slice + i * kLanes<Real>);
    Real total = 0;
    for (int l = 0; l < kLanes<Real>; ++l) total += v[l];
    static_cast<Real*>(to)[i] = total;
  }
}

template <class Real>
constexpr ConvPlanesKernels table() {
  return {kLanes<Real>, all_finite<Real>, pack<Real>, row<Real>, sample<Real>, add_up<Real>};
}

}  // namespace

const ConvPlanesKernels& select_conv_planes(DType dtype) {
  static constexpr ConvPlanesKernels float32 = table<float>(), float64 = table<double>();
  return dtype == DType::kFloat64 ? float64 : float32;
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
