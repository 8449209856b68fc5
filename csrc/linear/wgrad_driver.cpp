#include <algorithm>

#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "linear/linear.hpp"

namespace blocksparse {
namespace {

// A few threads each pack x up to this size. Columns are multiplied in panels that stay in a core's L2 cache.
constexpr int64_t kOwnBytes = 16 << 20, kL2Bytes = 1 << 20;
// Bytes, and bounds on the number, of tokens that are packed at a time: more would leave the outer caches, fewer would
// write the values too often. 16-bit types pack all tokens at once, since sums over chunks would round.
constexpr int64_t kWgradBytes = 4 << 20, kLeastTokens = 256, kMostTokens = 1024;
// Steps and features of one packing task.
constexpr int64_t kPackSteps = 16, kPackFeatures = 1024;

// Return the first block in [begin, end) that is not before a place. Blocks are ordered by row and column.
int64_t first_block(const BlockTasks& tasks, int64_t begin, int64_t end, int32_t row, int32_t col) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    const bool is_before = tasks.row[middle] != row ? tasks.row[middle] < row : tasks.col[middle] < col;
    (is_before ? begin : end) = is_before ? middle + 1 : middle;
  }
  return begin;
}

}  // namespace

void linear_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in, int64_t tokens,
                  Matrix grad, Matrix x, void* values, const BlockTasks& tasks) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const LinearKernels& kernels = linear_kernels(isa, dtype, 2);  // the sum is over tokens, padded to whole units
  const int64_t size = size_of(dtype), unit = kernels.unit_size;
  const int64_t padded_in = kernels.padded_in(block_in), strip = kernels.strip(block_in);
  const bool on_tiles = kernels.tile_depth(block_out, 2) > 0;
  // x is packed in columns of a vector or tile, whose steps lie one after another in the L1 cache.
  const int64_t columns = on_tiles ? kTileSize : kernels.lanes;
  const int64_t chunk = block_in % columns == 0 ? columns : padded_in;
  const int64_t in_blocks = x.features / block_in;
  const int64_t token_bytes = std::max<int64_t>((grad.features + x.features) * size, 1);
  const int64_t at_once =
      size == 2 ? std::max<int64_t>(tokens, 1) : std::clamp(kWgradBytes / token_bytes, kLeastTokens, kMostTokens);

  for (int64_t first_token = 0; first_token == 0 || first_token < tokens; first_token += at_once) {
    const int64_t here = std::min(at_once, tokens - first_token), least = on_tiles ? kTileSize : 1;
    const int64_t steps = ceil_div(here, kernels.k_pack * least) * least;
    const auto pack = [&](const Matrix& from, int64_t blocks, int64_t block, int64_t padded, Scratch slot) {
      const int64_t block_units = steps * padded;
      void* packed = scratch(slot, blocks * block_units * unit);
      const BlockColumns columns = {
          advance(from.data, first_token * from.stride * size), from.stride, here, block, padded, packed, block_units};
      const int64_t at_a_time = std::max<int64_t>(kPackFeatures / block, 1);
      const int64_t cuts = ceil_div(blocks, at_a_time), step_cuts = ceil_div(steps, kPackSteps);
      parallel_tasks(step_cuts * cuts, [&](int64_t i) {
        const int64_t step = i / cuts * kPackSteps, begin = i % cuts * at_a_time;
        kernels.pack_block_columns(columns, step, std::min(step + kPackSteps, steps), begin,
                                   std::min(begin + at_a_time, blocks));
      });
      return packed;
    };
    const auto turn = [&](const Matrix& from) {
      void* packed = scratch(Scratch::kGradients, from.features * steps * unit);
      const int64_t outputs = std::min(kTileSize, block_out), chunks = from.features / outputs;
      const int64_t at_a_time = kPackFeatures / outputs, cuts = ceil_div(chunks, at_a_time);
      parallel_tasks(steps / kTileSize * cuts, [&](int64_t i) {
        const int64_t step = i / cuts * kTileSize, begin = i % cuts * at_a_time, token = step * kernels.k_pack;
        for (int64_t c = begin; c < std::min(begin + at_a_time, chunks); ++c)
          kernels.turn({advance(from.data, ((first_token + token) * from.stride + c * outputs) * size), from.stride,
                        here - token, outputs, kTileSize, advance(packed, (c * steps + step) * outputs * unit),
                        kTileSize, 0});
      });
      return packed;
    };
    const int64_t x_bytes = in_blocks * padded_in * steps * unit, threads = thread_count();
    const bool is_own = threads <= kFewThreads && x_bytes <= kOwnBytes && tasks.tasks >= 2 * threads;
    const int64_t parts = is_own ? threads : 1;
    parallel_parts(parts, [&](int64_t part) {
      const int64_t begin = tasks.tasks * part / parts, count = tasks.tasks * (part + 1) / parts - begin;
      if (tasks.task_start[begin] == tasks.task_start[begin + count]) return;
      const int64_t row = tasks.row[tasks.task_start[begin]];
      const int64_t rows = tasks.row[tasks.task_start[begin + count] - 1] + 1 - row;
      const Matrix its_grad = {advance(grad.data, row * block_out * size), grad.stride, rows * block_out};
      const void* packed_grad =
          on_tiles ? turn(its_grad) : pack(its_grad, rows, block_out, block_out, Scratch::kGradients);
      const void* packed_x = block_in % chunk == 0 ? pack(x, x.features / chunk, chunk, chunk, Scratch::kPanels)
                                                   : pack(x, in_blocks, block_in, padded_in, Scratch::kPanels);
      // Columns in panels that stay in a core's L2 cache while the blocks of all rows read them, with a strip or more
      // of each row.
      const int64_t strips = tasks.task_start[tasks.tasks] * block_out / std::max<int64_t>(grad.features, 1) / strip;
      const int64_t panels = std::clamp<int64_t>(ceil_div(x_bytes, kL2Bytes), 1, std::max<int64_t>(strips, 1));
      parallel_tasks(panels * count, [&](int64_t i) {
        const int64_t task = begin + i % count, end = tasks.task_start[task + 1];
        const auto first_col = [&](int64_t panel) { return int32_t(in_blocks * panel / panels); };
        const int32_t first = first_col(i / count), last = first_col(i / count + 1);
        int64_t k = tasks.task_start[task];
        while (k < end) {
          const int32_t at_row = tasks.row[k];
          k = first_block(tasks, k, end, at_row, first);
          const int64_t stop = first_block(tasks, k, end, at_row, last);
          for (int64_t blocks; k < stop; k += blocks) {
            blocks = std::min(strip, stop - k);
            kernels.sampled_strip({blocks, tasks.col + k,
                                   advance(packed_grad, (at_row - row) * steps * block_out * unit), packed_x, steps,
                                   block_out, block_in, padded_in, chunk,
                                   advance(values, k * block_out * block_in * size), first_token > 0});
          }
          k = first_block(tasks, k, end, at_row + 1, 0);
        }
      });
    });
  }
}

}  // namespace blocksparse
