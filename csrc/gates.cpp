#include "gates.hpp"

#include <algorithm>

#include "parallel.hpp"

namespace blocksparse {
namespace {

// Numbers of h per part, a few microseconds of work; a multiple of every vector, so that only the last features of a
// row come in less than one. The same for any number of threads, as the results have to be.
constexpr int64_t kPart = 4096;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Run>
void in_parts(int64_t rows, int64_t hidden, const Run& run) {
  if (hidden == 0) return;
  const int64_t cuts = ceil_div(hidden, kPart), rows_of_part = std::max<int64_t>(kPart / hidden, 1);
  parallel_tasks(ceil_div(rows, rows_of_part) * cuts, [&](int64_t i) {
    const int64_t row = i / cuts * rows_of_part, begin = i % cuts * kPart;
    run({row, std::min(row + rows_of_part, rows), begin, std::min(begin + kPart, hidden)});
  });
}

}  // namespace

void gates_forward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesForward& step) {
  const GatesKernels& kernels = isa.gates(dtype);
  in_parts(rows, step.hidden, [&](const GatesPart& part) { kernels.forward(step, part); });
}

void gates_backward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesBackward& step) {
  const GatesKernels& kernels = isa.gates(dtype);
  in_parts(rows, step.hidden, [&](const GatesPart& part) { kernels.backward(step, part); });
}

}  // namespace blocksparse
