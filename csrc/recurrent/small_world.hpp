// All steps of a small-world LSTM in one call. Each step runs products with layer norms, then the gates.
#pragma once

#include <vector>

#include "recurrent/lstm.hpp"

namespace blocksparse {

// The weights W1 to Wdepth and that of the gates, and the concatenated gains and biases of the norms.
struct SmallWorldWeights {
  std::vector<RecurrentWeight> weights;
  const void *gains, *biases;  // [(depth + 4) hidden]
};

// Intermediate results of each norm, and the input of the next product: n rows, which are all rows if `keep`, else
// those of one step.
struct SmallWorldNorms {
  bool keep;
  void *z, *z_scale;     // [n, 4 hidden]; [n, 4]
  void *normed, *given;  // [depth, n, hidden]
  void* scale;           // [depth, n]; null without `keep`, as `normed` and `z_scale`
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
  void* grad_z;                    // [rows, 4 hidden], at the output of the gates' product
  void* grad_taken;                // [depth, rows, hidden], at the outputs of the other products
  void *grad_gains, *grad_biases;  // [(depth + 4) hidden] in the type of sums; added to
};

void small_world_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps,
                          const SmallWorldWeights& weights, const GatedBackward& data, const SmallWorldBackward& units);

}  // namespace blocksparse
