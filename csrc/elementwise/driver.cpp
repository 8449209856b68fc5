#include <algorithm>

#include "core/parallel.hpp"
#include "core/rows.hpp"
#include "elementwise/elementwise.hpp"
#include "isa/dispatch.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const ElementwiseKernels& select_elementwise(DType dtype))

namespace {

constexpr decltype(&portable::select_elementwise) kSelect[] = {BLOCKSPARSE_BY_VECTORS(select_elementwise)};

}  // namespace

void dropout_forward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutForward& dropout) {
  const ElementwiseKernels& kernels = kSelect[isa.index](dtype);
  in_ranges(count, kPartNumbers, [&](int64_t first, int64_t last) { kernels.dropout_forward(dropout, first, last); });
}

void dropout_backward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutBackward& dropout) {
  const ElementwiseKernels& kernels = kSelect[isa.index](dtype);
  in_ranges(count, kPartNumbers, [&](int64_t first, int64_t last) { kernels.dropout_backward(dropout, first, last); });
}

void concat_elu(const InstructionSet& isa, DType dtype, int64_t rows, const ConcatElu& call) {
  const ElementwiseKernels& kernels = kSelect[isa.index](dtype);
  const auto run = call.grad ? kernels.concat_elu_backward : kernels.concat_elu_forward;
  in_ranges(rows * call.features, kConcatEluPart, [&](int64_t first, int64_t last) { run(call, first, last); });
}

void gated_sum(const InstructionSet& isa, DType dtype, int64_t rows, const GatedSum& call) {
  const ElementwiseKernels& kernels = kSelect[isa.index](dtype);
  const auto run = call.grad ? kernels.gated_sum_backward : kernels.gated_sum;
  in_parts(rows, call.features, [&](const RowsPart& part) { run(call, part); });
}

void momentum_steps(const InstructionSet& isa, DType dtype, const std::vector<int64_t>& counts,
                    const std::vector<MomentumStep>& steps) {
  const ElementwiseKernels& kernels = kSelect[isa.index](dtype);
  std::vector<int64_t> ends(counts.size());
  int64_t parts = 0;
  for (size_t i = 0; i < counts.size(); ++i) ends[i] = parts += ceil_div(counts[i], kPartNumbers);
  parallel_tasks(parts, [&](int64_t part) {
    const size_t i = std::upper_bound(ends.begin(), ends.end(), part) - ends.begin();
    const int64_t first = (part - (i ? ends[i - 1] : 0)) * kPartNumbers;
    kernels.momentum_step(steps[i], first, std::min(first + kPartNumbers, counts[i]));
  });
}

void multiply(const InstructionSet& isa, DType dtype, int64_t rows, int64_t features, const RowsProduct& product) {
  const ElementwiseKernels& kernels = kSelect[isa.index](dtype);
  in_parts(rows, features, [&](const RowsPart& part) { kernels.multiply(product, part); });
}

}  // namespace blocksparse
