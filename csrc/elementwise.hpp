// Elementwise operations: dropout with the activation before it, ELUs of both signs, the step of an optimizer, products
// of rows.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace blocksparse {

void dropout_forward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutForward& dropout);
void dropout_backward(const InstructionSet& isa, DType dtype, int64_t count, const DropoutBackward& dropout);

// Of x, or of grad and x if the gradient is given.
void concat_elu(const InstructionSet& isa, DType dtype, int64_t rows, const ConcatElu& call);

// Tensor i has counts[i] numbers.
void momentum_steps(const InstructionSet& isa, DType dtype, const std::vector<int64_t>& counts,
                    const std::vector<MomentumStep>& steps);

void multiply(const InstructionSet& isa, DType dtype, int64_t rows, int64_t features, const RowsProduct& product);

}  // namespace blocksparse
