// Layer norms: rows shared among threads, and then, for the gradients of gains and biases, features.
#pragma once

#include "kernels.hpp"

namespace blocksparse {

void norm_forward(const InstructionSet& isa, DType dtype, int64_t rows, const NormForward& norm);
void norm_backward(const InstructionSet& isa, DType dtype, int64_t rows, const NormBackward& norm);

}  // namespace blocksparse
