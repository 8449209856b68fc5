#include "lstm.hpp"

#include <cstring>

namespace blocksparse {
namespace {

void* row(const OutputRows& rows, int64_t at, int64_t size) {
  return static_cast<char*>(rows.data) + at * rows.stride * size;
}

// The rows from `at` on.
OutputRows from(const OutputRows& rows, int64_t at, int64_t size) {
  return {rows.data ? row(rows, at, size) : nullptr, rows.stride};
}
InputRows from(const InputRows& rows, int64_t at, int64_t size) {
  if (rows.index) return {rows.data, rows.stride, rows.index + at};
  return {static_cast<const char*>(rows.data) + at * rows.stride * size, rows.stride};
}

// Passes on what a step of `rows` rows left. Sequences that are over keep their final state; those that have not begun,
// their initial one.
void advance(const StatePath& state, int64_t hidden, int64_t size, int64_t at, int64_t rows, int64_t next_at,
             int64_t next_rows) {
  char* final = static_cast<char*>(state.final);
  if (!final) return;
  const int64_t bytes = hidden * size;
  for (int64_t r = 0; r < rows; ++r) std::memcpy(final + r * bytes, row(state.after, at + r, size), bytes);
  for (int64_t r = 0; r < next_rows; ++r) std::memcpy(row(state.before, next_at + r, size), final + r * bytes, bytes);
}

}  // namespace

void lstm_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                  const LstmForward& data) {
  const int64_t hidden = weight.hidden, size = size_of(dtype), wide = size_of_sum(dtype);
  for (int64_t nth = 0; nth < steps.count; ++nth) {
    const int64_t t = steps.at(nth), at = steps.start[t], rows = steps.rows(t);
    linear(isa, dtype, Activation::kNone, false, weight.block_out, weight.block_in, rows,
           {row(data.h.before, at, size), data.h.before.stride, hidden}, weight.values, nullptr, data.z, 4 * hidden,
           weight.tasks);
    gates_forward(isa, dtype, rows,
                  {hidden,
                   {data.z, 4 * hidden},
                   from(data.pre, at, size),
                   nullptr,
                   {row(data.c.before, at, wide), data.c.before.stride},
                   from(data.h.after, at, size),
                   from(data.c.after, at, wide),
                   from(data.gates, at, size)});
    const bool last = nth + 1 == steps.count;
    const int64_t next = last ? t : steps.at(nth + 1), next_rows = last ? 0 : steps.rows(next);
    advance(data.h, hidden, size, at, rows, steps.start[next], next_rows);
    advance(data.c, hidden, wide, at, rows, steps.start[next], next_rows);
  }
}

void lstm_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                   const LstmBackward& data) {
  const int64_t hidden = weight.hidden, size = size_of(dtype), wide = size_of_sum(dtype);
  const OutputRows grad_c = {data.grad_c, hidden};
  for (int64_t nth = steps.count - 1; nth >= 0; --nth) {
    const int64_t t = steps.at(nth), at = steps.start[t], rows = steps.rows(t);
    gates_backward(isa, dtype, rows,
                   {hidden,
                    from(data.gates, at, size),
                    from(data.c_before, at, wide),
                    from(data.c, at, wide),
                    {data.grad_h, hidden},
                    from(data.grad_y, at, size),
                    {data.grad_c, hidden},
                    from(data.grad_pre, at, size),
                    grad_c});
    linear(isa, dtype, Activation::kNone, true, weight.block_in, weight.block_out, rows,
           {row(data.grad_pre, at, size), data.grad_pre.stride, 4 * hidden}, weight.values, nullptr, data.grad_h,
           hidden, weight.tasks);
  }
}

}  // namespace blocksparse
