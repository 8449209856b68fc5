#include "elementwise.hpp"

#include <algorithm>

#include "parallel.hpp"
#include "rows.hpp"

namespace blocksparse {
namespace {

int64_t parts_of(int64_t count) { return (count + kPartNumbers - 1) / kPartNumbers; }

template <class Run>
void in_parts(int64_t count, const Run& run) {
  parallel_tasks(parts_of(count), [&](int64_t i) { run(i * kPartNumbers, std::min((i + 1) * kPartNumbers, count)); });
}

}  // namespace

void dropout_forward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutForward& dropout) {
  const ElementwiseKernels& kernels = isa.elementwise(dtype);
  in_parts(count, [&](int64_t first, int64_t last) { kernels.dropout_forward(dropout, first, last); });
}

void dropout_backward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutBackward& dropout) {
  const ElementwiseKernels& kernels = isa.elementwise(dtype);
  in_parts(count, [&](int64_t first, int64_t last) { kernels.dropout_backward(dropout, first, last); });
}

void momentum_steps(const InstructionSet& isa, DType dtype, const std::vector<int64_t>& counts,
                    const std::vector<MomentumStep>& steps) {
  const ElementwiseKernels& kernels = isa.elementwise(dtype);
  std::vector<int64_t> ends(counts.size());
  int64_t parts = 0;
  for (size_t i = 0; i < counts.size(); ++i) ends[i] = parts += parts_of(counts[i]);
  parallel_tasks(parts, [&](int64_t part) {
    const size_t i = std::upper_bound(ends.begin(), ends.end(), part) - ends.begin();
    const int64_t first = (part - (i ? ends[i - 1] : 0)) * kPartNumbers;
    kernels.momentum_step(steps[i], first, std::min(first + kPartNumbers, counts[i]));
  });
}

void multiply(const InstructionSet& isa, DType dtype, int64_t rows, int64_t features, const RowsProduct& product) {
  const ElementwiseKernels& kernels = isa.elementwise(dtype);
  in_parts(rows, features, [&](const RowsPart& part) { kernels.multiply(product, part); });
}

}  // namespace blocksparse
