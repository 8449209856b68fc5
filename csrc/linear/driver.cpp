#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"
#include "linear/linear.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const LinearKernels& select_linear(DType dtype, int64_t block_sum))

namespace {

constexpr decltype(&portable::select_linear) kSelect[] = {BLOCKSPARSE_BY_SET(select_linear)};

// Bytes of packed panels per pass over the weights: they stay in the outer caches until they are used.
constexpr int64_t kPanelBytes = 8 << 20;
// One of a few threads packs and multiplies tokens of its own if it gets at least this many vectors of them, on tiles
// kOwnTileVectors. With fewer, threads share the rows of the weight instead of the tokens, unless one would get more
// than kLargestShare percent. Of many threads, each needs kManyOwnPanels that stay in a core's L2 cache.
constexpr int64_t kOwnVectors = 2, kOwnTileVectors = 4, kLargestShare = 60, kManyOwnPanels = 8, kL2Bytes = 1 << 20;
// A few threads each pack x for the sampled product up to this size.
constexpr int64_t kOwnBytes = 16 << 20;
constexpr int64_t kTileOutputs = 2 * kTileSize;  // of a piece on tiles
// Bytes, and bounds on the number, of tokens that the sampled product packs at a time: more would leave the outer
// caches, fewer would write the values too often. 16-bit types pack all tokens at once, since sums over chunks would
// round.
constexpr int64_t kWgradBytes = 4 << 20, kLeastTokens = 256, kMostTokens = 1024;
// kOutputsAtOnce: outputs of neighbouring pieces that are written together, so that each token's are whole cache lines.
// kStreamed: outputs of at least this many bytes bypass the caches if a vector fills a cache line. The next reader then
// has to wait, but making room in the caches and reading the old lines would take longer.
constexpr int64_t kOutputsAtOnce = 64, kStreamed = 4 << 20;
// Work of one packing task: units of a panel; steps and features of block columns; bytes of blocks.
constexpr int64_t kPackUnits = 512, kPackSteps = 16, kPackFeatures = 1024, kTurnedBytes = 32 << 10;

// Tokens cut into panels of about equal width, each a whole number of vectors, `most` or fewer.
struct Panels {
  int64_t tokens, lanes, vectors, count;

  Panels(int64_t tokens, int64_t lanes, int64_t most)
      : tokens(tokens), lanes(lanes), vectors(ceil_div(tokens, lanes)), count(ceil_div(vectors, most)) {}
  int64_t first_vector(int64_t p) const { return vectors * p / count; }
  int64_t first(int64_t p) const { return first_vector(p) * lanes; }
  int64_t width(int64_t p) const { return (first_vector(p + 1) - first_vector(p)) * lanes; }
  int64_t real(int64_t p) const { return std::min(tokens - first(p), width(p)); }
};

// All rows in their order, in one task or several: the outputs of neighbouring rows are then written together.
struct RowsInOrder {
  std::vector<int32_t> row, begin, end;
  std::vector<int64_t> task_start = {0};
  int64_t largest_share = 0;  // percent of the cost, of a task

  RowsInOrder(const int64_t* start, int64_t rows, int64_t block_out, int64_t tasks) {
    const auto cost_of = [&](int64_t r) { return std::max<int64_t>(start[r + 1] - start[r], 1); };  // it is written
    int64_t total = 0, cost = 0, of_task = 0;
    for (int64_t r = 0; r < rows; ++r) total += cost_of(r) * block_out;
    const int64_t pieces = rows * ceil_div(block_out, kOutputsAtOnce);
    row.reserve(pieces), begin.reserve(pieces), end.reserve(pieces);
    const auto close = [&] {
      task_start.push_back(int64_t(row.size()));
      largest_share = std::max(largest_share, 100 * of_task / std::max<int64_t>(total, 1));
      of_task = 0;
    };
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t first = 0; first < block_out; first += kOutputsAtOnce) {
        const int64_t last = std::min(first + kOutputsAtOnce, block_out), here = cost_of(r) * (last - first);
        // Cut where the task comes nearest to its share. Tasks share no cache line of outputs.
        if (int64_t(task_start.size()) < tasks && (2 * cost + here) * tasks >= 2 * total * int64_t(task_start.size()) &&
            (r * block_out + first) % kOutputsAtOnce == 0 && of_task > 0)
          close();
        cost += here, of_task += here;
        row.push_back(int32_t(r));
        begin.push_back(int32_t(first));
        end.push_back(int32_t(last));
      }
    close();
  }
  RowTasks of(const RowTasks& tasks) const {
    return {tasks.start,  tasks.col,  tasks.position,    row.data(),
            begin.data(), end.data(), task_start.data(), int64_t(task_start.size()) - 1};
  }
};

// Copy x with each block of features repeated `copies` times.
Matrix repeated(const Matrix& x, int64_t tokens, int64_t block, int64_t block_bytes, int64_t copies) {
  const int64_t blocks = x.features / block, size = block_bytes / block;
  char* to = static_cast<char*>(scratch(Scratch::kPanels, tokens * blocks * copies * block_bytes));
  const Matrix result = {to, x.features * copies, x.features * copies};
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t i = 0; i < copies; ++i, to += block_bytes)
        std::memcpy(to, advance(x.data, t * x.stride * size + b * block_bytes), block_bytes);
  return result;
}

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

const LinearKernels& linear_kernels(const InstructionSet& isa, DType dtype, int64_t block_sum) {
  return kSelect[isa.index](dtype, block_sum);
}

void linear(const InstructionSet& isa, DType dtype, Activation activation, bool transposed, int64_t block_out,
            int64_t block_sum, int64_t tokens, Matrix x, const void* values, const void* bias, void* y,
            int64_t out_features, const RowTasks& shared) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const LinearKernels& kernels = linear_kernels(isa, dtype, block_sum);
  RowTasks tasks = shared;
  const int64_t size = size_of(dtype), size_sum = size_of_sum(dtype);
  const bool streams = kernels.lanes * kernels.unit_size == kCacheLine && tokens * out_features * size >= kStreamed &&
                       out_features * size % kCacheLine == 0;
  const int64_t copies = kernels.few_tokens(tokens, block_out, block_sum, transposed);
  const int64_t depth = copies ? 0 : kernels.tile_depth(block_out, block_sum);
  // Pieces on tiles are whole pairs of tiles: one that begins with the second tile of a pair leaves it to the one
  // before.
  const auto bound = [&](int64_t output) {
    return depth ? std::min(ceil_div(output, kTileOutputs) * kTileOutputs, block_out) : output;
  };
  const auto begin_of = [&](int64_t j) { return bound(tasks.begin[j]); };
  const auto end_of = [&](int64_t j) { return bound(tasks.end[j]); };
  const auto output_of = [&](int64_t j) { return tasks.row[j] * block_out + begin_of(j); };
  const void* turned = nullptr;  // blocks in the order of rows, no longer transposed
  const auto piece_of = [&](int64_t j, const void* panel, int64_t width) {
    const int64_t row = tasks.row[j], start = tasks.start[row];
    return RowPiece{tasks.start[row + 1] - start,
                    tasks.col + start,
                    tasks.position + start,
                    depth ? advance(turned ? turned : values, start * block_out * block_sum * size) : values,
                    block_out,
                    block_sum,
                    transposed && !turned,
                    begin_of(j),
                    end_of(j),
                    panel,
                    width,
                    depth};
  };
  // Describe `count` outputs from `output` on, of `here` tokens from `token` on.
  const auto outputs_of = [&](void* sums, int64_t output, int64_t count, int64_t width, int64_t token, int64_t here) {
    return LinearOutputs{sums,
                         count,
                         width,
                         here,
                         bias ? advance(bias, output * size) : nullptr,
                         activation,
                         advance(y, (token * out_features + output) * size),
                         out_features,
                         streams};
  };

  if (copies) {
    if (copies > 1) x = repeated(x, tokens, block_sum, block_sum * size, copies);
    return parallel_tasks(tasks.tasks, [&](int64_t task) {
      for (int64_t j = tasks.task_start[task]; j < tasks.task_start[task + 1]; ++j)
        kernels.few_tokens_piece(piece_of(j, x.data, x.stride),
                                 outputs_of(nullptr, output_of(j), end_of(j) - begin_of(j), 0, 0, tokens));
    });
  }
  if (depth && transposed) {
    const int64_t count = tasks.start[out_features / block_out], block_bytes = block_out * block_sum * size;
    void* to = scratch(Scratch::kTurned, count * block_bytes);
    const int64_t units = block_sum / kernels.k_pack, at_a_time = std::max<int64_t>(kTurnedBytes / block_bytes, 1);
    parallel_tasks(ceil_div(count, at_a_time), [&](int64_t i) {
      for (int64_t b = i * at_a_time; b < std::min((i + 1) * at_a_time, count); ++b)
        kernels.turn({advance(values, tasks.position[b] * block_bytes), block_out, block_sum, block_out, units,
                      advance(to, b * block_bytes), units, kTileSize});
    });
    turned = to;
  }
  // Fetch the cache lines of outputs that are written later, so that the writes do not wait for them.
  const auto fetch_outputs = [&](int64_t output, int64_t count, int64_t token, int64_t here) {
    for (int64_t t = token; t < token + here; ++t) {
      const auto* to = static_cast<const char*>(advance(y, (t * out_features + output) * size));
      for (int64_t i = 0; i < count * size; i += kCacheLine) __builtin_prefetch(to + i, 1, 2);
    }
  };
  // Compute the outputs of one task for a panel. The thread will probably compute `next_task` next, so that is
  // prefetched.
  const auto run_task = [&](int64_t task, int64_t next_task, int64_t token, int64_t here, const void* panel,
                            int64_t width) {
    const auto after = [&](int64_t piece) {
      if (piece + 1 < tasks.task_start[task + 1]) return piece + 1;
      return next_task < tasks.tasks ? tasks.task_start[next_task] : piece;
    };
    for (int64_t j = tasks.task_start[task], next; j < tasks.task_start[task + 1]; j = next) {
      const int64_t output = output_of(j);
      int64_t count = end_of(j) - begin_of(j);
      for (next = j + 1; next < tasks.task_start[task + 1] && output_of(next) == output + count; ++next) {
        const int64_t more = end_of(next) - begin_of(next);
        if (count + more > kOutputsAtOnce) break;
        count += more;
      }
      if (count == 0) continue;
      if (!streams) fetch_outputs(output, count, token, here);
      void* sums = scratch(Scratch::kSums, count * width * size_sum);
      for (int64_t i = j; i < next; ++i)
        if (begin_of(i) < end_of(i))  // tiles without rows are invalid
          kernels.row_piece(piece_of(i, panel, width), piece_of(after(i), panel, width),
                            advance(sums, (output_of(i) - output) * width * size_sum));
      kernels.write_outputs(outputs_of(sums, output, count, width, token, here));
    }
    // Streamed stores are not ordered by the end of a parallel loop.
    if (streams) std::atomic_thread_fence(std::memory_order_seq_cst);
  };

  const int64_t units = x.features / kernels.k_pack, token_bytes = units * kernels.unit_size;
  const int64_t panel_depth = std::max<int64_t>(depth, 1);
  const int64_t vector_bytes = std::max<int64_t>(token_bytes * kernels.lanes, 1);
  const int64_t width_bytes = vector_bytes * kernels.max_vectors;
  int64_t most = kernels.max_vectors;
  if (depth) {
    most = std::clamp<int64_t>(kL2Bytes / vector_bytes, 2, most);
  } else if (width_bytes > kPanelBytes) {
    most *= 2;  // the weights do not fit the caches: wider panels read them less often
  }
  Panels panels(tokens, kernels.lanes, most);
  const int64_t threads = thread_count(), block_rows = out_features / block_out;
  const auto multiply_panel = [&](int64_t p, int64_t task) {
    void* packed = scratch(Scratch::kPanels, panels.width(p) * token_bytes);
    kernels.pack_panel(advance(x.data, panels.first(p) * x.stride * size), x.stride, panels.real(p), 0, units,
                       panels.width(p), panel_depth, packed);
    run_task(task, tasks.tasks, panels.first(p), panels.real(p), packed, panels.width(p));
  };
  const int64_t even = ceil_div(panels.count, threads) * threads;
  bool is_own = threads == 1;
  if (threads > kFewThreads) {
    is_own = depth ? panels.vectors >= kOwnTileVectors * even
                   : width_bytes <= kL2Bytes && panels.count >= kManyOwnPanels * threads;
  } else if (threads > 1) {
    is_own = panels.vectors >= threads * (depth ? kOwnTileVectors : kOwnVectors);
  }
  if (is_own && width_bytes <= kPanelBytes) {
    panels.count = even;
    const RowsInOrder rows(tasks.start, block_rows, block_out, 1);
    tasks = rows.of(shared);
    return parallel_tasks(panels.count, [&](int64_t p) { multiply_panel(p, 0); });
  }
  if (!is_own && threads <= kFewThreads) {
    const RowsInOrder rows(tasks.start, block_rows, block_out, threads);
    if (rows.largest_share <= kLargestShare) {
      tasks = rows.of(shared);
      return parallel_tasks(tasks.tasks, [&](int64_t task) {
        for (int64_t p = 0; p < panels.count; ++p) multiply_panel(p, task);
      });
    }
  }
  const int64_t at_once = std::clamp<int64_t>(kPanelBytes / width_bytes, 1, std::max<int64_t>(panels.count, 1));
  for (int64_t first = 0; first < panels.count; first += at_once) {
    const int64_t here = std::min(at_once, panels.count - first);
    const int64_t first_token = panels.first(first);
    void* packed = scratch(Scratch::kPanels, (panels.first(first + here) - first_token) * token_bytes);
    const auto panel_at = [&](int64_t p) { return advance(packed, (panels.first(p) - first_token) * token_bytes); };

    const int64_t cuts = ceil_div(units, kPackUnits);
    parallel_tasks(here * cuts, [&](int64_t i) {
      const int64_t p = first + i / cuts, begin = i % cuts * kPackUnits;
      kernels.pack_panel(advance(x.data, panels.first(p) * x.stride * size), x.stride, panels.real(p), begin,
                         std::min(begin + kPackUnits, units), panels.width(p), panel_depth, panel_at(p));
    });
    parallel_tasks(here * tasks.tasks, [&](int64_t i) {
      const int64_t p = first + i / tasks.tasks, task = i % tasks.tasks;
      run_task(task, task + threads, panels.first(p), panels.real(p), panel_at(p), panels.width(p));
    });
  }
}

void linear_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in, int64_t tokens,
                  Matrix grad, Matrix x, void* values, const BlockTasks& tasks) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const LinearKernels& kernels = linear_kernels(isa, dtype, 2);  // the sum is over tokens, padded to whole units
  const int64_t size = size_of(dtype), unit = kernels.unit_size;
  const int64_t padded_in = kernels.padded_in(block_in), strip = kernels.strip(block_in);
  const bool on_tiles = kernels.tile_depth(block_out, 2) > 0;  // x then is packed in columns of tiles
  const int64_t chunk = on_tiles && block_in % kTileSize == 0 ? kTileSize : padded_in;
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
