#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "conv/conv.hpp"
#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

// Unpack the axes of a convolution, each packed into one array by ops/conv/plan.py.
template <class Axis>
std::vector<Axis> axes_of(const std::vector<Index<int64_t>>& packed, size_t count,
                          Axis (*unpack)(const int64_t*, int64_t)) {
  require(packed.size() == count, "three axes of a convolution");
  std::vector<Axis> axes;
  for (const auto& axis : packed) axes.push_back(unpack(axis.data(), int64_t(axis.size())));
  return axes;
}

constexpr const char* kAxis = "all numbers of an axis";

AxisRuns runs(const int64_t* at, int64_t size) {
  require(size >= 4 && at[0] >= 0 && at[0] <= (size - 4) / 3, kAxis);
  AxisRuns axis = {at[0], at[1], at[2]};
  const int64_t count = axis.count, taps = at[3 + 3 * count];
  require(taps >= 0 && (size - 4 - 3 * count) % 4 == 0 && taps == (size - 4 - 3 * count) / 4, kAxis);
  axis.first = at + 3, axis.length = axis.first + count, axis.tap_start = axis.length + count;
  axis.tap = axis.tap_start + count + 1, axis.at = axis.tap + taps;
  axis.begin = axis.at + taps, axis.end = axis.begin + taps;
  return axis;
}

AxisTaps taps(const int64_t* at, int64_t size) {
  require(size >= 2 && (size - 2) % 3 == 0 && at[0] == (size - 2) / 3, kAxis);
  return {at[0], at[1], at + 2, at + 2 + at[0], at + 2 + 2 * at[0]};
}

using Size = std::array<int64_t, 3>;
Image image(uintptr_t data, const Size& size, int64_t channels) {
  return {pointer(data), {size[0], size[1], size[2]}, channels};
}

void py_conv(const std::string& isa, const std::string& dtype, const std::string& activation, bool transpose,
             std::pair<int64_t, int64_t> block, const Size& kernel, int64_t images, uintptr_t x, const Size& x_size,
             int64_t in_channels, uintptr_t values, uintptr_t bias, uintptr_t y, const Size& y_size,
             int64_t out_channels, const std::vector<Index<int64_t>>& axes, Index<int64_t> start, Index<int32_t> col,
             Index<int64_t> position, Index<int32_t> order) {
  const ChannelRows rows = {start.data(), col.data(), position.data(), order.data(), int64_t(order.size())};
  const auto along = axes_of(axes, 6, runs);
  if (transpose) std::swap(block.first, block.second);
  blocks_in(in_channels, block.second);
  require_starts(start, blocks_in(out_channels, block.first), col.size(), "start for each block row, up to all blocks");
  require(position.size() == col.size(), "a position for each block");
  require(order.size() + 1 == start.size(), "each block row once in order");
  nb::gil_scoped_release release;
  conv(isa_named(isa), dtype_named(dtype), activation_named(activation), transpose, block.first, block.second,
       kernel.data(), images, image(x, x_size, in_channels), pointer(values), pointer(bias),
       image(y, y_size, out_channels), along.data(), along.data() + 3, rows);
  trim_scratch();
}

void py_conv_wgrad(const std::string& isa, const std::string& dtype, std::pair<int64_t, int64_t> block, int64_t images,
                   uintptr_t grad, const Size& grad_size, int64_t out_channels, uintptr_t x, const Size& x_size,
                   int64_t in_channels, bool transposed, uintptr_t values, const std::vector<Index<int64_t>>& axes,
                   Index<int32_t> row, Index<int32_t> col) {
  const auto along = axes_of(axes, 3, taps);
  blocks_in(out_channels, block.first), blocks_in(in_channels, block.second);
  require(row.size() == col.size(), "row and col of one length");
  nb::gil_scoped_release release;
  conv_wgrad(isa_named(isa), dtype_named(dtype), block.first, block.second, images,
             image(grad, grad_size, out_channels), image(x, x_size, in_channels), transposed, pointer(values),
             along.data(), row.data(), col.data(), int64_t(row.size()));
  trim_scratch();
}

const Binding binding([](nb::module_& m) {
  m.def("conv", &py_conv, nb::kw_only(), "isa"_a, "dtype"_a, "activation"_a, "transpose"_a, "block"_a, "kernel"_a,
        "images"_a, "x"_a, "x_size"_a, "in_channels"_a, "values"_a, "bias"_a, "y"_a, "y_size"_a, "out_channels"_a,
        "axes"_a.noconvert(), "start"_a.noconvert(), "col"_a.noconvert(), "position"_a.noconvert(),
        "order"_a.noconvert());
  m.def("conv_wgrad", &py_conv_wgrad, nb::kw_only(), "isa"_a, "dtype"_a, "block"_a, "images"_a, "grad"_a, "grad_size"_a,
        "out_channels"_a, "x"_a, "x_size"_a, "in_channels"_a, "transposed"_a, "values"_a, "axes"_a.noconvert(),
        "row"_a.noconvert(), "col"_a.noconvert());
});

}  // namespace
}  // namespace blocksparse
