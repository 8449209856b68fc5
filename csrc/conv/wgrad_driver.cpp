// The weight gradient of a convolution: the product of two images, sampled at the stored blocks.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "conv/conv.hpp"
#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "linear/linear.hpp"

namespace blocksparse {
namespace {

// Most positions and most lines of the sampled product at a time.
constexpr int64_t kSampled = 128, kSampledLines = 64;
// Bytes of packed lines and of sums of the blocks that are sampled together.
constexpr int64_t kGroupBytes = 192 << 10;
// Least number of tasks, even with few blocks; bytes of a cache line.
constexpr int64_t kManyTasks = 16;

// One of the two images.
struct Side {
  const Image& image;
  int64_t block, padded;  // channels
  bool is_input;
  const int32_t* index;  // of each stored block, its block of channels
  Scratch slot;

  int64_t blocks() const { return image.channels / block; }
};

// Return where groups of blocks begin that share packed lines. The packed lines, `bytes` per block of channels and
// side, and the sums of a group fit the L2 cache.
std::vector<int64_t> groups_of(int64_t nnz, const Side* sides, std::array<int64_t, 2> bytes, int64_t block_bytes) {
  std::vector<int64_t> groups = {0};
  std::vector<int64_t> last[2];  // the last group that has the block of channels
  for (int s : {0, 1}) last[s].assign(sides[s].blocks(), -1);
  int64_t used = 0;
  for (int64_t k = 0; k < nnz; ++k) {
    const auto needed = [&] {
      int64_t more = block_bytes;
      for (int s : {0, 1})
        if (last[s][sides[s].index[k]] + 1 < int64_t(groups.size())) more += bytes[s];
      return more;
    };
    if (k > groups.back() && used + needed() > kGroupBytes) groups.push_back(k), used = 0;
    used += needed();
    for (int s : {0, 1}) last[s][sides[s].index[k]] = int64_t(groups.size()) - 1;
  }
  groups.push_back(nnz);
  return groups;
}

}  // namespace

void conv_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in, int64_t n,
                const Image& grad, const Image& x, bool transposed, void* values, const AxisTaps* axes,
                const int32_t* row, const int32_t* col, int64_t nnz) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const LinearKernels& packing =
      linear_kernels(isa, dtype, 1);  // the sum is over positions, which taps shift one by one
  const ConvKernels& kernels = conv_kernels(isa, dtype, 1);
  const int64_t size = size_of(dtype), unit = kernels.unit_size, sum = kernels.sum_size;
  const int64_t taps = axes[0].taps * axes[1].taps * axes[2].taps;

  // Lanes are the inputs of a block, or the outputs if there are more of them and the inputs do not fill a vector.
  const bool swapped = block_in < kernels.lanes && block_out > block_in;
  Side sides[2] = {{grad, block_out, 0, transposed, row, Scratch::kGradients},
                   {x, block_in, 0, !transposed, col, Scratch::kPanels}};
  Side &left = sides[swapped ? 1 : 0], &right = sides[swapped ? 0 : 1];
  left.padded = left.block;
  right.padded = ceil_div(right.block, kernels.lanes) * kernels.lanes;
  const Image& output = transposed ? x : grad;

  // Lines of the output ([n, depth, height] of them), cut into pieces; a bunch at a time for all taps of some blocks.
  // If blocks are few, lines are cut into slices with sums of their own; the cuts do not depend on the number of
  // threads.
  const AxisTaps& across = axes[2];
  const int64_t lines = n * output.size[0] * output.size[1], width = output.size[2], pieces = ceil_div(width, kSampled);
  const int64_t bunch = std::clamp<int64_t>(kSampled / std::max<int64_t>(ceil_div(width, pieces), 1), 1, kSampledLines);
  const int64_t tap_sums = left.block * right.padded, block_sums = taps * tap_sums, slice_sums = nnz * block_sums;

  const auto lines_of = [&](const Side& side) { return bunch * (side.is_input ? axes[1].taps : 1); };
  const auto packed_bytes = [&](const Side& side) { return kSampled * lines_of(side) / bunch * side.padded * unit; };
  const std::vector<int64_t> groups =
      groups_of(nnz, sides, {packed_bytes(sides[0]), packed_bytes(sides[1])}, block_sums / axes[0].taps * sum);
  const int64_t tasks = (int64_t(groups.size()) - 1) * axes[0].taps, bunches = ceil_div(lines, bunch);
  const int64_t slices = std::clamp<int64_t>(ceil_div(kManyTasks, tasks), 1, std::max<int64_t>(bunches, 1));
  void* sums = scratch(Scratch::kTurned, slices * slice_sums * sum);
  parallel_tasks(nnz * slices, [&](int64_t k) { memset(advance(sums, k * block_sums * sum), 0, block_sums * sum); });

  parallel_tasks(tasks * slices, [&](int64_t i) {
    const int64_t slice = i / tasks, group = i % tasks / axes[0].taps, t0 = i % axes[0].taps;
    const int64_t first_block = groups[group], blocks = groups[group + 1] - first_block;
    char* const to_sums = advance(sums, (slice * slice_sums + first_block * block_sums) * sum);
    // The channel blocks of this group on either side, and the index of each stored block among them.
    std::vector<int64_t> channels[2], place[2];
    for (int s : {0, 1}) {
      std::vector<int64_t> found(sides[s].blocks(), -1);
      for (int64_t k = 0; k < blocks; ++k) {
        int64_t& at = found[sides[s].index[first_block + k]];
        if (at < 0) at = int64_t(channels[s].size()), channels[s].push_back(sides[s].index[first_block + k]);
        place[s].push_back(at);
      }
    }
    const int64_t* const input_size = (transposed ? grad : x).size;
    // Return the input line that output line l meets with tap t1, or -1.
    const auto input_line = [&](int64_t l, int64_t t1) -> int64_t {
      const int64_t y = l % output.size[1], z = l / output.size[1] % output.size[0];
      const int64_t past1 = y - axes[1].first_output[t1], past0 = z - axes[0].first_output[t0];
      if (past1 < 0 || past1 >= axes[1].count[t1] || past0 < 0 || past0 >= axes[0].count[t0]) return -1;
      const int64_t input_z = axes[0].first_input[t0] + past0 * axes[0].stride;
      return (l / output.size[1] / output.size[0] * input_size[0] + input_z) * input_size[1] + axes[1].first_input[t1] +
             past1 * axes[1].stride;
    };
    std::vector<int64_t> input_lines(bunch * axes[1].taps);
    std::vector<int32_t> slots;
    const int64_t begin_line = bunches * slice / slices * bunch;
    const int64_t end_line = std::min(bunches * (slice + 1) / slices * bunch, lines);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t first = width * piece / pieces, last = width * (piece + 1) / pieces;
      // Return the ranges of both lines that a tap meets.
      const auto met = [&](int64_t t) {
        const int64_t begin = std::max(first, across.first_output[t]);
        return std::make_pair(begin, std::min(last, across.first_output[t] + across.count[t]));
      };
      const auto input_at = [&](int64_t t, int64_t output_at) {
        return across.first_input[t] + (output_at - across.first_output[t]) * across.stride;
      };
      int64_t from[2] = {INT64_MAX, INT64_MAX}, to[2] = {0, 0};  // output, input
      for (int64_t t = 0; t < across.taps; ++t) {
        const auto [begin, end] = met(t);
        if (begin >= end) continue;
        from[0] = std::min(from[0], begin), to[0] = std::max(to[0], end);
        from[1] = std::min(from[1], input_at(t, begin)), to[1] = std::max(to[1], input_at(t, end - 1) + 1);
      }
      if (from[0] >= to[0]) continue;

      // Lines side by side in the type that is multiplied: [channel blocks, lines, positions, padded].
      struct Packed {
        char* data;
        int64_t line, block;  // bytes
      } packed[2];
      for (int s : {0, 1}) {
        const Side& side = sides[s];
        const int64_t line = (to[side.is_input] - from[side.is_input]) * side.padded * unit;
        const int64_t block = lines_of(side) * line;
        packed[s] = {static_cast<char*>(scratch(side.slot, int64_t(channels[s].size()) * block)), line, block};
      }
      const auto line_at = [&](const Side& side, int64_t l, int64_t channel) {
        const int64_t position = l * side.image.size[2] + from[side.is_input];
        return advance(side.image.data, (position * side.image.channels + channel * side.block) * size);
      };
      const auto pack = [&](int s, int64_t l, int64_t slot) {
        const Side& side = sides[s];
        const int64_t length = to[side.is_input] - from[side.is_input];
        for (size_t c = 0; c < channels[s].size(); ++c)
          packing.pack_block_columns(
              {line_at(side, l, channels[s][c]), side.image.channels, length, side.block, side.padded,
               packed[s].data + int64_t(c) * packed[s].block + slot * packed[s].line, 0},
              0, length, 0, 1);
      };
      const auto fetch_line = [&](int s, int64_t l, int64_t channel) {
        const Side& side = sides[s];
        for (int64_t p = 0; p < to[side.is_input] - from[side.is_input]; ++p)
          for (int64_t byte = 0; byte < side.block * size; byte += kCacheLine)
            __builtin_prefetch(line_at(side, l, channel) + p * side.image.channels * size + byte);
      };
      const int output_side = transposed ? 1 : 0, input_side = transposed ? 0 : 1;

      for (int64_t line = begin_line; line < end_line; line += bunch) {
        const int64_t here = std::min(bunch, end_line - line);
        int64_t lowest = INT64_MAX, highest = -1;
        for (int64_t t1 = 0; t1 < axes[1].taps; ++t1)
          for (int64_t l = 0; l < here; ++l) {
            const int64_t input = input_lines[t1 * here + l] = input_line(line + l, t1);
            if (input >= 0) lowest = std::min(lowest, input), highest = std::max(highest, input);
          }
        if (highest < 0) continue;
        for (int64_t l = 0; l < here; ++l) pack(output_side, line + l, l);
        slots.assign(highest - lowest + 1, -1);
        int32_t used = 0;
        for (int64_t j = 0; j < here * axes[1].taps; ++j) {
          if (input_lines[j] < 0 || slots[input_lines[j] - lowest] >= 0) continue;
          pack(input_side, input_lines[j], used);
          slots[input_lines[j] - lowest] = used++;
        }
        // Prefetch one line of the next bunch per tap, since too many prefetches at once would wait for each other.
        const int64_t next_end = std::min(line + 2 * bunch, end_line);
        const int64_t at_once = ceil_div(bunch, axes[1].taps * across.taps);
        int64_t fetched[2] = {};  // blocks of channels
        for (int64_t k = 0; k < blocks; ++k) {
          const bool fetches[2] = {place[0][k] == fetched[0], place[1][k] == fetched[1]};
          for (int s : {0, 1}) fetched[s] += fetches[s];
          int64_t next = line + bunch;
          const auto fetch_some = [&] {
            for (int64_t l = 0; l < at_once && next < next_end; ++l, ++next) {
              if (fetches[output_side]) fetch_line(output_side, next, channels[output_side][place[output_side][k]]);
              const int64_t input = fetches[input_side] ? input_line(next, axes[1].taps - 1) : -1;
              if (input >= 0) fetch_line(input_side, input, channels[input_side][place[input_side][k]]);
            }
          };
          for (int64_t t1 = 0; t1 < axes[1].taps; ++t1)
            for (int64_t t2 = 0; t2 < across.taps; ++t2) {
              const auto [begin, end] = met(t2);
              fetch_some();
              if (begin >= end) continue;
              const auto lines_from = [&](int s, int64_t at) {
                return packed[s].data + place[s][k] * packed[s].block +
                       (at - from[sides[s].is_input]) * sides[s].padded * unit;
              };
              const char* const at[2] = {lines_from(output_side, begin), lines_from(input_side, input_at(t2, begin))};
              const void* rows[2][kSampledLines];
              int64_t count = 0;
              for (int64_t l = 0; l < here; ++l) {
                const int64_t input = input_lines[t1 * here + l];
                if (input < 0) continue;
                const char* line_at[2] = {at[0] + l * packed[output_side].line,
                                          at[1] + slots[input - lowest] * packed[input_side].line};
                rows[0][count] = line_at[left.is_input];
                rows[1][count++] = line_at[right.is_input];
              }
              if (count == 0) continue;
              const int64_t tap = (t0 * axes[1].taps + t1) * across.taps + t2;
              kernels.sample({count, end - begin, rows[0], rows[1], left.block, right.padded,
                              left.padded * (left.is_input ? across.stride : 1),
                              right.padded * (right.is_input ? across.stride : 1),
                              to_sums + (k * block_sums + tap * tap_sums) * sum});
            }
        }
      }
    }
  });

  parallel_tasks(nnz, [&](int64_t k) {
    kernels.unpack_block({advance(sums, k * block_sums * sum), slices, slice_sums, left.block, right.block,
                          right.padded, taps, swapped, advance(values, k * block_out * block_in * taps * size)});
  });
}

}  // namespace blocksparse
