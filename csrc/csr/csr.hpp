// Linear products with unstructured weights (block size 1). The driver cuts tokens, outputs and connections.
#pragma once

#include "core/types.hpp"
#include "linear/linear.hpp"

namespace blocksparse {

// A matrix in CSR format: single weights ("connections") by rows. Indices are all int32 or all int64.
struct Csr {
  const void* start;     // [rows + 1]
  const void* col;       // [connections]
  const void* position;  // [connections], index of each in `values`; null if in order
  int64_t rows, connections;
};

// y[tokens, out] = activation(x W^T + bias), for the outputs [first, last) and the tokens of one packed panel of x.
struct CsrRows {
  Csr matrix;
  const void* values;
  int64_t first, last;
  const void* panel;      // [in_features, width] sums' type
  int64_t width, tokens;  // tokens of the panel with and without padding
  bool fetches;           // the panel is too large for the caches
  const void* bias;       // of output 0, or null
  Activation activation;
  void* y;  // of the panel's first token, output 0
  int64_t y_stride;
  bool streams;  // y bypasses the caches
  // If not null (float32 and float64 only): [rows, width] in the type of sums. For each connection the product of its
  // row of `factors` and its row of the panel is summed into `samples` [connections].
  const void* factors = nullptr;
  void* samples = nullptr;
};

// values[k] = grad[row of k] . x[col of k] over the tokens of a panel, for the connections [first, last).
struct CsrSamples {
  Csr matrix;
  int64_t first, last;
  const void *grad, *x;  // [features, width] sums' type
  int64_t width;
  bool fetches, add;  // add: to what `values` holds
  void* values;
};

struct CsrKernels {
  int lanes, max_vectors;  // of tokens: in a vector; in a panel, whose width is a power of two below a vector, or whole
                           // vectors
  size_t unit_size;
  void (*pack)(const void* x, int64_t stride, int64_t tokens, int64_t first, int64_t last, int64_t width, void* panel);
  void (*rows[2])(const CsrRows&);  // with int32 and with int64 indices
  void (*samples[2])(const CsrSamples&);
  // to[feature] = the sum of that row of a panel, for the features [first, last).
  void (*sums)(const void* panel, int64_t first, int64_t last, int64_t width, void* to);
};

// Return the bytes of working memory that the products below need.
int64_t csr_working_bytes(const InstructionSet& isa, DType dtype, int64_t tokens, int64_t in_features);
int64_t csr_wgrad_working_bytes(const InstructionSet& isa, DType dtype, int64_t tokens, int64_t out_features,
                                int64_t in_features);

// y [tokens, rows of the matrix] = activation(x W^T + bias).
void csr_linear(const InstructionSet& isa, DType dtype, Activation activation, int64_t tokens, Matrix x,
                const void* values, const void* bias, void* y, void* working, const Csr& matrix, bool wide);

// values = the stored elements of grad^T x.
void csr_wgrad(const InstructionSet& isa, DType dtype, int64_t tokens, Matrix grad, Matrix x, void* values,
               void* working, const Csr& matrix, bool wide);

// The gradients of y = x W^T + bias in one pass, with one packed panel of each operand; float32 and float64 only. The
// matrix is given by columns, so that a row of `grad` is read once for both gradients; by rows if grad_x is null. The
// working memory is 0 if the tokens do not fit one panel: then use the separate products.
int64_t csr_gradients_working_bytes(const InstructionSet& isa, DType dtype, int64_t tokens, int64_t out_features,
                                    int64_t in_features);
void csr_gradients(const InstructionSet& isa, DType dtype, int64_t tokens, Matrix grad, Matrix x, const void* values,
                   void* grad_x, void* grad_values, void* grad_bias, void* working, const Csr& matrix, bool wide);

// Transpose the matrix: the start of each column, and the row and position of each connection, rows ascending.
void csr_transposed(const Csr& matrix, bool wide, int64_t cols, void* start, void* row, void* position, bool to_wide);

}  // namespace blocksparse
