// The handlers that XLA calls for the linear products of blocksparse.jax.
//
// Operands are dense in memory and have the number of products, `batch`, as their first axis: x `[batch, tokens, in]`,
// values `[batch, blocks, block_out, block_in]`, int32 row starts `[batch, rows + 1]` and block columns
// `[batch, blocks]`. All sizes and indices are checked.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace blocksparse {

// Operands x, values, bias `[outputs]` or `[0]` for none, row starts and columns; attributes isa, activation,
// transposed and in_blocks; result y `[batch, tokens, out]`.
XLA_FFI_Error* xla_linear(XLA_FFI_CallFrame* call);

// Operands grad, x, row starts and columns; attributes isa and in_blocks; result values.
XLA_FFI_Error* xla_linear_wgrad(XLA_FFI_CallFrame* call);

}  // namespace blocksparse
