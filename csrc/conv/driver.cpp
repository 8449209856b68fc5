#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "conv/conv.hpp"
#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const ConvKernels& select_conv(DType dtype, int64_t block_sum))

namespace {

constexpr decltype(&portable::select_conv) kSelect[] = {BLOCKSPARSE_BY_SET(select_conv)};

// Bytes of converted images at a time (at least one image).
constexpr int64_t kImageBytes = 8 << 20;
// Most positions of a run and of a job: their sums stay in the L1 cache.
constexpr int64_t kRun = 64, kJob = 144;
// In shorter runs each sum waits for the one before, so that another axis is better.
constexpr int64_t kGoodRun = 6;
// Images with at least this many positions are not joined in one job.
constexpr int64_t kLargeImage = 384;
constexpr int64_t kTasksPerThread = 16;
// Larger outputs would leave the caches before they are read.
constexpr int64_t kStreamed = 8 << 20;
constexpr int64_t kConvertedNumbers = 1 << 14;

int64_t positions(const Image& image) { return image.size[0] * image.size[1] * image.size[2]; }

// Return whether no bfloat16 number is infinite or NaN.
bool is_finite(const uint16_t* numbers, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= (numbers[i] & 0x7f80) != 0x7f80;
  return finite;
}

// A box of outputs [n, depth, height, width], cut into runs along one axis. Along the other axes all of them meet the
// same taps; along the run axis each tap meets a range of positions.
struct Region {
  struct Tap {
    int64_t index, at, begin, end;
  };
  int64_t count[4] = {}, input[4], output[4];  // per axis: positions, and the distance of two of them
  int64_t first_output = 0;
  std::vector<Tap> taps;

  // Return where line number `line` across `axis` begins.
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

// A piece of the run axis, with its taps grouped into classes, those that meet most positions first.
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

// Choose the run axis: the last one if its runs are long enough, else the one with the longest runs, which may be that
// of the images.
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

// Jobs follow the order of the outputs, so that neighbouring jobs share inputs.
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

// A job's addresses in both images, and the cache lines that it reads of a block of inputs: all taps of its first run,
// and of the other runs the tap that reaches farthest. Hardware does not prefetch these, since the positions lie far
// apart.
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
          for (int64_t byte = 0; byte < steps * unit; byte += kCacheLine)
            lines.push_back((input[r] + piece.at[t] + p * region.input[axis]) * unit + byte);
  }
};

}  // namespace

bool bypasses_caches(const Image& y, int64_t n, int64_t block_out, int64_t size) {
  return n * positions(y) * y.channels * size > kStreamed && block_out * size % kCacheLine == 0 &&
         reinterpret_cast<uintptr_t>(y.data) % kCacheLine == 0;
}

const ConvKernels& conv_kernels(const InstructionSet& isa, DType dtype, int64_t block_sum) {
  return kSelect[isa.index](dtype, block_sum);
}

void conv(const InstructionSet& isa, DType dtype, Activation activation, bool transposed, int64_t block_out,
          int64_t block_sum, const int64_t* kernel, int64_t n, const Image& x, const void* values, const void* bias,
          const Image& y, const AxisRuns* cut_axes, const AxisRuns* whole, const ChannelRows& rows) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const ConvKernels& kernels = conv_kernels(isa, dtype, block_sum);
  const int64_t size = size_of(dtype), unit = kernels.unit_size, nnz = rows.start[rows.rows];
  const int64_t taps = kernel[0] * kernel[1] * kernel[2], steps = block_sum / kernels.k_pack;
  const int64_t padded = ceil_div(block_out, kernels.lanes) * kernels.lanes, block_units = taps * steps * padded;

  void* weights = scratch(Scratch::kWeights, nnz * block_units * unit);
  std::atomic<bool> finite{true};
  parallel_tasks(nnz, [&](int64_t i) {
    const void* block = advance(values, rows.position[i] * block_out * block_sum * taps * size);
    kernels.pack_block(
        {block, block_out, block_sum, taps, padded, transposed, advance(weights, i * block_units * unit)});
    if (kernels.bordered_piece && !is_finite(static_cast<const uint16_t*>(block), block_out * block_sum * taps))
      finite = false;
  });

  if (conv_on_tiles(kernels, dtype, activation, block_out, block_sum, kernel, n, x, weights, bias, y, whole, rows,
                    finite))
    return;
  const int64_t image = positions(x) * x.channels, image_out = positions(y) * y.channels;
  const bool streams = bypasses_caches(y, n, block_out, size);
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
    // A thread computes all rows of some jobs, whose inputs stay in its L2 cache, or if jobs are few, one row of one
    // job.
    const int64_t count = int64_t(jobs.size()), wanted = kTasksPerThread * thread_count();
    const int64_t shares = count < wanted ? rows.rows : 1, bunch = std::max<int64_t>(count / wanted, 1);
    const auto place_of = [&](const Job& job, bool with_lines) {
      const Piece& piece = pieces[job.piece];
      Place place(job, piece, regions[piece.region], axis);
      if (with_lines) place.find_lines(job, piece, regions[piece.region], axis, steps, unit);
      return place;
    };
    // Rows without blocks come last, so that the last row with blocks prefetches the next place.
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
      // Streamed stores are not ordered by the end of a parallel loop.
      if (streams) std::atomic_thread_fence(std::memory_order_seq_cst);
    });
  }
}

}  // namespace blocksparse
