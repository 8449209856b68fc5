#include "conv.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "parallel.hpp"

namespace blocksparse {
namespace {

// Bytes of working copies of images at a time, but at least one image.
constexpr int64_t kImageBytes = 8 << 20;
// Positions that a run and a job have at most: their sums stay in the L1 cache.
constexpr int64_t kRun = 64, kJob = 144;
// In a run shorter than this sums wait for each other: another axis is better.
constexpr int64_t kGoodRun = 6;
// Positions of the sampled product taken together, and the most lines of them.
constexpr int64_t kSampled = 128, kSampledLines = 64;
// From this many positions on, a job stays within one image.
constexpr int64_t kLargeImage = 384;
constexpr int64_t kTasksPerThread = 16, kManyTasks = 16, kLine = 64;
// Outputs larger than this would not stay in the caches until they are read.
constexpr int64_t kStreamed = 8 << 20;
constexpr int64_t kConvertedNumbers = 1 << 14;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
char* advance(void* p, int64_t bytes) { return static_cast<char*>(p) + bytes; }
const char* advance(const void* p, int64_t bytes) { return static_cast<const char*>(p) + bytes; }
int64_t positions(const Image& image) { return image.size[0] * image.size[1] * image.size[2]; }

// Outputs in a box of [n, depth, height, width], cut into runs along one of these axes. Along the others all of them
// meet the same taps, along this one each tap meets some positions.
struct Region {
  struct Tap {
    int64_t index, at, begin, end;
  };
  int64_t count[4] = {}, input[4], output[4];  // per axis: positions, and the distance of two of them
  int64_t first_output = 0;
  std::vector<Tap> taps;

  // Where the line begins that is the `line`-th across the axis.
  int64_t at(int64_t line, int axis, const int64_t* distance) const {
    int64_t offset = 0;
    for (int a = 3; a >= 0; --a) {
      if (a == axis) continue;
      offset += line % count[a] * distance[a];
      line /= count[a];
    }
    return offset;
  }
};

// A piece of the run axis: its taps by class, those that meet the most positions first.
struct Piece {
  int region;
  int64_t begin, length;
  std::vector<int64_t> class_start, class_begin, class_end, tap, at;

  Piece(int region, int64_t begin, int64_t length, std::vector<Region::Tap> taps)
      : region(region), begin(begin), length(length) {
    for (Region::Tap& t : taps)
      t.begin = std::max<int64_t>(t.begin - begin, 0), t.end = std::min(t.end - begin, length);
    std::stable_sort(taps.begin(), taps.end(), [](const Region::Tap& a, const Region::Tap& b) {
      return std::make_pair(b.end - b.begin, a.begin) < std::make_pair(a.end - a.begin, b.begin);
    });
    for (const Region::Tap& t : taps) {
      if (t.begin >= t.end) break;
      if (class_begin.empty() || class_begin.back() != t.begin || class_end.back() != t.end) {
        class_start.push_back(int64_t(tap.size()));
        class_begin.push_back(t.begin);
        class_end.push_back(t.end);
      }
      tap.push_back(t.index);
      at.push_back(t.at);
    }
    class_start.push_back(int64_t(tap.size()));
  }
  bool covered() const { return !class_begin.empty() && class_end[0] - class_begin[0] == length; }
};

struct Job {
  int piece;
  int64_t first, lines;  // lines side by side
  int64_t output;        // of the first one
};

// The axis along which runs are longest: the last one if they are long enough there, else maybe that of the images.
int run_axis(const AxisRuns* whole, int64_t images) {
  int best = 3;
  int64_t longest = 0;
  for (int a = 3; a >= 0; --a) {
    const int64_t length = a == 0 ? images : whole[a - 1].count ? whole[a - 1].length[0] : 0;
    if (length > longest) best = a, longest = length;
    if (longest >= kGoodRun) break;
  }
  return best;
}

std::vector<Region> regions_of(const AxisRuns* const* axes, int axis, const int64_t* kernel, int k_pack, const Image& x,
                               const Image& y) {
  std::vector<Region> regions;
  const auto distances = [](const Image& image, int64_t k_pack, int64_t* to) {
    to[3] = image.channels / k_pack;
    for (int a = 3; a > 0; --a) to[a - 1] = to[a] * image.size[a - 1];
  };
  int64_t in[4], out[4], s[3];
  distances(x, k_pack, in);
  distances(y, 1, out);
  for (s[0] = 0; s[0] < axes[0]->count; ++s[0])
    for (s[1] = 0; s[1] < axes[1]->count; ++s[1])
      for (s[2] = 0; s[2] < axes[2]->count; ++s[2]) {
        Region region;
        region.input[0] = in[0], region.output[0] = out[0];
        for (int a = 0; a < 3; ++a) {
          region.count[a + 1] = axes[a]->length[s[a]];
          region.input[a + 1] = axes[a]->in_step * in[a + 1];
          region.output[a + 1] = axes[a]->out_step * out[a + 1];
          region.first_output += axes[a]->first[s[a]] * out[a + 1];
        }
        std::vector<Region::Tap> taps = {{0, 0, 0, INT64_MAX}};
        for (int a = 0; a < 3; ++a) {
          std::vector<Region::Tap> more;
          for (const Region::Tap& t : taps)
            for (int64_t i = axes[a]->tap_start[s[a]]; i < axes[a]->tap_start[s[a] + 1]; ++i) {
              Region::Tap next = {t.index * kernel[a] + axes[a]->tap[i], t.at + axes[a]->at[i] * in[a + 1], t.begin,
                                  t.end};
              if (a + 1 == axis) next.begin = axes[a]->begin[i], next.end = axes[a]->end[i];
              more.push_back(next);
            }
          taps = std::move(more);
        }
        region.taps = std::move(taps);
        regions.push_back(std::move(region));
      }
  return regions;
}

// In the order of the outputs, so that jobs after each other share their inputs.
void cut(std::vector<Region>& regions, int axis, int64_t images, std::vector<Piece>& pieces, std::vector<Job>& jobs) {
  pieces.clear(), jobs.clear();
  for (size_t i = 0; i < regions.size(); ++i) {
    Region& region = regions[i];
    region.count[0] = images;
    const int64_t length = region.count[axis], count = ceil_div(length, kRun), first = int64_t(pieces.size());
    for (int64_t p = 0; p < count; ++p) {
      const int64_t begin = length * p / count;
      pieces.emplace_back(int(i), begin, length * (p + 1) / count - begin, region.taps);
    }
    int64_t lines = 1, near = 1;  // near: in one image, if it is large
    for (int a = 0; a < 4; ++a) {
      if (a == axis) continue;
      lines *= region.count[a];
      if (a > 0 || axis == 0 || region.output[0] / region.output[3] < kLargeImage) near *= region.count[a];
    }
    if (lines == 0) continue;
    const int64_t at_once =
        std::clamp<int64_t>(kJob / std::max<int64_t>(ceil_div(length, std::max<int64_t>(count, 1)), 1), 1, near);
    const int64_t parts = ceil_div(near, at_once);
    for (int64_t part = 0; part < lines / near * parts; ++part) {
      const int64_t start = part / parts * near, line = start + part % parts * near / parts;
      const int64_t end = start + (part % parts + 1) * near / parts;
      for (int64_t p = first; p < first + count; ++p)
        jobs.push_back(
            {int(p), line, end - line,
             region.first_output + region.at(line, axis, region.output) + pieces[p].begin * region.output[axis]});
    }
  }
  std::stable_sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.output < b.output; });
}

// A job in both images, and the cache lines it reads of a block of inputs: those of all taps at its first run, and at
// the others of the tap that goes farthest. Channels of a position lie side by side, positions far apart, which
// hardware does not prefetch.
struct Place {
  int64_t input[kJob], output[kJob];  // [lines]
  std::vector<int64_t> lines;         // in bytes, of the first block of inputs

  Place(const Job& job, const Piece& piece, const Region& region, int axis) {
    for (int64_t r = 0; r < job.lines; ++r) {
      input[r] = piece.begin * region.input[axis] + region.at(job.first + r, axis, region.input);
      output[r] =
          piece.begin * region.output[axis] + region.first_output + region.at(job.first + r, axis, region.output);
    }
  }

  void find_lines(const Job& job, const Piece& piece, const Region& region, int axis, int64_t steps, int64_t unit) {
    if (piece.class_begin.empty()) return;
    const int64_t taps = piece.class_start[1];
    const int64_t last = std::max_element(piece.at.begin(), piece.at.begin() + taps) - piece.at.begin();
    for (int64_t r = 0; r < job.lines; ++r)
      for (int64_t t = r == 0 ? 0 : last; t < (r == 0 ? taps : last + 1); ++t)
        for (int64_t p = piece.class_begin[0]; p < piece.class_end[0]; ++p)
          for (int64_t byte = 0; byte < steps * unit; byte += kLine)
            lines.push_back((input[r] + piece.at[t] + p * region.input[axis]) * unit + byte);
  }
};

}  // namespace

void conv(const InstructionSet& isa, DType dtype, Activation activation, bool transposed, int64_t block_out,
          int64_t block_sum, const int64_t* kernel, int64_t n, const Image& x, const void* values, const void* bias,
          const Image& y, const AxisRuns* cut_axes, const AxisRuns* whole, const ChannelRows& rows) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const ConvKernels& kernels = isa.conv(dtype, block_sum);
  const int64_t size = size_of(dtype), unit = kernels.unit_size, nnz = rows.start[rows.rows];
  const int64_t taps = kernel[0] * kernel[1] * kernel[2], steps = block_sum / kernels.k_pack;
  const int64_t padded = ceil_div(block_out, kernels.lanes) * kernels.lanes, block_units = taps * steps * padded;

  void* weights = scratch(Scratch::kWeights, nnz * block_units * unit);
  parallel_tasks(nnz, [&](int64_t i) {
    kernels.pack_block({advance(values, rows.position[i] * block_out * block_sum * taps * size), block_out, block_sum,
                        taps, padded, transposed, advance(weights, i * block_units * unit)});
  });

  const int64_t image = positions(x) * x.channels, image_out = positions(y) * y.channels;
  // Outputs larger than the caches bypass them: each line is written whole, so none has to be read first.
  const bool streams = n * image_out * size > kStreamed && block_out * size % kLine == 0 &&
                       reinterpret_cast<uintptr_t>(y.data) % kLine == 0;
  const int axis = run_axis(whole, n);
  const AxisRuns* axes[3];
  for (int a = 0; a < 3; ++a) axes[a] = a + 1 == axis ? &whole[a] : &cut_axes[a];
  std::vector<Region> regions = regions_of(axes, axis, kernel, kernels.k_pack, x, y);
  std::vector<Piece> pieces;
  std::vector<Job> jobs;
  const int64_t at_once = kernels.converts ? std::max<int64_t>(kImageBytes / std::max<int64_t>(image * unit, 1), 1) : n;
  for (int64_t first = 0; first < n; first += at_once) {
    const int64_t images = std::min(at_once, n - first);
    const void* input = advance(x.data, first * image * size);
    if (kernels.converts) {
      void* converted = scratch(Scratch::kPanels, images * image * unit);
      parallel_tasks(ceil_div(images * image, kConvertedNumbers), [&](int64_t i) {
        const int64_t begin = i * kConvertedNumbers;
        kernels.convert(advance(input, begin * size), std::min(kConvertedNumbers, images * image - begin),
                        advance(converted, begin * unit));
      });
      input = converted;
    }
    cut(regions, axis, images, pieces, jobs);
    // A thread takes all rows of some jobs, whose inputs stay in its L2 cache; or one row of one, where jobs are few.
    const int64_t count = int64_t(jobs.size()), wanted = kTasksPerThread * thread_count();
    const int64_t shares = count < wanted ? rows.rows : 1, bunch = std::max<int64_t>(count / wanted, 1);
    const auto place_of = [&](const Job& job, bool with_lines) {
      const Piece& piece = pieces[job.piece];
      Place place(job, piece, regions[piece.region], axis);
      if (with_lines) place.find_lines(job, piece, regions[piece.region], axis, steps, unit);
      return place;
    };
    // Rows without blocks come last: the last one with blocks prefetches the next place.
    const auto run = [&](const Job& job, const Place& here, const Place* next, int64_t first_row, int64_t last_row) {
      const Piece& piece = pieces[job.piece];
      const Region& region = regions[piece.region];
      const auto blocks = [&](int64_t r) { return rows.start[rows.order[r] + 1] - rows.start[rows.order[r]]; };
      for (int64_t r = first_row; r < last_row; ++r) {
        const int64_t row = rows.order[r], output = row * block_out, start = rows.start[row];
        const bool stays = r + 1 < last_row && blocks(r + 1) > 0;
        const Place* then = blocks(r) == 0 ? nullptr : stays ? &here : next;
        const int64_t next_row = rows.order[stays ? r + 1 : first_row];
        kernels.piece({blocks(r),
                       rows.col + start,
                       advance(weights, start * block_units * unit),
                       taps,
                       steps,
                       padded,
                       block_out,
                       int64_t(piece.class_begin.size()),
                       piece.class_start.data(),
                       piece.class_begin.data(),
                       piece.class_end.data(),
                       piece.covered(),
                       piece.tap.data(),
                       piece.at.data(),
                       input,
                       job.lines,
                       piece.length,
                       here.input,
                       region.input[axis],
                       bias ? advance(bias, output * size) : nullptr,
                       activation,
                       const_cast<char*>(advance(y.data, (first * image_out + output) * size)),
                       here.output,
                       region.output[axis],
                       streams,
                       then ? rows.start[next_row + 1] - rows.start[next_row] : 0,
                       rows.col + rows.start[next_row],
                       then ? int64_t(then->lines.size()) : 0,
                       then ? then->lines.data() : nullptr});
      }
    };
    parallel_tasks(ceil_div(count, bunch) * shares, [&](int64_t i) {
      if (shares > 1) {
        run(jobs[i / shares], place_of(jobs[i / shares], false), nullptr, i % shares, i % shares + 1);
      } else {
        const int64_t end = std::min((i + 1) * bunch, count);
        Place here = place_of(jobs[i * bunch], true);
        for (int64_t j = i * bunch; j + 1 < end; ++j) {
          Place next = place_of(jobs[j + 1], true);
          run(jobs[j], here, &next, 0, rows.rows);
          here = std::move(next);
        }
        run(jobs[end - 1], here, nullptr, 0, rows.rows);
      }
      // The signal that a loop has ended does not order streamed stores.
      if (streams) std::atomic_thread_fence(std::memory_order_seq_cst);
    });
  }
}

void conv_wgrad(const InstructionSet& isa, DType dtype, int64_t block_out, int64_t block_in, int64_t n,
                const Image& grad, const Image& x, bool transposed, void* values, const AxisTaps* axes,
                const int32_t* row, const int32_t* col, int64_t nnz) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const LinearKernels& packing = isa.linear(dtype, 1);  // the sum is over positions, which taps shift one by one
  const ConvKernels& kernels = isa.conv(dtype, 1);
  const int64_t size = size_of(dtype), unit = kernels.unit_size, sum = kernels.sum_size;
  const int64_t taps = axes[0].taps * axes[1].taps * axes[2].taps;

  // The lanes are the inputs of a block, or the outputs where there are more of these and inputs do not fill a vector.
  const bool swapped = block_in < kernels.lanes && block_out > block_in;
  struct Side {
    const Image& image;
    int64_t block, padded;
    bool is_input;
    const int32_t* index;
    Scratch slot;
  } sides[2] = {{grad, block_out, 0, transposed, row, Scratch::kGradients},
                {x, block_in, 0, !transposed, col, Scratch::kPanels}};
  Side &left = sides[swapped ? 1 : 0], &right = sides[swapped ? 0 : 1];
  left.padded = left.block;
  right.padded = ceil_div(right.block, kernels.lanes) * kernels.lanes;
  const Image& output = transposed ? x : grad;

  // Lines of the output, [n, depth, height] of them, in pieces; a bunch at a time for all taps of a block. Few
  // blocks are cut into slices of lines with sums of their own, as many for any number of threads.
  const AxisTaps& across = axes[2];
  const int64_t lines = n * output.size[0] * output.size[1], width = output.size[2], pieces = ceil_div(width, kSampled);
  const int64_t bunch = std::clamp<int64_t>(kSampled / std::max<int64_t>(ceil_div(width, pieces), 1), 1, kSampledLines);
  const int64_t tasks = nnz * axes[0].taps, bunches = ceil_div(lines, bunch);
  const int64_t slices =
      std::clamp<int64_t>(ceil_div(kManyTasks, std::max<int64_t>(tasks, 1)), 1, std::max<int64_t>(bunches, 1));
  const int64_t tap_sums = left.block * right.padded, block_sums = taps * tap_sums, slice_sums = nnz * block_sums;
  void* sums = scratch(Scratch::kTurned, slices * slice_sums * sum);
  parallel_tasks(nnz * slices, [&](int64_t k) { memset(advance(sums, k * block_sums * sum), 0, block_sums * sum); });

  parallel_tasks(tasks * slices, [&](int64_t i) {
    const int64_t slice = i / tasks, k = i % tasks / axes[0].taps, t0 = i % axes[0].taps;
    char* const to_sums = advance(sums, (slice * slice_sums + k * block_sums) * sum);
    const int64_t* const input_size = (transposed ? grad : x).size;
    // The line of the input that the line of the output l meets with tap t1, or -1.
    const auto input_line = [&](int64_t l, int64_t t1) -> int64_t {
      const int64_t y = l % output.size[1], z = l / output.size[1] % output.size[0];
      const int64_t past1 = y - axes[1].first_output[t1], past0 = z - axes[0].first_output[t0];
      if (past1 < 0 || past1 >= axes[1].count[t1] || past0 < 0 || past0 >= axes[0].count[t0]) return -1;
      const int64_t input_z = axes[0].first_input[t0] + past0 * axes[0].stride;
      return (l / output.size[1] / output.size[0] * input_size[0] + input_z) * input_size[1] + axes[1].first_input[t1] +
             past1 * axes[1].stride;
    };
    std::vector<int64_t> input_lines(kSampledLines * axes[1].taps);
    std::vector<int32_t> slots;
    const int64_t begin_line = bunches * slice / slices * bunch;
    const int64_t end_line = std::min(bunches * (slice + 1) / slices * bunch, lines);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t first = width * piece / pieces, last = width * (piece + 1) / pieces;
      // The parts of the lines that the taps meet, in both images.
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

      // Lines side by side in the L1 cache, in the type that is multiplied.
      char* packed[2];
      int64_t line_bytes[2];
      for (const Side& side : sides) {
        line_bytes[side.is_input] = (to[side.is_input] - from[side.is_input]) * side.padded * unit;
        packed[side.is_input] = static_cast<char*>(
            scratch(side.slot, kSampledLines * (side.is_input ? axes[1].taps : 1) * line_bytes[side.is_input]));
      }
      const auto line_at = [&](const Side& side, int64_t l) {
        const int64_t position = l * side.image.size[2] + from[side.is_input];
        return advance(side.image.data, (position * side.image.channels + side.index[k] * side.block) * size);
      };
      const auto pack = [&](const Side& side, int64_t l, int64_t slot) {
        const int64_t length = to[side.is_input] - from[side.is_input];
        packing.pack_block_columns({line_at(side, l), side.image.channels, length, side.block, side.padded,
                                    packed[side.is_input] + slot * line_bytes[side.is_input], 0},
                                   0, length, 0, 1);
      };
      const auto fetch_line = [&](const Side& side, int64_t l) {
        for (int64_t p = 0; p < to[side.is_input] - from[side.is_input]; ++p)
          for (int64_t byte = 0; byte < side.block * size; byte += kLine)
            __builtin_prefetch(line_at(side, l) + p * side.image.channels * size + byte);
      };
      const Side &output_side = sides[transposed ? 1 : 0], &input_side = sides[transposed ? 0 : 1];

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
        // One line of the next bunch is prefetched per tap: too many at once would wait for each other.
        int64_t next = line + bunch;
        const int64_t next_end = std::min(line + 2 * bunch, end_line);
        const int64_t at_once = ceil_div(bunch, axes[1].taps * across.taps);
        const auto fetch_some = [&] {
          for (int64_t l = 0; l < at_once && next < next_end; ++l, ++next) {
            fetch_line(output_side, next);
            const int64_t input = input_line(next, axes[1].taps - 1);
            if (input >= 0) fetch_line(input_side, input);
          }
        };
        for (int64_t t1 = 0; t1 < axes[1].taps; ++t1)
          for (int64_t t2 = 0; t2 < across.taps; ++t2) {
            const auto [begin, end] = met(t2);
            fetch_some();
            if (begin >= end) continue;
            const void* rows[2][kSampledLines];
            int64_t count = 0;
            for (int64_t l = 0; l < here; ++l) {
              const int64_t input = input_lines[t1 * here + l];
              if (input < 0) continue;
              const char* at[2] = {packed[0] + l * line_bytes[0] + (begin - from[0]) * output_side.padded * unit,
                                   packed[1] + slots[input - lowest] * line_bytes[1] +
                                       (input_at(t2, begin) - from[1]) * input_side.padded * unit};
              rows[0][count] = at[left.is_input];
              rows[1][count++] = at[right.is_input];
            }
            if (count == 0) continue;
            const int64_t tap = (t0 * axes[1].taps + t1) * across.taps + t2;
            kernels.sample({count, end - begin, rows[0], rows[1], left.block, right.padded,
                            left.padded * (left.is_input ? across.stride : 1),
                            right.padded * (right.is_input ? across.stride : 1), to_sums + tap * tap_sums * sum});
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
