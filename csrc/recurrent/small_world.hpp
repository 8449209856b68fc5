// All steps of a small-world LSTM in one call: within each, products with a layer norm behind them, then the gates.
#pragma once

#include <vector>

#include "recurrent/lstm.hpp"

namespace blocksparse {

// The weights W1 to Wdepth and that of the gates, and the gains and biases of the norms, one behind the other.
struct SmallWorldWeights {
  std::vector<RecurrentWeight> weights;
  const void *gains, *biases;  // [(depth + 4) hidden]
};

// Numbers of each norm and what the next product takes. `keep`: of all rows, else those of one step, n of them.
struct SmallWorldNorms {
  bool keep;
  void *z, *z_scale;     // [n, 4 hidden], the norm's; [n, 4]
  void *normed, *given;  // [depth, n, hidden]
  void* scale;           // [depth, n]; like `normed` and `z_scale` null unless they are kept
};

struct SmallWorldForward {
  double epsilon;
  InputRows factor, term;
  void* y;  // [batch, hidden], working memory
  SmallWorldNorms norms;
};

void small_world_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps,
                         const SmallWorldWeights& weights, const GatedForward& data, const SmallWorldForward& units);

struct SmallWorldBackward {
  InputRows factor;
  SmallWorldNorms norms;     // those of all rows
  void *grad, *grad_affine;  // [batch, hidden], working memory
  OutputRows grad_factor, grad_term;
  void* grad_z;                    // [rows, 4 hidden], at the product of the gates
  void* grad_taken;                // [depth, rows, hidden], at the other ones
  void *grad_gains, *grad_biases;  // [(depth + 4) hidden] in the type of sums; added to
};

void small_world_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps,
                          const SmallWorldWeights& weights, const GatedBackward& data, const SmallWorldBackward& units);

}  // namespace blocksparse
