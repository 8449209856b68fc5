#include <algorithm>
#include <vector>

#include "conv_planes/conv_planes.hpp"
#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const ConvPlanesKernels& select_conv_planes(DType dtype))

namespace {

constexpr decltype(&portable::select_conv_planes) kSelect[] = {BLOCKSPARSE_BY_VECTORS(select_conv_planes)};

// Positions of a strip, whose planes and sums stay in the caches.
constexpr int64_t kStrip = 1536;
// Sums of the weight gradient over different images that are added in the end. It does not depend on the number of
// threads, since results must not.
constexpr int64_t kSlices = 8, kSumsBytes = 16 << 20, kTasksPerThread = 4;

// How an image is cut into strips of output rows, and a strip copied with zeros around it.
struct Geometry {
  int64_t lowest[2], reach[2];  // of the offsets of taps: the lowest, and the distance to the highest
  int64_t height, strips;       // output rows of a strip
  int64_t rows, pitch, plane;   // of the copy
  int64_t vectors;              // of the outputs of a strip, in the copy's pitch
  bool in_place;                // no copy is needed

  Geometry(const PlaneAxis* axes, int lanes) {
    for (int a = 0; a < 2; ++a) {
      const int64_t last = axes[a].first + (axes[a].taps - 1) * axes[a].step;
      lowest[a] = std::min(axes[a].first, last);
      reach[a] = std::max(axes[a].first, last) - lowest[a];
    }
    pitch = axes[1].output + reach[1];
    strips = ceil_div(axes[0].output, std::max<int64_t>(kStrip / pitch, 1));
    height = ceil_div(axes[0].output, strips);
    rows = height + reach[0];
    const int64_t positions = (height - 1) * pitch + axes[1].output;
    vectors = ceil_div(positions, int64_t(lanes));
    // Reads of the last vector, and of the last line's vectors, end within the plane.
    plane = reach[0] * pitch + reach[1] +
            std::max(vectors * lanes, (height - 1) * pitch + ceil_div(axes[1].output, int64_t(lanes)) * lanes);
    plane = std::max(plane, rows * pitch);
    in_place = !pads(axes) && reach[0] == 0 && reach[1] == 0 && strips == 1 && axes[1].output % lanes == 0 &&
               axes[0].input == axes[0].output && axes[1].input == axes[1].output;
    if (in_place) plane = axes[0].input * axes[1].input;
  }
  bool pads(const PlaneAxis* axes) const {
    for (int a = 0; a < 2; ++a)
      if (lowest[a] < 0 || lowest[a] + reach[a] + axes[a].output > axes[a].input) return true;
    return false;
  }
  int64_t tap_offset(const PlaneAxis* axes, int64_t tap) const {
    const int64_t y = axes[0].first + tap / axes[1].taps * axes[0].step,
                  x = axes[1].first + tap % axes[1].taps * axes[1].step;
    return (y - lowest[0]) * pitch + x - lowest[1];
  }
  int64_t rows_of(int64_t strip, const PlaneAxis* axes) const {
    return std::min(height, axes[0].output - strip * height);
  }
};

// The copies of the blocks of channels of one strip of an image, made on first use.
class Copies {
 public:
  Copies(const ConvPlanesKernels& kernels, int64_t size, const Geometry& geometry, const PlaneAxis* axes,
         int64_t channels, int64_t block)
      : kernels_(kernels), size_(size), geometry_(geometry), axes_(axes), block_(block), made_(channels / block) {
    if (!geometry.in_place) to_ = static_cast<char*>(scratch(Scratch::kPanels, channels * geometry.plane * size));
  }
  // Go to a strip of another image.
  void reset(const void* image, int64_t strip) {
    image_ = image, strip_ = strip;
    std::fill(made_.begin(), made_.end(), false);
  }
  const char* block(int64_t col) {
    const int64_t area = axes_[0].input * axes_[1].input, bytes = block_ * geometry_.plane * size_;
    const char* from = static_cast<const char*>(advance(image_, col * block_ * area * size_));
    if (geometry_.in_place) return from;
    if (!made_[col]) {
      kernels_.pack({from, block_, area, axes_[0].input, axes_[1].input,
                     strip_ * geometry_.height + geometry_.lowest[0], -geometry_.lowest[1], to_ + col * bytes,
                     geometry_.plane, geometry_.rows, geometry_.pitch});
      made_[col] = true;
    }
    return to_ + col * bytes;
  }

 private:
  const ConvPlanesKernels& kernels_;
  const int64_t size_;
  const Geometry& geometry_;
  const PlaneAxis* axes_;
  const int64_t block_;
  std::vector<char> made_;
  char* to_ = nullptr;
  const void* image_ = nullptr;
  int64_t strip_ = 0;
};

}  // namespace

bool conv_planes(const InstructionSet& isa, DType dtype, Activation activation, const PlaneImages& x,
                 const PlaneAxis* axes, const PlaneBlocks& blocks, const void* values, const void* bias, void* y) {
  const ConvPlanesKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype), taps = axes[0].taps * axes[1].taps, nnz = blocks.start[blocks.rows];
  const int64_t block_values = blocks.block_out * blocks.block_sum * taps;
  const Geometry geometry(axes, kernels.lanes);
  if (geometry.pads(axes) && !kernels.all_finite(values, nnz * block_values)) return false;
  const int64_t area_in = axes[0].input * axes[1].input, area_out = axes[0].output * axes[1].output;
  const int64_t strips = x.n * geometry.strips;
  const int64_t shares = std::clamp<int64_t>(ceil_div(kTasksPerThread * thread_count(), strips), 1, blocks.rows);
  parallel_tasks(strips * shares, [&](int64_t i) {
    const int64_t image = i / shares / geometry.strips, strip = i / shares % geometry.strips, share = i % shares;
    Copies copies(kernels, size, geometry, axes, x.channels, blocks.block_sum);
    copies.reset(advance(x.data, image * x.channels * area_in * size), strip);
    std::vector<const void*> w, from;
    for (int64_t r = blocks.rows * share / shares; r < blocks.rows * (share + 1) / shares; ++r) {
      w.clear(), from.clear();
      for (int64_t b = blocks.start[r]; b < blocks.start[r + 1]; ++b) {
        const char* const block = copies.block(blocks.col[b]);
        for (int64_t t = 0; t < taps; ++t) {
          w.push_back(advance(values, (blocks.position[b] * block_values + t) * size));
          from.push_back(block + geometry.tap_offset(axes, t) * size);
        }
      }
      const int64_t channel = (image * blocks.rows + r) * blocks.block_out, line = strip * geometry.height;
      kernels.row({w.data(), from.data(), int64_t(w.size()), blocks.out_step * taps, blocks.sum_step * taps,
                   geometry.plane, blocks.block_sum, blocks.block_out, geometry.vectors, geometry.rows_of(strip, axes),
                   geometry.pitch, axes[1].output, bias ? advance(bias, r * blocks.block_out * size) : nullptr,
                   activation, advance(y, (channel * area_out + line * axes[1].output) * size), area_out});
    }
  });
  return true;
}

void conv_planes_wgrad(const InstructionSet& isa, DType dtype, const PlaneImages& grad, const PlaneImages& x,
                       const PlaneAxis* axes, int64_t block_out, int64_t block_in, int64_t nnz, const int32_t* row,
                       const int32_t* col, void* values) {
  const ConvPlanesKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype), taps = axes[0].taps * axes[1].taps, lanes = kernels.lanes;
  const Geometry geometry(axes, kernels.lanes);
  const int64_t block_values = block_out * block_in * taps, slice = nnz * block_values * lanes;
  const int64_t area_in = axes[0].input * axes[1].input, width = axes[1].output, area_out = axes[0].output * width;
  const int64_t slices =
      std::clamp<int64_t>(std::min(x.n, kSumsBytes / std::max<int64_t>(slice * size, 1)), 1, kSlices);
  char* const sums = static_cast<char*>(scratch(Scratch::kGradients, slices * slice * size));
  const int64_t shares =
      std::clamp<int64_t>(ceil_div(kTasksPerThread * thread_count(), slices), 1, std::max<int64_t>(nnz, 1));
  // Lines of the gradient that do not fill vectors are copied with zeros at their ends.
  const bool copies_grad = width % lanes != 0;
  const int64_t grad_pitch = copies_grad ? ceil_div(width, lanes) * lanes : width;
  const int64_t grad_plane = copies_grad ? geometry.height * grad_pitch : area_out;
  parallel_tasks(slices * shares, [&](int64_t i) {
    const int64_t s = i / shares, share = i % shares;
    const int64_t first = nnz * share / shares, last = nnz * (share + 1) / shares;
    char* const to = sums + s * slice * size;
    std::fill(to + first * block_values * lanes * size, to + last * block_values * lanes * size, 0);
    Copies copies(kernels, size, geometry, axes, x.channels, block_in);
    char* const copy =
        copies_grad ? static_cast<char*>(scratch(Scratch::kTurned, block_out * grad_plane * size)) : nullptr;
    std::vector<const void*> from(block_in * taps);
    for (int64_t image = x.n * s / slices; image < x.n * (s + 1) / slices; ++image)
      for (int64_t strip = 0; strip < geometry.strips; ++strip) {
        copies.reset(advance(x.data, image * x.channels * area_in * size), strip);
        const int64_t rows = geometry.rows_of(strip, axes), line = strip * geometry.height;
        for (int64_t b = first; b < last; ++b) {
          const char* const block = copies.block(col[b]);
          for (int64_t k = 0; k < block_in; ++k)
            for (int64_t t = 0; t < taps; ++t)
              from[k * taps + t] = block + (k * geometry.plane + geometry.tap_offset(axes, t)) * size;
          const void* g =
              advance(grad.data, ((image * grad.channels + row[b] * block_out) * area_out + line * width) * size);
          if (copies_grad && (b == first || row[b] != row[b - 1]))
            kernels.pack({g, block_out, area_out, rows, width, 0, 0, copy, grad_plane, rows, grad_pitch});
          kernels.sample({copies_grad ? copy : g, block_out, grad_plane, grad_pitch, from.data(), block_in * taps,
                          geometry.pitch, rows, width, to + b * block_values * lanes * size});
        }
      }
  });
  parallel_tasks(nnz, [&](int64_t b) {
    kernels.add_up(sums + b * block_values * lanes * size, slices, slice, block_values,
                   advance(values, b * block_values * size));
  });
}

}  // namespace blocksparse
