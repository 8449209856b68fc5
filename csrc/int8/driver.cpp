#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "int8/int8.hpp"
#include "isa/cpu_features.hpp"
#include "isa/dispatch.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const Int8Kernels& select_int8(DType dtype))

namespace {

constexpr decltype(&portable::select_int8) kSelect[] = {BLOCKSPARSE_BY_TILES(select_int8)};

// Bytes of quantized x that meet all rows of blocks before the next tokens: they stay in the cache of a core.
constexpr int64_t kTokenBytes = 512 << 10;

// Most bytes of quantized x at a time, however many outputs a convolution has.
constexpr int64_t kPanelBytes = 8 << 20;

// Outputs of at least this many bytes bypass the caches if a vector fills a cache line, as those of linear products.
constexpr int64_t kStreamed = 4 << 20;

// Least tokens that hide the fetching of weights.
constexpr int64_t kFetchTokens = 32;
// One of a few threads quantizes its own tokens if it gets at least this many; for fewer it takes as long to read all
// weights.
constexpr int64_t kOwnTokens = 64;

int64_t taps_of(const Patches& axes) { return axes[0].kernel * axes[1].kernel * axes[2].kernel; }

// Gather the inputs of one output, zeros outside of the image. A pixel has `blocks` blocks of `bytes` bytes.
void gather(const Patches& axes, int64_t output, const char* x, int64_t blocks, int64_t bytes, char* to) {
  std::array<int64_t, 3> first;
  for (int a = 2; a >= 0; output /= axes[a--].output)
    first[a] = output % axes[a].output * axes[a].stride - axes[a].padding;
  const int64_t image = output, step = taps_of(axes) * bytes;
  const auto inside = [&](int a, int64_t at) { return at >= 0 && at < axes[a].input; };
  for (int64_t i = 0, at0 = first[0]; i < axes[0].kernel; ++i, at0 += axes[0].dilation)
    for (int64_t j = 0, at1 = first[1]; j < axes[1].kernel; ++j, at1 += axes[1].dilation)
      for (int64_t k = 0, at2 = first[2]; k < axes[2].kernel; ++k, at2 += axes[2].dilation, to += bytes) {
        if (!inside(0, at0) || !inside(1, at1) || !inside(2, at2)) {
          for (int64_t b = 0; b < blocks; ++b) memset(to + b * step, 0, bytes);
          continue;
        }
        const int64_t pixel = ((image * axes[0].input + at0) * axes[1].input + at1) * axes[2].input + at2;
        const char* from = x + pixel * blocks * bytes;
        for (int64_t b = 0; b < blocks; ++b) memcpy(to + b * step, from + b * bytes, bytes);
      }
}

// Multiply 8-bit numbers in one instruction where the CPU can.
const Int8Kernels& int8_kernels(const InstructionSet& isa, DType dtype) {
#if defined(BLOCKSPARSE_X86_SETS)
  if (kSelect[isa.index] == avx512::select_int8 && !isa.emulated && cpu_features().avx512_vnni &&
      avx512_vnni::select_int8 != nullptr)
    return avx512_vnni::select_int8(dtype);
#endif
  return kSelect[isa.index](dtype);
}

}  // namespace

void int8_linear(const InstructionSet& isa, DType dtype, Activation activation, int64_t block_out, int64_t block_in,
                 int64_t tokens, Matrix x, const Patches* patches, const Int8Weights& weights, const void* bias,
                 void* y, int64_t out_features, const RowTasks& tasks) {
  if (dtype == DType::kFloat64) throw std::invalid_argument("the compiled core: expected no float64 in 8 bits");
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const Int8Kernels& kernels = int8_kernels(isa, dtype);
  const int64_t size = dtype == DType::kFloat32 ? 4 : 2, steps = ceil_div(block_in, 4), padded_in = 4 * steps;
  const int64_t in_blocks = x.features / block_in, used_bytes = in_blocks * padded_in;
  const int64_t weight_bytes = steps * weights.padded_out * 4, scale_bytes = weights.padded_out * 8;
  const int64_t block_bytes = weight_bytes + (weights.row_scales ? 0 : scale_bytes);
  // An odd number of cache lines: with a power of two, the rows of a tile would share few places of the L1 cache.
  const int64_t row_bytes = used_bytes % 128 == 0 ? used_bytes + 64 : used_bytes;
  const auto bound = [&](int64_t output) { return std::min(ceil_div(output, kTileOutputs) * kTileOutputs, block_out); };
  const int64_t taps = patches ? taps_of(*patches) : 1;
  const bool streams = tokens * out_features * size >= kStreamed && out_features * size % kCacheLine == 0;
  const int64_t all_threads = thread_count();
  const int64_t parts = all_threads <= kFewThreads && tokens >= all_threads * kOwnTokens ? all_threads : 1;
  const auto first_token = [&](int64_t part) {
    return part == parts ? tokens : (tokens * part / parts + kTileSize / 2) / kTileSize * kTileSize;
  };
  parallel_parts(parts, [&](int64_t part) {
    const int64_t threads = thread_count(), first = first_token(part), end = first_token(part + 1);
    const int64_t group =
        std::clamp<int64_t>(kPanelBytes / std::max<int64_t>(row_bytes, 1), 1, std::max<int64_t>(end - first, 1));
    auto* quantized = static_cast<uint8_t*>(scratch(Scratch::kPanels, (group + kTileTokens) * row_bytes));
    auto* scale = static_cast<float*>(scratch(Scratch::kGradients, group * int64_t(sizeof(float))));
    for (int64_t begin = first; begin < end; begin += group) {
      const int64_t count = std::min(group, end - begin);
      parallel_tasks(count, [&](int64_t t) {
        const char* from = static_cast<const char*>(x.data);
        if (patches) {
          char* row = static_cast<char*>(scratch(Scratch::kSums, x.features * size));
          gather(*patches, begin + t, from, in_blocks, block_in / taps * size, row);
          from = row;
        } else {
          from += (begin + t) * x.stride * size;
        }
        kernels.quantize({from, in_blocks, block_in, padded_in, quantized + t * row_bytes, scale + t});
      });
      const int64_t chunks =
          std::clamp<int64_t>(ceil_div(count * row_bytes, kTokenBytes), 1, std::max<int64_t>(count, 1));
      parallel_tasks(chunks * tasks.tasks, [&](int64_t i) {
        const int64_t chunk = i / tasks.tasks, task = i % tasks.tasks;
        const int64_t token = count * chunk / chunks, here = count * (chunk + 1) / chunks - token;
        for (int64_t j = tasks.task_start[task]; j < tasks.task_start[task + 1]; ++j) {
          const int64_t row = tasks.row[j], first_block = tasks.start[row], begin_out = bound(tasks.begin[j]);
          const int64_t output = row * block_out + begin_out;
          // The thread will probably compute this row next. Fetching it makes 64 tokens 4 to 9 % faster from cold
          // caches, and few tokens slower.
          const int64_t after = j + 1 < tasks.task_start[task + 1] ? j + 1
                                : task + threads < tasks.tasks     ? tasks.task_start[task + threads]
                                                                   : j;
          const int64_t next = tasks.start[tasks.row[after]], next_end = tasks.start[tasks.row[after] + 1];
          const char* w = weights.blocks + first_block * block_bytes;
          const char* scales = weights.row_scales ? weights.row_scales + row * scale_bytes : w + weight_bytes;
          kernels.piece({tasks.start[row + 1] - first_block,
                         tasks.col + first_block,
                         w,
                         scales,
                         block_bytes,
                         weights.row_scales != nullptr,
                         weights.blocks + next * block_bytes,
                         here < kFetchTokens ? 0 : (next_end - next) * block_bytes,
                         steps,
                         weights.padded_out,
                         begin_out,
                         bound(tasks.end[j]),
                         quantized + token * row_bytes,
                         row_bytes,
                         scale + token,
                         here,
                         bias ? static_cast<const char*>(bias) + output * size : nullptr,
                         activation,
                         static_cast<char*>(y) + ((begin + token) * out_features + output) * size,
                         out_features,
                         streams});
        }
        // Streamed stores are not ordered by the end of a parallel loop.
        if (streams) std::atomic_thread_fence(std::memory_order_seq_cst);
      });
    }
  });
}

}  // namespace blocksparse
