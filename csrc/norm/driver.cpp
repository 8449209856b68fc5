#include <algorithm>

#include "core/rows.hpp"
#include "isa/dispatch.hpp"
#include "norm/norm.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const NormKernels& select_norm(DType dtype))

namespace {

constexpr decltype(&portable::select_norm) kSelect[] = {BLOCKSPARSE_BY_VECTORS(select_norm)};

// Lanes of the longest vector: parts of features are multiples of it.
constexpr int64_t kWhole = 16;

// Call run(first, last) for parts of `count` rows, or features, of `size` elements each.
template <class Run>
void in_parts_of(int64_t count, int64_t size, int64_t whole, const Run& run) {
  if (size == 0) return;
  const int64_t part = std::max<int64_t>(kPartNumbers / size / whole * whole, whole);
  in_ranges(count, part, run);
}

}  // namespace

void norm_forward(const InstructionSet& isa, DType dtype, int64_t rows, const NormForward& norm) {
  const NormKernels& kernels = kSelect[isa.index](dtype);
  in_parts_of(rows, norm.groups * norm.features, 1,
              [&](int64_t first, int64_t last) { kernels.forward(norm, first, last); });
}

void norm_backward(const InstructionSet& isa, DType dtype, int64_t rows, const NormBackward& norm) {
  const NormKernels& kernels = kSelect[isa.index](dtype);
  const int64_t features = norm.groups * norm.features;
  in_parts_of(rows, features, 1, [&](int64_t first, int64_t last) { kernels.backward(norm, first, last); });
  in_parts_of(features, rows, kWhole, [&](int64_t first, int64_t last) { kernels.sums(norm, rows, first, last); });
}

void weight_norm(const InstructionSet& isa, DType dtype, int64_t rows, const WeightNorm& norm) {
  const NormKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = ceil_div(norm.start[rows] * norm.outputs * norm.inner, std::max<int64_t>(rows, 1));
  in_parts_of(rows, size, 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) kernels.weights(norm, row);
  });
}

}  // namespace blocksparse
