// The linear products of unstructured weights (blocks of one number): cutting tokens, outputs and connections.
#pragma once

#include "kernels.hpp"
#include "linear.hpp"

namespace blocksparse {

// The working memory that the products below need.
int64_t csr_working_bytes(const InstructionSet& isa, DType dtype, int64_t tokens, int64_t in_features);
int64_t csr_wgrad_working_bytes(const InstructionSet& isa, DType dtype, int64_t tokens, int64_t out_features,
                                int64_t in_features);

// y [tokens, rows of the matrix] = activation(x W^T + bias).
void csr_linear(const InstructionSet& isa, DType dtype, Activation activation, int64_t tokens, Matrix x,
                const void* values, const void* bias, void* y, void* working, const Csr& matrix, bool wide);

// values = the numbers of grad^T x that the matrix stores.
void csr_wgrad(const InstructionSet& isa, DType dtype, int64_t tokens, Matrix grad, Matrix x, void* values,
               void* working, const Csr& matrix, bool wide);

// The gradients of y = x W^T, that of a bias, or null, with one packed panel of each operand; float32 and float64. The
// matrix is by its columns, so that a row of `grad` is read once for both others; by its rows where grad_x is null. The
// working memory is 0 where tokens do not fit one panel: then it cannot be used.
int64_t csr_gradients_working_bytes(const InstructionSet& isa, DType dtype, int64_t tokens, int64_t out_features,
                                    int64_t in_features);
void csr_gradients(const InstructionSet& isa, DType dtype, int64_t tokens, Matrix grad, Matrix x, const void* values,
                   void* grad_x, void* grad_values, void* grad_bias, void* working, const Csr& matrix, bool wide);

// The matrix by its columns: where each starts, and the row and the position of each connection, by rising rows.
void csr_transposed(const Csr& matrix, bool wide, int64_t cols, void* start, void* row, void* position, bool to_wide);

}  // namespace blocksparse
