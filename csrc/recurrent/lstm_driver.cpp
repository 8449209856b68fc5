#include <cstring>

#include "core/parallel.hpp"
#include "core/rows.hpp"
#include "elementwise/elementwise.hpp"
#include "recurrent/lstm.hpp"

namespace blocksparse {
namespace {

// Return the state that the nth step reads.
InputRows state_before(const StatePath& state, const TimeSteps& steps, int64_t nth, int64_t hidden, int64_t size) {
  if (state.before.data) return read_only(from(state.before, steps.start[steps.at(nth)], size));
  if (!state.after.data || nth == 0 || !steps.aligned()) return {state.final, hidden};
  return read_only(from(state.after, steps.start[steps.at(nth - 1)], size));
}

// Return where the nth step writes the state.
OutputRows state_after(const StatePath& state, const TimeSteps& steps, int64_t nth, int64_t hidden, int64_t size) {
  return state.after.data ? from(state.after, steps.start[steps.at(nth)], size) : OutputRows{state.final, hidden};
}

// Pass the state on from the nth step to the next. Sequences that have ended keep their final state; those that have
// not begun keep their initial state.
void advance(const StatePath& state, const TimeSteps& steps, int64_t nth, int64_t hidden, int64_t size) {
  const bool last = nth + 1 == steps.count;
  if (!state.final || !state.after.data || (!state.before.data && !last && steps.aligned())) return;
  char* final = static_cast<char*>(state.final);
  const int64_t bytes = hidden * size, t = steps.at(nth), following = last ? t : steps.at(nth + 1);
  for (int64_t r = 0; r < steps.rows(t); ++r)
    std::memcpy(final + r * bytes, from(state.after, steps.start[t] + r, size).data, bytes);
  for (int64_t r = 0; !last && state.before.data && r < steps.rows(following); ++r)
    std::memcpy(from(state.before, steps.start[following] + r, size).data, final + r * bytes, bytes);
}

// Least steps and rows that pay for a transposed copy of the weight.
constexpr int64_t kTurnedSteps = 8, kTurnedRows = 3;

template <class T>
void turn_block(const void* from, int64_t rows, int64_t cols, void* to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) static_cast<T*>(to)[c * rows + r] = static_cast<const T*>(from)[r * cols + c];
}

// Return a weight for all steps of a recurrence. For a few rows its blocks are transposed: lanes are then outputs,
// whose sums need no sum over lanes.
RecurrentWeight weight_of_steps(const InstructionSet& isa, DType dtype, const RecurrentWeight& weight,
                                const TimeSteps& steps) {
  const LinearKernels& kernels = linear_kernels(isa, dtype, weight.block_in);
  if (weight.transposed || steps.count < kTurnedSteps || steps.rows(0) < kTurnedRows || kernels.k_pack > 1 ||
      !kernels.few_tokens(steps.rows(0), weight.block_out, weight.block_in, true))
    return weight;
  const int64_t size = size_of(dtype), bytes = weight.block_out * weight.block_in * size;
  const int64_t blocks = weight.tasks.start[weight.out / weight.block_out];
  const auto turn = size == 4 ? &turn_block<float> : size == 8 ? &turn_block<double> : &turn_block<uint16_t>;
  char* to = static_cast<char*>(scratch(Scratch::kTurned, blocks * bytes));
  parallel_tasks(blocks, [&](int64_t b) {
    turn(static_cast<const char*>(weight.values) + b * bytes, weight.block_out, weight.block_in, to + b * bytes);
  });
  RecurrentWeight turned = weight;
  turned.values = to, turned.has_turned_blocks = true;
  return turned;
}

}  // namespace

void product(const InstructionSet& isa, DType dtype, const RecurrentWeight& weight, int64_t rows, const InputRows& x,
             void* y) {
  int64_t out = weight.out, in = weight.in, block_out = weight.block_out, block_in = weight.block_in;
  if (weight.transposed) std::swap(out, in), std::swap(block_out, block_in);
  linear(isa, dtype, Activation::kNone, weight.transposed != weight.has_turned_blocks, block_out, block_in, rows,
         {x.data, x.stride, in}, weight.values, nullptr, y, out, weight.tasks);
}

void gated_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const GatedForward& data,
                   const std::function<InputRows(StepRows, const InputRows&)>& z_of) {
  const int64_t hidden = data.hidden, size = size_of(dtype), wide = size_of_sum(dtype);
  for (int64_t nth = 0; nth < steps.count; ++nth) {
    const int64_t t = steps.at(nth), at = steps.start[t];
    const StepRows step = {at, steps.rows(t)};
    const InputRows z = z_of(step, state_before(data.h, steps, nth, hidden, size));
    gates_forward(isa, dtype, step.count,
                  {hidden, z, from(data.add, at, size), data.gain, state_before(data.c, steps, nth, hidden, wide),
                   state_after(data.h, steps, nth, hidden, size), state_after(data.c, steps, nth, hidden, wide),
                   from(data.gates, at, size)});
    advance(data.h, steps, nth, hidden, size);
    advance(data.c, steps, nth, hidden, wide);
  }
}

void gated_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const GatedBackward& data,
                    const std::function<void(StepRows)>& to_h) {
  const int64_t hidden = data.hidden, size = size_of(dtype), wide = size_of_sum(dtype);
  const OutputRows grad_c = {data.grad_c, hidden};
  for (int64_t nth = steps.count - 1; nth >= 0; --nth) {
    const int64_t t = steps.at(nth), at = steps.start[t];
    gates_backward(isa, dtype, steps.rows(t),
                   {hidden,
                    from(data.gates, at, size),
                    from(data.c_before, at, wide),
                    from(data.c, at, wide),
                    {data.grad_h, hidden},
                    from(data.grad_y, at, size),
                    read_only(grad_c),
                    from(data.grad_pre, at, size),
                    grad_c});
    to_h({at, steps.rows(t)});
  }
}

void lstm_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                  const GatedForward& data, void* z, const MultipliedForward* multiplied) {
  const int64_t hidden = data.hidden, size = size_of(dtype);
  const RecurrentWeight of_steps = weight_of_steps(isa, dtype, weight, steps);
  gated_forward(isa, dtype, steps, data, [&](StepRows step, InputRows x) {
    if (multiplied) {
      const OutputRows of_h = from(OutputRows{multiplied->of_h, hidden}, step.at, size);
      const OutputRows m = from(OutputRows{multiplied->m, hidden}, step.at, size);
      product(isa, dtype, multiplied->weight, step.count, x, of_h.data);
      multiply(isa, dtype, step.count, hidden, {from(multiplied->factor, step.at, size), read_only(of_h), m});
      x = read_only(m);
    }
    product(isa, dtype, of_steps, step.count, x, z);
    return InputRows{z, 4 * hidden};
  });
}

void lstm_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                   const GatedBackward& data, const MultipliedBackward* multiplied) {
  const int64_t hidden = data.hidden, size = size_of(dtype);
  gated_backward(isa, dtype, steps, data, [&](StepRows step) {
    const InputRows grad_z = read_only(from(data.grad_pre, step.at, size));
    if (!multiplied) return product(isa, dtype, weight, step.count, grad_z, data.grad_h);
    const InputRows grad_m = {multiplied->grad_m, hidden};
    const OutputRows grad_of_h = from(multiplied->grad_of_h, step.at, size);
    product(isa, dtype, weight, step.count, grad_z, multiplied->grad_m);
    multiply(isa, dtype, step.count, hidden,
             {grad_m, from(multiplied->of_h, step.at, size), from(multiplied->grad_factor, step.at, size)});
    multiply(isa, dtype, step.count, hidden, {grad_m, from(multiplied->factor, step.at, size), grad_of_h});
    product(isa, dtype, multiplied->weight, step.count, read_only(grad_of_h), data.grad_h);
  });
}

void hidden_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                    const HiddenSteps& data) {
  const int64_t hidden = data.hidden, features = hidden_gates(data.kind) * hidden, size = size_of(dtype);
  const RecurrentWeight of_steps = weight_of_steps(isa, dtype, weight, steps);
  for (int64_t nth = 0; nth < steps.count; ++nth) {
    const int64_t t = steps.at(nth), at = steps.start[t];
    const StepRows step = {at, steps.rows(t)};
    const InputRows h = state_before(data.h, steps, nth, hidden, size);
    const OutputRows z = from(OutputRows{data.z, features}, data.keep_z ? at : 0, size);
    product(isa, dtype, of_steps, step.count, h, z.data);
    hidden_gates_forward(isa, dtype, step.count,
                         {data.kind, hidden, read_only(z), from(data.add, at, size), data.bias, h,
                          state_after(data.h, steps, nth, hidden, size)});
    advance(data.h, steps, nth, hidden, size);
  }
}

void hidden_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps, const RecurrentWeight& weight,
                     const HiddenSteps& data, const HiddenGradients& gradients) {
  const int64_t hidden = data.hidden, features = hidden_gates(data.kind) * hidden, size = size_of(dtype);
  const OutputRows grad_h = {gradients.grad_h, hidden}, carried = {gradients.carried, hidden};
  for (int64_t nth = steps.count - 1; nth >= 0; --nth) {
    const int64_t t = steps.at(nth), at = steps.start[t];
    const OutputRows grad_z = from(gradients.grad_z, at, size);
    hidden_gates_backward(
        isa, dtype, steps.rows(t),
        {data.kind, hidden, read_only(from(OutputRows{data.z, features}, at, size)), from(data.add, at, size),
         data.bias, read_only(from(data.h.before, at, size)), read_only(from(data.h.after, at, size)),
         read_only(grad_h), from(gradients.grad_y, at, size), carried, grad_z, from(gradients.grad_add, at, size)});
    product(isa, dtype, weight, steps.rows(t), read_only(grad_z), gradients.grad_h);
  }
}

}  // namespace blocksparse
