#include "int8.hpp"

#include <algorithm>
#include <stdexcept>

#include "parallel.hpp"

namespace blocksparse {
namespace {

// Bytes of x that all rows of blocks meet before the next tokens: they stay in the cache of a core.
constexpr int64_t kTokenBytes = 512 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void int8_linear(const InstructionSet& isa, DType dtype, Activation activation, int64_t block_out, int64_t block_in,
                 int64_t tokens, Matrix x, const Int8Weights& weights, const void* bias, void* y, int64_t out_features,
                 const RowTasks& tasks) {
  if (dtype == DType::kFloat64) throw std::invalid_argument("the compiled core: expected no float64 in 8 bits");
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const Int8Kernels& kernels = isa.int8(dtype);
  const int64_t size = dtype == DType::kFloat32 ? 4 : 2, steps = ceil_div(block_in, 4), padded_in = 4 * steps;
  const int64_t in_blocks = x.features / block_in, row_bytes = in_blocks * padded_in;
  uint8_t* quantized = static_cast<uint8_t*>(scratch(Scratch::kPanels, tokens * row_bytes));
  float* scale = static_cast<float*>(scratch(Scratch::kGradients, tokens * int64_t(sizeof(float))));
  parallel_tasks(tokens, [&](int64_t t) {
    const char* from = static_cast<const char*>(x.data) + t * x.stride * size;
    kernels.quantize({from, in_blocks, block_in, padded_in, quantized + t * row_bytes, scale + t});
  });
  const int64_t chunks =
      std::clamp<int64_t>(ceil_div(tokens * row_bytes, kTokenBytes), 1, std::max<int64_t>(tokens, 1));
  parallel_tasks(chunks * tasks.tasks, [&](int64_t i) {
    const int64_t chunk = i / tasks.tasks, task = i % tasks.tasks;
    const int64_t token = tokens * chunk / chunks, here = tokens * (chunk + 1) / chunks - token;
    for (int64_t j = tasks.task_start[task]; j < tasks.task_start[task + 1]; ++j) {
      const int64_t row = tasks.row[j], output = row * block_out + tasks.begin[j], first = tasks.start[row];
      kernels.piece({tasks.start[row + 1] - first, tasks.col + first,
                     weights.values + first * steps * weights.padded_out * 4,
                     weights.scale + first * weights.padded_out, weights.sum + first * weights.padded_out, steps,
                     weights.padded_out, tasks.begin[j], tasks.end[j], quantized + token * row_bytes, row_bytes,
                     scale + token, here, bias ? static_cast<const char*>(bias) + output * size : nullptr, activation,
                     static_cast<char*>(y) + (token * out_features + output) * size, out_features});
    }
  });
}

}  // namespace blocksparse
