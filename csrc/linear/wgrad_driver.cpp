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

// One call of `linear_wgrad`.
struct SampledProduct {
  const LinearKernels& kernels;
  int64_t block_out, block_in, tokens;
  Matrix grad, x;
  void* values;
  BlockTasks tasks;
  int64_t size;  // of a number
  bool on_tiles = kernels.tile_depth(block_out, 2) > 0;
  int64_t unit = kernels.unit_size, padded_in = kernels.padded_in(block_in), strip = kernels.strip(block_in);
  // x is packed in columns of a vector or tile, whose steps lie one after another in the L1 cache.
  int64_t vector = on_tiles ? kTileSize : kernels.lanes, column = block_in % vector == 0 ? vector : padded_in;

  void multiply() const;

 private:
  struct Chunk {  // of tokens, in steps of k_pack tokens; on tiles whole tiles
    int64_t first, count, steps;
  };
  struct Rows {  // of blocks, and the tasks that compute them
    int64_t first, count, first_task, tasks;
  };
  struct Columns {  // of blocks: those of x that are packed
    int64_t first, last;
    const void* packed;  // column 0 would be here
  };

  int64_t blocks() const { return tasks.task_start[tasks.tasks]; }
  int64_t block_bytes() const { return block_out * block_in * size; }
  int64_t steps_of(int64_t count) const {
    const int64_t least = on_tiles ? kTileSize : 1;
    return ceil_div(count, kernels.k_pack * least) * least;
  }
  Matrix part_of(const Matrix& from, const Chunk& chunk, int64_t feature, int64_t features) const {
    return {advance(from.data, (chunk.first * from.stride + feature) * size), from.stride, features};
  }

  int64_t tokens_at_once() const;
  Rows rows_of(int64_t part, int64_t parts) const;
  const void* pack(const Matrix& from, const Chunk& chunk, int64_t block, int64_t padded, Scratch slot) const;
  const void* turn(const Matrix& from, const Chunk& chunk) const;
  const void* pack_grad(const Rows& rows, const Chunk& chunk) const;
  Columns pack_x(int64_t first, int64_t last, const Chunk& chunk) const;
  void multiply_rows(const Rows& rows, const Chunk& chunk, int64_t panels) const;
  void run_task(int64_t task, const Rows& rows, const Chunk& chunk, const Columns& columns, const void* its_grad) const;
};

int64_t SampledProduct::tokens_at_once() const {
  if (size == 2) return std::max<int64_t>(tokens, 1);
  int64_t most = kTokens;
  if (block_in % kernels.lanes != 0)
    most = kTokensOfSmallBlocks;
  else if (blocks() * block_bytes() > kManyValueBytes)
    most = kTokensOfManyValues;
  return std::clamp<int64_t>(tokens, 1, most);
}

SampledProduct::Rows SampledProduct::rows_of(int64_t part, int64_t parts) const {
  const int64_t begin = tasks.tasks * part / parts, end = tasks.tasks * (part + 1) / parts;
  const int64_t first = tasks.task_start[begin], last = tasks.task_start[end] - 1;
  if (first > last) return {0, 0, begin, 0};
  return {tasks.row[first], tasks.row[last] + 1 - tasks.row[first], begin, end - begin};
}

// Pack a chunk as BlockColumns.
const void* SampledProduct::pack(const Matrix& from, const Chunk& chunk, int64_t block, int64_t padded,
                                 Scratch slot) const {
  const int64_t count = from.features / block, block_units = chunk.steps * padded;
  void* packed = scratch(slot, count * block_units * unit);
  const BlockColumns columns = {from.data, from.stride, chunk.count, block, padded, packed, block_units};
  const int64_t at_a_time = std::max<int64_t>(kPackFeatures / block, 1);
  const int64_t cuts = ceil_div(count, at_a_time), step_cuts = ceil_div(chunk.steps, kPackSteps);
  parallel_tasks(step_cuts * cuts, [&](int64_t i) {
    const int64_t step = i / cuts * kPackSteps, begin = i % cuts * at_a_time;
    kernels.pack_block_columns(columns, step, std::min(step + kPackSteps, chunk.steps), begin,
                               std::min(begin + at_a_time, count));
  });
  return packed;
}

// Transpose a chunk of gradients for tiles.
const void* SampledProduct::turn(const Matrix& from, const Chunk& chunk) const {
  const int64_t steps = chunk.steps, outputs = std::min(kTileSize, block_out), chunks = from.features / outputs;
  void* packed = scratch(Scratch::kGradients, from.features * steps * unit);
  const int64_t at_a_time = kPackFeatures / outputs, cuts = ceil_div(chunks, at_a_time);
  parallel_tasks(steps / kTileSize * cuts, [&](int64_t i) {
    const int64_t step = i / cuts * kTileSize, begin = i % cuts * at_a_time, token = step * kernels.k_pack;
    for (int64_t c = begin; c < std::min(begin + at_a_time, chunks); ++c)
      kernels.turn({advance(from.data, (token * from.stride + c * outputs) * size), from.stride, chunk.count - token,
                    outputs, kTileSize, advance(packed, (c * steps + step) * outputs * unit), kTileSize, 0});
  });
  return packed;
}

const void* SampledProduct::pack_grad(const Rows& rows, const Chunk& chunk) const {
  const Matrix its_grad = part_of(grad, chunk, rows.first * block_out, rows.count * block_out);
  return on_tiles ? turn(its_grad, chunk) : pack(its_grad, chunk, block_out, block_out, Scratch::kGradients);
}

SampledProduct::Columns SampledProduct::pack_x(int64_t first, int64_t last, const Chunk& chunk) const {
  const Matrix its_x = part_of(x, chunk, first * block_in, (last - first) * block_in);
  const int64_t block = block_in % column == 0 ? column : block_in;
  const void* packed = pack(its_x, chunk, block, column, Scratch::kPanels);
  return {first, last, advance(packed, -first * padded_in * chunk.steps * unit)};
}

void SampledProduct::run_task(int64_t task, const Rows& rows, const Chunk& chunk, const Columns& columns,
                              const void* its_grad) const {
  const int64_t end = tasks.task_start[task + 1];
  int64_t k = tasks.task_start[task];
  while (k < end) {
    const int32_t row = tasks.row[k];
    k = first_block(tasks, k, end, row, int32_t(columns.first));
    const int64_t stop = first_block(tasks, k, end, row, int32_t(columns.last));
    for (int64_t taken; k < stop; k += taken) {
      taken = std::min(strip, stop - k);
      kernels.sampled_strip(
          {taken, tasks.col + k, advance(its_grad, (row - rows.first) * chunk.steps * block_out * unit), columns.packed,
           chunk.steps, block_out, block_in, padded_in, column, advance(values, k * block_bytes()), chunk.first > 0});
    }
    k = first_block(tasks, k, end, row + 1, 0);
  }
}

void SampledProduct::multiply_rows(const Rows& rows, const Chunk& chunk, int64_t panels) const {
  const void* its_grad = pack_grad(rows, chunk);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t columns = x.features / block_in;
    const Columns its_x = pack_x(columns * panel / panels, columns * (panel + 1) / panels, chunk);
    parallel_tasks(rows.tasks, [&](int64_t i) { run_task(rows.first_task + i, rows, chunk, its_x, its_grad); });
  }
}

void SampledProduct::multiply() const {
  const int64_t at_once = tokens_at_once(), threads = thread_count();
  const int64_t x_bytes = x.features / block_in * padded_in * steps_of(at_once) * unit;
  // Columns in panels that stay in a core's L2 cache while the blocks of all rows read them, with a strip or more of
  // each row.
  const int64_t strips = blocks() * block_out / std::max<int64_t>(grad.features, 1) / strip;
  const int64_t panels = std::clamp<int64_t>(ceil_div(x_bytes, kL2Bytes), 1, std::max<int64_t>(strips, 1));
  const bool is_own = threads <= kFewThreads && x_bytes <= kOwnBytes && tasks.tasks >= 2 * threads;
  const int64_t parts = is_own ? threads : 1;
  parallel_parts(parts, [&](int64_t part) {
    const Rows rows = rows_of(part, parts);
    if (rows.tasks == 0) return;
    for (int64_t token = 0; token == 0 || token < tokens; token += at_once) {  // of no tokens, the sums are zeros
      const int64_t count = std::min(at_once, tokens - token);
      multiply_rows(rows, {token, count, steps_of(count)}, panels);
    }
  });
}

}  // namespace

void linear_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in, int64_t tokens,
                  Matrix grad, Matrix x, void* values, const BlockTasks& tasks) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const LinearKernels& kernels = linear_kernels(isa, dtype, 2);  // the sum is over tokens, padded to whole units
  SampledProduct{kernels, block_out, block_in, tokens, grad, x, values, tasks, size_of(dtype)}.multiply();
}

}  // namespace blocksparse
