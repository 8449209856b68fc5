// All steps of an LSTM in one call: the product of the state and the gates, in turn.
#pragma once

#include "gates.hpp"
#include "linear.hpp"

namespace blocksparse {

// Step t has the rows [start[t], start[t + 1]) of all data, never more than the step before.
struct TimeSteps {
  const int64_t* start;  // [count + 1]
  int64_t count;
  bool reverse;  // time runs from the last step to the first

  int64_t at(int64_t nth) const { return reverse ? count - 1 - nth : nth; }
  int64_t rows(int64_t t) const { return start[t + 1] - start[t]; }
};

// The weight `[4 hidden, hidden]`, and the tasks of its product or, backward, of the transposed one.
struct RecurrentWeight {
  int64_t hidden, block_out, block_in;
  const void* values;
  RowTasks tasks;
};

// A state on its way: what the steps take and what they leave, `[rows, hidden]`. `final` is that of each sequence, and
// null where what one step leaves is what the next one takes, in the same memory.
struct StatePath {
  OutputRows before, after;
  void* final;  // [batch, hidden]
};

struct LstmForward {
  void* z;        // [batch, 4 hidden], working memory
  InputRows pre;  // what is added to the product
  StatePath h, c;
  OutputRows gates;  // may be null
};

void lstm_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                  const LstmForward& data);

struct LstmBackward {
  InputRows gates, c_before, c, grad_y;
  void *grad_h, *grad_c;  // [batch, hidden], of the final states; then of the initial ones
  OutputRows grad_pre;
};

void lstm_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                   const LstmBackward& data);

}  // namespace blocksparse
