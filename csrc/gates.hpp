// The gates of one LSTM step: rows and features cut into parts, shared among threads.
#pragma once

#include "kernels.hpp"

namespace blocksparse {

void gates_forward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesForward& step);
void gates_backward(const InstructionSet& isa, DType dtype, int64_t rows, const GatesBackward& step);

}  // namespace blocksparse
