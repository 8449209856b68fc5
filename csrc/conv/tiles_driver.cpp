// Convolutions on tiles. Each thread copies a part of the images with borders of zeros. In the copy the positions that
// a tap meets lie one behind the other, across lines and images, so that all tiles are whole.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "conv/conv.hpp"
#include "core/addresses.hpp"
#include "core/parallel.hpp"

namespace blocksparse {

namespace {

// Bytes of a copy, which stays in the L2 cache, and least positions of one. At once computed positions: two tiles.
constexpr int64_t kCopyBytes = 1 << 20, kLeastPositions = 128, kPositions = 2 * kTileSize;
constexpr int64_t kTasksPerThread = 4;
// At a distance of a multiple of this, the same channels of all positions would share an eighth of the L1 cache's sets.
constexpr int64_t kCrowded = 512;
// Outputs that are written together, which in 16 bits are two cache lines.
constexpr int64_t kOutputs = 64;
// Of the positions with borders, at least this share must have outputs.
constexpr double kLeastShare = 0.4;

// Images with borders, whose positions are counted one after another.
struct Borders {
  int64_t before[3], size[3];  // per axis: zeros before the image, and all positions

  // Return whether each axis has one run of all outputs, with steps of one.
  bool fit(const AxisRuns* whole, const Image& x, const Image& y) {
    for (int a = 0; a < 3; ++a) {
      const AxisRuns& axis = whole[a];
      if (axis.count != 1 || axis.in_step != 1 || axis.out_step != 1 || axis.first[0] != 0 ||
          axis.length[0] != y.size[a])
        return false;
      int64_t first = 0, last = std::max(x.size[a], y.size[a]);
      for (int64_t i = 0; i < axis.tap_start[1]; ++i) {
        first = std::min(first, axis.at[i]);
        last = std::max(last, axis.at[i] + y.size[a]);
      }
      before[a] = -first, size[a] = last - first;
    }
    return true;
  }
  bool empty(const Image& x) const { return std::equal(size, size + 3, x.size); }
  int64_t positions() const { return size[0] * size[1] * size[2]; }

  // Copy the positions [first, last) of all images, each of some bytes, to places `stride` bytes apart.
  void copy(const Image& x, int64_t n, int64_t bytes, int64_t stride, int64_t first, int64_t last, char* to) const {
    for (int64_t p = first; p < last;) {
      const int64_t line = p / size[2], column = p % size[2], end = std::min(size[2], column + last - p);
      const int64_t row = line % size[1] - before[1], plane = line / size[1] % size[0] - before[0];
      const int64_t image = line / size[1] / size[0];
      const bool inside = image < n && 0 <= row && row < x.size[1] && 0 <= plane && plane < x.size[0];
      const int64_t begin = inside ? std::clamp(before[2], column, end) : end;
      const int64_t stop = inside ? std::clamp(before[2] + x.size[2], begin, end) : end;
      std::memset(to, 0, (begin - column) * stride);
      to += (begin - column) * stride;
      const int64_t from = ((image * x.size[0] + plane) * x.size[1] + row) * x.size[2] - before[2];
      for (int64_t c = begin; c < stop; ++c, to += stride) std::memcpy(to, advance(x.data, (from + c) * bytes), bytes);
      std::memset(to, 0, (end - stop) * stride);
      to += (end - stop) * stride, p += end - column;
    }
  }

  // Write to `to` for each of the positions [first, last) which position of y it computes, or a negative number.
  void find_outputs(const Image& y, int64_t n, int64_t first, int64_t last, int64_t* to) const {
    for (int64_t p = first; p < last;) {
      const int64_t line = p / size[2], column = p % size[2], end = std::min(size[2], column + last - p);
      const int64_t row = line % size[1], plane = line / size[1] % size[0], image = line / size[1] / size[0];
      const bool inside = image < n && plane < y.size[0] && row < y.size[1];
      const int64_t start = ((image * y.size[0] + plane) * y.size[1] + row) * y.size[2];
      for (int64_t c = column; c < end; ++c) *to++ = inside && c < y.size[2] ? start + c : -1;
      p += end - column;
    }
  }
};

// The terms of all rows: a block and a tap each.
struct AllTerms {
  std::vector<int64_t> start, input, weight;
  int64_t farthest = 0;  // positions from a position to the last that it meets

  AllTerms(const Borders& borders, const AxisRuns* whole, const int64_t* kernel, const ChannelRows& rows,
           int64_t x_step, int64_t steps, int64_t tap_units) {
    std::vector<int64_t> tap, at;
    for (int64_t i = 0; i < whole[0].tap_start[1]; ++i)
      for (int64_t j = 0; j < whole[1].tap_start[1]; ++j)
        for (int64_t k = 0; k < whole[2].tap_start[1]; ++k) {
          tap.push_back((whole[0].tap[i] * kernel[1] + whole[1].tap[j]) * kernel[2] + whole[2].tap[k]);
          at.push_back(((whole[0].at[i] + borders.before[0]) * borders.size[1] + whole[1].at[j] + borders.before[1]) *
                           borders.size[2] +
                       whole[2].at[k] + borders.before[2]);
          farthest = std::max(farthest, at.back());
        }
    const int64_t taps = kernel[0] * kernel[1] * kernel[2];
    for (int64_t r = 0; r < rows.rows; ++r) {
      start.push_back(int64_t(input.size()));
      for (int64_t b = rows.start[r]; b < rows.start[r + 1]; ++b)
        for (size_t t = 0; t < tap.size(); ++t) {
          input.push_back(at[t] * x_step + rows.col[b] * steps);
          weight.push_back((b * taps + tap[t]) * tap_units);
        }
    }
    start.push_back(int64_t(input.size()));
  }
};

}  // namespace

bool conv_on_tiles(const ConvKernels& kernels, DType dtype, Activation activation, int64_t block_out, int64_t block_sum,
                   const int64_t* kernel, int64_t n, const Image& x, const void* weights, const void* bias,
                   const Image& y, const AxisRuns* whole, const ChannelRows& rows, bool finite) {
  const int64_t steps = block_sum / kernels.k_pack, size = size_of(dtype);
  const int64_t sum_size = int64_t(kernels.sum_size);
  Borders borders;
  const bool whole_tiles = block_out % kTileSize == 0 && (steps % kTileSize == 0 || steps == kTileSize / 2);
  if (!kernels.bordered_piece || !whole_tiles || !borders.fit(whole, x, y)) return false;
  if (!finite && !borders.empty(x)) return false;  // a border times infinity would be NaN
  const int64_t all = n * borders.positions(), real = n * y.size[0] * y.size[1] * y.size[2];
  if (double(real) < kLeastShare * double(all)) return false;

  const int64_t bytes = x.channels * size, stride = bytes + (bytes % kCrowded == 0 ? kCacheLine : 0);
  const int64_t x_step = stride / size / kernels.k_pack;
  const AllTerms terms(borders, whole, kernel, rows, x_step, steps, steps * block_out);
  if (terms.farthest > std::max(kCopyBytes / stride / 2, kLeastPositions)) return false;  // more copies than products
  const int64_t wanted = ceil_div(all, kTasksPerThread * thread_count());
  const int64_t most = std::max(kCopyBytes / stride - terms.farthest, kLeastPositions);
  const int64_t at_once = std::clamp(ceil_div(wanted, kPositions) * kPositions, kLeastPositions, most);
  const int64_t together = std::max<int64_t>(kOutputs / block_out, 1);
  const bool streams = bypasses_caches(y, n, block_out, size);
  // Few positions: several tasks compute a part of the rows each.
  const int64_t chunks = ceil_div(all, at_once), groups = ceil_div(rows.rows, together);
  const int64_t shares = std::clamp<int64_t>(ceil_div(thread_count(), std::max<int64_t>(chunks, 1)), 1, groups);
  parallel_tasks(chunks * shares, [&](int64_t i) {
    const int64_t share = i % shares, first = i / shares * at_once, last = std::min(first + at_once, all);
    const int64_t end = last + kPositions;  // the last tiles may reach farther than the outputs
    char* copy = static_cast<char*>(scratch(Scratch::kPanels, (end + terms.farthest - first) * stride));
    borders.copy(x, n, bytes, stride, first, end + terms.farthest, copy);
    std::vector<int64_t> at(end - first, -1);
    borders.find_outputs(y, n, first, last, at.data());
    for (int64_t& output : at) output *= y.channels;
    std::vector<int64_t> starts;  // of tiles, which begin at outputs
    for (int64_t p = 0; p < last - first; ++p)
      if (at[p] >= 0) starts.push_back(p), p += kPositions - 1;
    const int64_t sums_row = together * block_out;
    void* sums = scratch(Scratch::kSums, kPositions * sums_row * sum_size);
    const int64_t last_row = std::min(groups * (share + 1) / shares * together, rows.rows);
    for (int64_t r = groups * share / shares * together; r < last_row; r += together) {
      const int64_t here = std::min(together, last_row - r), output = r * block_out;
      for (const int64_t start : starts) {
        for (int64_t k = 0; k < here; ++k) {
          const int64_t begin = terms.start[r + k];
          kernels.bordered_piece({terms.start[r + k + 1] - begin, terms.input.data() + begin,
                                  terms.weight.data() + begin, weights, steps, block_out, copy + start * stride, x_step,
                                  kPositions, advance(sums, k * block_out * sum_size), sums_row});
        }
        kernels.write_positions({sums, sums_row, kPositions, here * block_out,
                                 bias ? advance(bias, output * size) : nullptr, activation,
                                 const_cast<char*>(advance(y.data, output * size)), at.data() + start, streams});
      }
    }
    // Streamed stores are not ordered by the end of a parallel loop.
    if (streams) std::atomic_thread_fence(std::memory_order_seq_cst);
  });
  return true;
}

}  // namespace blocksparse
