#include "gates.hpp"

#include "rows.hpp"

namespace blocksparse {

void gates_forward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesForward& step) {
  const GatesKernels& kernels = isa.gates(dtype);
  in_parts(rows, step.hidden, [&](const RowsPart& part) { kernels.forward(step, part); });
}

void gates_backward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesBackward& step) {
  const GatesKernels& kernels = isa.gates(dtype);
  in_parts(rows, step.hidden, [&](const RowsPart& part) { kernels.backward(step, part); });
}

}  // namespace blocksparse
