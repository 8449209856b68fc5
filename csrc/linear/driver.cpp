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
// Least vectors of tokens that one of a few threads takes for its own, without tiles and on them. Of many threads, each
// needs kManyOwnPanels that stay in a core's L2 cache.
constexpr int64_t kOwnVectors = 2, kOwnTileVectors = 4, kManyOwnPanels = 8, kL2Bytes = 1 << 20;
constexpr int64_t kLargestShare = 60;            // percent of the rows' cost that one of a few threads takes
constexpr int64_t kTileOutputs = 2 * kTileSize;  // of a piece on tiles
// kOutputsAtOnce: outputs of neighbouring pieces that are written together, so that each token's are whole cache lines.
// kStreamed: outputs of at least this many bytes bypass the caches if a vector fills a cache line. The next reader then
// has to wait, but making room in the caches and reading the old lines would take longer.
constexpr int64_t kOutputsAtOnce = 64, kStreamed = 4 << 20;
constexpr int64_t kPackUnits = 512, kTurnedBytes = 32 << 10;  // units of a panel, bytes of blocks of one packing task

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

// How threads divide the work.
enum class Division {
  kTokens,  // each packs panels of its own, and multiplies them with all rows of the weight
  kRows,    // each packs all panels, and multiplies them with rows of its own
  kBoth     // all pack some panels together, then multiply them, each with any rows
};

// One call of `linear`.
struct RowProduct {
  const LinearKernels& kernels;
  Activation activation;
  bool transposed;
  int64_t block_out, block_sum, tokens;
  Matrix x;
  const void *values, *bias;
  void* y;
  int64_t out_features;
  RowTasks tasks;
  int64_t size, size_sum;  // of a number, and of a sum
  bool streams;
  int64_t depth = 0;             // of the tiles, or 0
  const void* turned = nullptr;  // blocks in the order of rows, no longer transposed

  void multiply_few_tokens(int64_t copies);
  void multiply_panels();

 private:
  // Pieces on tiles are whole pairs of tiles: one that begins with the second tile of a pair leaves it to the one
  // before.
  int64_t bound(int64_t output) const {
    return depth ? std::min(ceil_div(output, kTileOutputs) * kTileOutputs, block_out) : output;
  }
  int64_t begin_of(int64_t j) const { return bound(tasks.begin[j]); }
  int64_t end_of(int64_t j) const { return bound(tasks.end[j]); }
  int64_t output_of(int64_t j) const { return tasks.row[j] * block_out + begin_of(j); }
  int64_t units() const { return x.features / kernels.k_pack; }
  int64_t token_bytes() const { return units() * kernels.unit_size; }
  int64_t vector_bytes() const { return std::max<int64_t>(token_bytes() * kernels.lanes, 1); }
  int64_t panel_bytes() const { return vector_bytes() * kernels.max_vectors; }

  RowPiece piece(int64_t j, const void* panel, int64_t width) const;
  LinearOutputs outputs(void* sums, int64_t output, int64_t count, int64_t width, int64_t token, int64_t here) const;
  void turn_blocks();
  void fetch_outputs(int64_t output, int64_t count, int64_t token, int64_t here) const;
  Panels cut_panels() const;
  Division division(const Panels& panels, int64_t threads) const;
  void pack(const Panels& panels, int64_t p, int64_t first_unit, int64_t last_unit, void* packed) const;
  void run_task(int64_t task, int64_t next_task, const Panels& panels, int64_t p, const void* packed) const;
  void pack_and_run(int64_t task, const Panels& panels, int64_t p) const;
  void share_panels(const Panels& panels, int64_t threads) const;
};

RowPiece RowProduct::piece(int64_t j, const void* panel, int64_t width) const {
  const int64_t row = tasks.row[j], start = tasks.start[row];
  return {tasks.start[row + 1] - start,
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
}

// Describe `count` outputs from `output` on, of `here` tokens from `token` on.
LinearOutputs RowProduct::outputs(void* sums, int64_t output, int64_t count, int64_t width, int64_t token,
                                  int64_t here) const {
  return {sums,
          count,
          width,
          here,
          bias ? advance(bias, output * size) : nullptr,
          activation,
          advance(y, (token * out_features + output) * size),
          out_features,
          streams};
}

void RowProduct::multiply_few_tokens(int64_t copies) {
  if (copies > 1) x = repeated(x, tokens, block_sum, block_sum * size, copies);
  parallel_tasks(tasks.tasks, [&](int64_t task) {
    for (int64_t j = tasks.task_start[task]; j < tasks.task_start[task + 1]; ++j)
      kernels.few_tokens_piece(piece(j, x.data, x.stride),
                               outputs(nullptr, output_of(j), end_of(j) - begin_of(j), 0, 0, tokens));
  });
}

void RowProduct::turn_blocks() {
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
void RowProduct::fetch_outputs(int64_t output, int64_t count, int64_t token, int64_t here) const {
  for (int64_t t = token; t < token + here; ++t) {
    const auto* to = static_cast<const char*>(advance(y, (t * out_features + output) * size));
    for (int64_t i = 0; i < count * size; i += kCacheLine) __builtin_prefetch(to + i, 1, 2);
  }
}

Panels RowProduct::cut_panels() const {
  int64_t most = kernels.max_vectors;
  if (depth)
    most = std::clamp<int64_t>(kL2Bytes / vector_bytes(), 2, most);
  else if (panel_bytes() > kPanelBytes)
    most *= 2;  // the weights do not fit the caches: wider panels read them less often
  return Panels(tokens, kernels.lanes, most);
}

Division RowProduct::division(const Panels& panels, int64_t threads) const {
  const int64_t least = depth ? kOwnTileVectors : kOwnVectors;
  bool own_tokens = threads == 1 || panels.vectors >= threads * least;
  if (threads > kFewThreads)
    own_tokens = depth ? panels.vectors >= least * ceil_div(panels.count, threads) * threads
                       : panel_bytes() <= kL2Bytes && panels.count >= kManyOwnPanels * threads;
  if (own_tokens) return panel_bytes() <= kPanelBytes ? Division::kTokens : Division::kBoth;
  return threads <= kFewThreads ? Division::kRows : Division::kBoth;
}

void RowProduct::pack(const Panels& panels, int64_t p, int64_t first_unit, int64_t last_unit, void* packed) const {
  kernels.pack_panel(advance(x.data, panels.first(p) * x.stride * size), x.stride, panels.real(p), first_unit,
                     last_unit, panels.width(p), std::max<int64_t>(depth, 1), packed);
}

// Compute the outputs of one task for a panel. The thread will probably compute `next_task` next, so that is
// prefetched.
void RowProduct::run_task(int64_t task, int64_t next_task, const Panels& panels, int64_t p, const void* packed) const {
  const int64_t token = panels.first(p), here = panels.real(p), width = panels.width(p);
  const auto after = [&](int64_t j) {
    if (j + 1 < tasks.task_start[task + 1]) return j + 1;
    return next_task < tasks.tasks ? tasks.task_start[next_task] : j;
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
        kernels.row_piece(piece(i, packed, width), piece(after(i), packed, width),
                          advance(sums, (output_of(i) - output) * width * size_sum));
    kernels.write_outputs(outputs(sums, output, count, width, token, here));
  }
  // Streamed stores are not ordered by the end of a parallel loop.
  if (streams) std::atomic_thread_fence(std::memory_order_seq_cst);
}

void RowProduct::pack_and_run(int64_t task, const Panels& panels, int64_t p) const {
  void* packed = scratch(Scratch::kPanels, panels.width(p) * token_bytes());
  pack(panels, p, 0, units(), packed);
  run_task(task, tasks.tasks, panels, p, packed);
}

void RowProduct::multiply_panels() {
  if (depth && transposed) turn_blocks();
  const RowTasks shared = tasks;
  const int64_t threads = thread_count(), block_rows = out_features / block_out;
  Panels panels = cut_panels();
  switch (division(panels, threads)) {
    case Division::kTokens: {
      const RowsInOrder rows(shared.start, block_rows, block_out, 1);
      tasks = rows.of(shared);
      panels.count = ceil_div(panels.count, threads) * threads;
      return parallel_tasks(panels.count, [&](int64_t p) { pack_and_run(0, panels, p); });
    }
    case Division::kRows: {
      const RowsInOrder rows(shared.start, block_rows, block_out, threads);
      if (rows.largest_share > kLargestShare) break;
      tasks = rows.of(shared);
      return parallel_tasks(tasks.tasks, [&](int64_t task) {
        for (int64_t p = 0; p < panels.count; ++p) pack_and_run(task, panels, p);
      });
    }
    case Division::kBoth:
      break;
  }
  share_panels(panels, threads);
}

void RowProduct::share_panels(const Panels& panels, int64_t threads) const {
  const int64_t cuts = ceil_div(units(), kPackUnits);
  const int64_t at_once = std::clamp<int64_t>(kPanelBytes / panel_bytes(), 1, std::max<int64_t>(panels.count, 1));
  for (int64_t first = 0; first < panels.count; first += at_once) {
    const int64_t here = std::min(at_once, panels.count - first), first_token = panels.first(first);
    void* packed = scratch(Scratch::kPanels, (panels.first(first + here) - first_token) * token_bytes());
    const auto packed_panel = [&](int64_t p) {
      return advance(packed, (panels.first(p) - first_token) * token_bytes());
    };
    parallel_tasks(here * cuts, [&](int64_t i) {
      const int64_t p = first + i / cuts, begin = i % cuts * kPackUnits;
      pack(panels, p, begin, std::min(begin + kPackUnits, units()), packed_panel(p));
    });
    parallel_tasks(here * tasks.tasks, [&](int64_t i) {
      const int64_t p = first + i / tasks.tasks, task = i % tasks.tasks;
      run_task(task, task + threads, panels, p, packed_panel(p));
    });
  }
}

}  // namespace

const LinearKernels& linear_kernels(const InstructionSet& isa, DType dtype, int64_t block_sum) {
  return kSelect[isa.index](dtype, block_sum);
}

void linear(const InstructionSet& isa, DType dtype, Activation activation, bool transposed, int64_t block_out,
            int64_t block_sum, int64_t tokens, Matrix x, const void* values, const void* bias, void* y,
            int64_t out_features, const RowTasks& tasks) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const LinearKernels& kernels = linear_kernels(isa, dtype, block_sum);
  const int64_t size = size_of(dtype);
  const bool streams = kernels.lanes * kernels.unit_size == kCacheLine && tokens * out_features * size >= kStreamed &&
                       out_features * size % kCacheLine == 0;
  RowProduct product{kernels, activation,   transposed, block_out, block_sum,          tokens, x, values, bias,
                     y,       out_features, tasks,      size,      size_of_sum(dtype), streams};
  if (const int64_t copies = kernels.few_tokens(tokens, block_out, block_sum, transposed))
    return product.multiply_few_tokens(copies);
  product.depth = kernels.tile_depth(block_out, block_sum);
  product.multiply_panels();
}

}  // namespace blocksparse
