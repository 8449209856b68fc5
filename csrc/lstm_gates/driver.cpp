#include "core/rows.hpp"
#include "isa/dispatch.hpp"
#include "lstm_gates/lstm_gates.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const GatesKernels& select_gates(DType dtype))

namespace {

constexpr decltype(&portable::select_gates) kSelect[] = {BLOCKSPARSE_BY_VECTORS(select_gates)};

}  // namespace

void gates_forward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesForward& step) {
  const GatesKernels& kernels = kSelect[isa.index](dtype);
  in_parts(rows, step.hidden, [&](const RowsPart& part) { kernels.forward(step, part); });
}

void gates_backward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesBackward& step) {
  const GatesKernels& kernels = kSelect[isa.index](dtype);
  in_parts(rows, step.hidden, [&](const RowsPart& part) { kernels.backward(step, part); });
}

void hidden_gates_forward(const InstructionSet& isa, DType dtype, int64_t rows, const HiddenForward& step) {
  const GatesKernels& kernels = kSelect[isa.index](dtype);
  in_parts(rows, step.hidden, [&](const RowsPart& part) { kernels.hidden_forward(step, part); });
}

void hidden_gates_backward(const InstructionSet& isa, DType dtype, int64_t rows, const HiddenBackward& step) {
  const GatesKernels& kernels = kSelect[isa.index](dtype);
  in_parts(rows, step.hidden, [&](const RowsPart& part) { kernels.hidden_backward(step, part); });
}

}  // namespace blocksparse
