#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "conv_planes/conv_planes.hpp"
#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

// Input, output, taps, first and step of the height and the width.
using Axes = std::array<std::array<int64_t, 5>, 2>;

std::array<PlaneAxis, 2> axes_of(const Axes& axes, int64_t images) {
  std::array<PlaneAxis, 2> result;
  for (int a = 0; a < 2; ++a) {
    require(axes[a][0] > 0 && axes[a][1] > 0 && axes[a][2] > 0 && images > 0, "images and kernels with positive sizes");
    result[a] = {axes[a][0], axes[a][1], axes[a][2], axes[a][3], axes[a][4]};
  }
  return result;
}

bool py_conv_planes(const std::string& isa, const std::string& dtype, const std::string& activation, bool transpose,
                    std::pair<int64_t, int64_t> block, int64_t images, const Axes& axes, uintptr_t x,
                    int64_t in_channels, uintptr_t values, uintptr_t bias, uintptr_t y, int64_t out_channels,
                    Index<int64_t> start, Index<int32_t> col, Index<int64_t> position) {
  const auto along = axes_of(axes, images);
  const int64_t block_in = block.second;
  if (transpose) std::swap(block.first, block.second);
  blocks_in(in_channels, block.second);
  const int64_t rows = blocks_in(out_channels, block.first);
  require(rows > 0, "outputs");
  require_starts(start, rows, col.size(), "start for each block row, up to all blocks");
  require(position.size() == col.size(), "a position for each block");
  nb::gil_scoped_release release;
  const PlaneBlocks blocks = {
      rows,         block.first, block.second,   transpose ? 1 : block_in, transpose ? block_in : 1,
      start.data(), col.data(),  position.data()};
  const bool done =
      conv_planes(isa_named(isa), dtype_named(dtype), activation_named(activation), {pointer(x), images, in_channels},
                  along.data(), blocks, pointer(values), pointer(bias), pointer(y));
  trim_scratch();
  return done;
}

void py_conv_planes_wgrad(const std::string& isa, const std::string& dtype, std::pair<int64_t, int64_t> block,
                          int64_t images, const Axes& axes, uintptr_t grad, int64_t out_channels, uintptr_t x,
                          int64_t in_channels, uintptr_t values, Index<int32_t> row, Index<int32_t> col) {
  const auto along = axes_of(axes, images);
  blocks_in(out_channels, block.first), blocks_in(in_channels, block.second);
  require(row.size() == col.size(), "row and col of one length");
  nb::gil_scoped_release release;
  conv_planes_wgrad(isa_named(isa), dtype_named(dtype), {pointer(grad), images, out_channels},
                    {pointer(x), images, in_channels}, along.data(), block.first, block.second, int64_t(row.size()),
                    row.data(), col.data(), pointer(values));
  trim_scratch();
}

const Binding binding([](nb::module_& m) {
  m.def("conv_planes", &py_conv_planes, nb::kw_only(), "isa"_a, "dtype"_a, "activation"_a, "transpose"_a, "block"_a,
        "images"_a, "axes"_a, "x"_a, "in_channels"_a, "values"_a, "bias"_a, "y"_a, "out_channels"_a,
        "start"_a.noconvert(), "col"_a.noconvert(), "position"_a.noconvert());
  m.def("conv_planes_wgrad", &py_conv_planes_wgrad, nb::kw_only(), "isa"_a, "dtype"_a, "block"_a, "images"_a, "axes"_a,
        "grad"_a, "out_channels"_a, "x"_a, "in_channels"_a, "values"_a, "row"_a.noconvert(), "col"_a.noconvert());
});

}  // namespace
}  // namespace blocksparse
