#include "core/rows.hpp"
#include "norm/norm.hpp"
#include "recurrent/small_world.hpp"

namespace blocksparse {
namespace {

// Where the rows of a step are in the kept results of each product, which have `n` rows each.
struct KeptRows {
  const SmallWorldNorms& norms;
  int64_t hidden, size, wide, n, at;

  KeptRows(const SmallWorldNorms& norms, DType dtype, int64_t hidden, const TimeSteps& steps, StepRows step)
      : norms(norms),
        hidden(hidden),
        size(size_of(dtype)),
        wide(size_of_sum(dtype)),
        n(norms.keep ? steps.start[steps.count] : steps.rows(0)),
        at(norms.keep ? step.at : 0) {}

  OutputRows units(void* of_all, int64_t k) const { return {advance(of_all, (k * n + at) * hidden * size), hidden}; }
  void* scale(int64_t k) const { return advance(norms.scale, (k * n + at) * wide); }
  OutputRows z(void* of_all) const { return {advance(of_all, at * 4 * hidden * size), 4 * hidden}; }
  void* z_scale() const { return advance(norms.z_scale, at * 4 * wide); }
};

}  // namespace

void small_world_forward(const InstructionSet& isa, DType dtype, const TimeSteps& steps,
                         const SmallWorldWeights& weights, const GatedForward& data, const SmallWorldForward& units) {
  const int64_t hidden = data.hidden, size = size_of(dtype), depth = int64_t(weights.weights.size()) - 1;
  const InputRows none = {nullptr, 0}, y = {units.y, hidden};
  gated_forward(isa, dtype, steps, data, [&](StepRows step, InputRows x) {
    const KeptRows kept(units.norms, dtype, hidden, steps, step);
    for (int64_t k = 0; k < depth; ++k) {
      const OutputRows given = kept.units(units.norms.given, k);
      product(isa, dtype, weights.weights[k], step.count, x, units.y);
      norm_forward(isa, dtype, step.count,
                   {hidden, 1, units.epsilon, y, kept.units(units.norms.normed, k), kept.scale(k),
                    advance(weights.gains, k * hidden * size), advance(weights.biases, k * hidden * size),
                    k == 0 ? from(units.factor, step.at, size) : none, k == 1 ? from(units.term, step.at, size) : none,
                    k > 0, given});
      x = read_only(given);
    }
    const OutputRows z = kept.z(units.norms.z);
    product(isa, dtype, weights.weights[depth], step.count, x, z.data);
    // The gates apply gain and bias themselves.
    norm_forward(isa, dtype, step.count,
                 {hidden, 4, units.epsilon, read_only(z), z, kept.z_scale(), nullptr, nullptr, none, none, false,
                  OutputRows{nullptr, 0}});
    return read_only(z);
  });
}

void small_world_backward(const InstructionSet& isa, DType dtype, const TimeSteps& steps,
                          const SmallWorldWeights& weights, const GatedBackward& data,
                          const SmallWorldBackward& units) {
  const int64_t hidden = data.hidden, size = size_of(dtype), wide = size_of_sum(dtype);
  const int64_t depth = int64_t(weights.weights.size()) - 1;
  const InputRows none = {nullptr, 0}, grad = {units.grad, hidden};
  gated_backward(isa, dtype, steps, data, [&](StepRows step) {
    const KeptRows kept(units.norms, dtype, hidden, steps, step);
    const auto norm = [&](int64_t k) {
      const int64_t offset = k * hidden;
      NormBackward norm = {};
      norm.features = hidden, norm.groups = 1;
      norm.gain = advance(weights.gains, offset * size), norm.bias = advance(weights.biases, offset * size);
      norm.grad_gain = advance(units.grad_gains, offset * wide);
      norm.grad_bias = advance(units.grad_biases, offset * wide);
      return norm;
    };
    NormBackward of_gates = norm(depth);
    const OutputRows grad_z = kept.z(units.grad_z);
    of_gates.groups = 4;
    of_gates.grad = read_only(from(data.grad_pre, step.at, size));
    of_gates.normed = read_only(kept.z(units.norms.z)), of_gates.scale = kept.z_scale();
    of_gates.grad_x = grad_z;
    norm_backward(isa, dtype, step.count, of_gates);
    product(isa, dtype, weights.weights[depth], step.count, read_only(grad_z), units.grad);
    for (int64_t k = depth - 1; k >= 0; --k) {
      NormBackward of_units = norm(k);
      const OutputRows grad_taken = kept.units(units.grad_taken, k);
      of_units.grad = grad;
      of_units.normed = read_only(kept.units(units.norms.normed, k)), of_units.scale = kept.scale(k);
      of_units.y = k > 0 ? read_only(kept.units(units.norms.given, k)) : none;
      of_units.factor = k == 0 ? from(units.factor, step.at, size) : none;
      of_units.grad_factor = from(units.grad_factor, step.at, size);
      of_units.grad_affine = k == 1 ? from(units.grad_term, step.at, size) : OutputRows{units.grad_affine, hidden};
      of_units.grad_x = grad_taken;
      norm_backward(isa, dtype, step.count, of_units);
      product(isa, dtype, weights.weights[k], step.count, read_only(grad_taken), k > 0 ? units.grad : data.grad_h);
    }
  });
}

}  // namespace blocksparse
