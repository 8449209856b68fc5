#include <algorithm>

#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "linear/linear.hpp"

namespace blocksparse {
namespace {

// A few threads each pack x up to this size. Columns are multiplied in panels that stay in a core's L2 cache.
constexpr int64_t kOwnBytes = 16 << 20, kL2Bytes = 1 << 20;
// Tokens that are packed at a time. Few stay in the caches closest to a core, but each time all values are read and
// written: from memory if they are many bytes, with more work if blocks are no whole vectors. 16-bit types pack all
// tokens at once, since sums over chunks would round.
constexpr int64_t kTokens = 128, kTokensOfManyValues = 256, kTokensOfSmallBlocks = 512, kManyValueBytes = 16 << 20;
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
  const int64_t size = size_of(dtype), unit = kernels.unit_size, block_bytes = block_out * block_in * size;
  const int64_t padded_in = kernels.padded_in(block_in), strip = kernels.strip(block_in);
  const bool on_tiles = kernels.tile_depth(block_out, 2) > 0;
  // x is packed in columns of a vector or tile, whose steps lie one after another in the L1 cache.
  const int64_t column = on_tiles ? kTileSize : kernels.lanes;
  const int64_t chunk = block_in % column == 0 ? column : padded_in;
  const int64_t in_blocks = x.features / block_in, blocks = tasks.task_start[tasks.tasks];
  const int64_t most = block_in % kernels.lanes != 0            ? kTokensOfSmallBlocks
                       : blocks * block_bytes > kManyValueBytes ? kTokensOfManyValues
                                                                : kTokens;
  const int64_t at_once = std::max<int64_t>(size == 2 ? tokens : std::min(most, tokens), 1);
  const int64_t least = on_tiles ? kTileSize : 1;
  const auto steps_of = [&](int64_t count) { return ceil_div(count, kernels.k_pack * least) * least; };

  // Pack `here` tokens from the first one on as BlockColumns.
  const auto pack = [&](const Matrix& from, int64_t here, int64_t block, int64_t padded, Scratch slot) {
    const int64_t count = from.features / block, steps = steps_of(here), block_units = steps * padded;
    void* packed = scratch(slot, count * block_units * unit);
    const BlockColumns columns = {from.data, from.stride, here, block, padded, packed, block_units};
    const int64_t at_a_time = std::max<int64_t>(kPackFeatures / block, 1);
    const int64_t cuts = ceil_div(count, at_a_time), step_cuts = ceil_div(steps, kPackSteps);
    parallel_tasks(step_cuts * cuts, [&](int64_t i) {
      const int64_t step = i / cuts * kPackSteps, begin = i % cuts * at_a_time;
      kernels.pack_block_columns(columns, step, std::min(step + kPackSteps, steps), begin,
                                 std::min(begin + at_a_time, count));
    });
    return packed;
  };
  const auto turn = [&](const Matrix& from, int64_t here) {
    const int64_t steps = steps_of(here);
    void* packed = scratch(Scratch::kGradients, from.features * steps * unit);
    const int64_t outputs = std::min(kTileSize, block_out), chunks = from.features / outputs;
    const int64_t at_a_time = kPackFeatures / outputs, cuts = ceil_div(chunks, at_a_time);
    parallel_tasks(steps / kTileSize * cuts, [&](int64_t i) {
      const int64_t step = i / cuts * kTileSize, begin = i % cuts * at_a_time, token = step * kernels.k_pack;
      for (int64_t c = begin; c < std::min(begin + at_a_time, chunks); ++c)
        kernels.turn({advance(from.data, (token * from.stride + c * outputs) * size), from.stride, here - token,
                      outputs, kTileSize, advance(packed, (c * steps + step) * outputs * unit), kTileSize, 0});
    });
    return packed;
  };

  const int64_t x_bytes = in_blocks * padded_in * steps_of(at_once) * unit, threads = thread_count();
  // Columns in panels that stay in a core's L2 cache while the blocks of all rows read them, with a strip or more of
  // each row.
  const int64_t strips = blocks * block_out / std::max<int64_t>(grad.features, 1) / strip;
  const int64_t panels = std::clamp<int64_t>(ceil_div(x_bytes, kL2Bytes), 1, std::max<int64_t>(strips, 1));
  const bool is_own = threads <= kFewThreads && x_bytes <= kOwnBytes && tasks.tasks >= 2 * threads;
  const int64_t parts = is_own ? threads : 1;
  parallel_parts(parts, [&](int64_t part) {
    const int64_t begin = tasks.tasks * part / parts, count = tasks.tasks * (part + 1) / parts - begin;
    if (tasks.task_start[begin] == tasks.task_start[begin + count]) return;
    const int64_t row = tasks.row[tasks.task_start[begin]];
    const int64_t rows = tasks.row[tasks.task_start[begin + count] - 1] + 1 - row;
    for (int64_t token = 0; token == 0 || token < tokens; token += at_once) {
      const int64_t here = std::min(at_once, tokens - token), steps = steps_of(here);
      const auto part_of = [&](const Matrix& from, int64_t feature, int64_t features) {
        return Matrix{advance(from.data, (token * from.stride + feature) * size), from.stride, features};
      };
      const Matrix its_grad = part_of(grad, row * block_out, rows * block_out);
      const void* packed_grad =
          on_tiles ? turn(its_grad, here) : pack(its_grad, here, block_out, block_out, Scratch::kGradients);
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t first = in_blocks * panel / panels, last = in_blocks * (panel + 1) / panels;
        const Matrix its_x = part_of(x, first * block_in, (last - first) * block_in);
        const void* packed_x = block_in % chunk == 0 ? pack(its_x, here, chunk, chunk, Scratch::kPanels)
                                                     : pack(its_x, here, block_in, padded_in, Scratch::kPanels);
        packed_x = advance(packed_x, -first * padded_in * steps * unit);  // of column 0
        parallel_tasks(count, [&](int64_t i) {
          const int64_t task = begin + i, end = tasks.task_start[task + 1];
          int64_t k = tasks.task_start[task];
          while (k < end) {
            const int32_t at_row = tasks.row[k];
            k = first_block(tasks, k, end, at_row, int32_t(first));
            const int64_t stop = first_block(tasks, k, end, at_row, int32_t(last));
            for (int64_t taken; k < stop; k += taken) {
              taken = std::min(strip, stop - k);
              kernels.sampled_strip(
                  {taken, tasks.col + k, advance(packed_grad, (at_row - row) * steps * block_out * unit), packed_x,
                   steps, block_out, block_in, padded_in, chunk, advance(values, k * block_bytes), token > 0});
            }
            k = first_block(tasks, k, end, at_row + 1, 0);
          }
        });
      }
    }
  });
}

}  // namespace blocksparse
