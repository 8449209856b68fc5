// The Python module blocksparse._core. Tensors come as addresses: cpu_core.py compares each with the sizes that it
// passes along with it, which is its only way to an address. Index arrays come as arrays: their lengths, and how many
// entries they claim, are compared here. The entries come from plans, which are made from layouts only.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>

#include "arguments.hpp"
#include "attention.hpp"
#include "conv.hpp"
#include "cpu_features.hpp"
#include "csr.hpp"
#include "elementwise.hpp"
#include "gates.hpp"
#include "int8.hpp"
#include "isa_dispatch.hpp"
#include "linear.hpp"
#include "parallel.hpp"
#include "recurrent_module.hpp"

using namespace nb::literals;

namespace blocksparse {

namespace {

void py_linear(const PyRowTasks& plan, const std::string& isa, const std::string& dtype, const std::string& activation,
               int64_t tokens, const PyRows& x, uintptr_t values, uintptr_t bias, uintptr_t y) {
  nb::gil_scoped_release release;
  linear(isa_named(isa), dtype_named(dtype), activation_named(activation), plan.transposed, plan.block.first,
         plan.block.second, tokens, {pointer(x.first), x.second, plan.features.second}, pointer(values), pointer(bias),
         pointer(y), plan.features.first, plan.tasks);
  trim_scratch();
}

void py_linear_wgrad(const std::string& isa, const std::string& dtype, std::pair<int64_t, int64_t> block,
                     int64_t tokens, uintptr_t grad, int64_t grad_stride, int64_t out_features, uintptr_t x,
                     int64_t x_stride, int64_t in_features, uintptr_t values, Index<int32_t> row, Index<int32_t> col,
                     Index<int64_t> task_start) {
  const BlockTasks tasks = {row.data(), col.data(), task_start.data(), int64_t(task_start.size()) - 1};
  blocks_in(out_features, block.first), blocks_in(in_features, block.second);
  require(row.size() == col.size(), "row and col of one length");
  require_tasks(task_start, row.size());
  nb::gil_scoped_release release;
  linear_wgrad(isa_named(isa), dtype_named(dtype), block.first, block.second, tokens,
               {pointer(grad), grad_stride, out_features}, {pointer(x), x_stride, in_features}, pointer(values), tasks);
  trim_scratch();
}

using AnyIndex = nb::ndarray<nb::numpy, nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class Index>
bool is_wide(const Index& index) {
  return index.dtype() == nb::dtype<int64_t>();
}

constexpr const char* kWorking = "as much working memory as the function for it says";

// The matrix of `rows` rows; indices are all int32 or all int64.
template <class Index>
Csr csr(const Index& start, const Index& col, const std::optional<Index>& position, int64_t rows) {
  const auto same = [&](const Index& index) { return index.dtype() == start.dtype(); };
  require((is_wide(start) || start.dtype() == nb::dtype<int32_t>()) && same(col) && (!position || same(*position)),
          "indices that are all int32 or all int64");
  require(rows > 0 && int64_t(start.size()) == rows + 1, "a start for each row, and the end");
  require(!position || position->size() == col.size(), "a position for each connection");
  return {start.data(), col.data(), position ? position->data() : nullptr, rows, int64_t(col.size())};
}

// A matrix that exists and is only read.
Csr given(const AnyIndex& start, const AnyIndex& col, const std::optional<AnyIndex>& position, int64_t rows) {
  const Csr matrix = csr(start, col, position, rows);
  const auto at = [&](int64_t row) {
    return is_wide(start) ? static_cast<const int64_t*>(matrix.start)[row]
                          : int64_t(static_cast<const int32_t*>(matrix.start)[row]);
  };
  require(at(0) == 0 && at(rows) == matrix.connections, "start to rise from 0 to all connections");
  return matrix;
}

int64_t py_csr_working_bytes(const std::string& isa, const std::string& dtype, int64_t tokens, int64_t in_features) {
  return csr_working_bytes(isa_named(isa), dtype_named(dtype), tokens, in_features);
}

int64_t py_csr_wgrad_working_bytes(const std::string& isa, const std::string& dtype, int64_t tokens,
                                   int64_t out_features, int64_t in_features) {
  return csr_wgrad_working_bytes(isa_named(isa), dtype_named(dtype), tokens, out_features, in_features);
}

void py_csr_linear(const std::string& isa, const std::string& dtype, const std::string& activation, int64_t tokens,
                   uintptr_t x, int64_t x_stride, int64_t in_features, uintptr_t values, uintptr_t bias, uintptr_t y,
                   int64_t out_features, uintptr_t working, int64_t working_bytes, const AnyIndex& start,
                   const AnyIndex& col, const std::optional<AnyIndex>& position) {
  const Csr matrix = given(start, col, position, out_features);
  const bool wide = is_wide(start);
  const InstructionSet& set = isa_named(isa);
  const DType type = dtype_named(dtype);
  require(working_bytes >= csr_working_bytes(set, type, tokens, in_features), kWorking);
  nb::gil_scoped_release release;
  csr_linear(set, type, activation_named(activation), tokens, {pointer(x), x_stride, in_features}, pointer(values),
             pointer(bias), pointer(y), pointer(working), matrix, wide);
}

void py_csr_wgrad(const std::string& isa, const std::string& dtype, int64_t tokens, uintptr_t grad, int64_t grad_stride,
                  int64_t out_features, uintptr_t x, int64_t x_stride, int64_t in_features, uintptr_t values,
                  uintptr_t working, int64_t working_bytes, const AnyIndex& start, const AnyIndex& col) {
  const Csr matrix = given(start, col, std::nullopt, out_features);
  const bool wide = is_wide(start);
  const InstructionSet& set = isa_named(isa);
  const DType type = dtype_named(dtype);
  require(working_bytes >= csr_wgrad_working_bytes(set, type, tokens, out_features, in_features), kWorking);
  nb::gil_scoped_release release;
  csr_wgrad(set, type, tokens, {pointer(grad), grad_stride, out_features}, {pointer(x), x_stride, in_features},
            pointer(values), pointer(working), matrix, wide);
}

int64_t py_csr_gradients_working_bytes(const std::string& isa, const std::string& dtype, int64_t tokens,
                                       int64_t out_features, int64_t in_features) {
  return csr_gradients_working_bytes(isa_named(isa), dtype_named(dtype), tokens, out_features, in_features);
}

void py_csr_gradients(const std::string& isa, const std::string& dtype, int64_t tokens, uintptr_t grad,
                      int64_t grad_stride, int64_t out_features, uintptr_t x, int64_t x_stride, int64_t in_features,
                      uintptr_t values, uintptr_t grad_x, uintptr_t grad_values, uintptr_t grad_bias, uintptr_t working,
                      int64_t working_bytes, const AnyIndex& start, const AnyIndex& col,
                      const std::optional<AnyIndex>& position) {
  const Csr matrix = given(start, col, position, grad_x ? in_features : out_features);
  const bool wide = is_wide(start);
  const InstructionSet& set = isa_named(isa);
  const DType type = dtype_named(dtype);
  const int64_t needed = csr_gradients_working_bytes(set, type, tokens, out_features, in_features);
  require(needed > 0 && working_bytes >= needed, kWorking);
  nb::gil_scoped_release release;
  csr_gradients(set, type, tokens, {pointer(grad), grad_stride, out_features}, {pointer(x), x_stride, in_features},
                pointer(values), pointer(grad_x), pointer(grad_values), pointer(grad_bias), pointer(working), matrix,
                wide);
}

using NewIndex = nb::ndarray<nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void py_csr_transposed(const AnyIndex& start, const AnyIndex& col, const NewIndex& to_start, const NewIndex& to_row,
                       const NewIndex& to_position) {
  const int64_t cols = int64_t(to_start.size()) - 1;
  const Csr matrix = given(start, col, std::nullopt, int64_t(start.size()) - 1);
  csr<NewIndex>(to_start, to_row, to_position, cols);
  const bool wide = is_wide(start), to_wide = is_wide(to_start);
  require(to_row.size() == col.size(), "one row and one position for each connection");
  nb::gil_scoped_release release;
  csr_transposed(matrix, wide, cols, to_start.data(), to_row.data(), to_position.data(), to_wide);
}

// The axes of a convolution as plan.py packs them, each in one array.
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

// Of each axis input, output, kernel, stride, padding and dilation; how far they are from zero is far from overflow.
Patches patches_of(const std::vector<std::array<int64_t, 6>>& axes) {
  require(axes.size() == 3, kAxis);
  Patches patches = {};
  for (int a = 0; a < 3; ++a) {
    const auto [input, output, kernel, stride, padding, dilation] = axes[a];
    require(std::min({input, padding}) >= 0 && std::min({output, kernel, stride, dilation}) > 0, kAxis);
    require(std::max({input, output, kernel, stride, padding, dilation}) < int64_t(1) << 31, kAxis);
    patches[a] = {input, output, kernel, stride, padding, dilation};
  }
  return patches;
}

// A product where axes is empty, a convolution of images with an axis each otherwise: tokens are its outputs, and
// the inputs of the plan theirs, those of all taps.
void py_int8_linear(const PyRowTasks& plan, const std::string& isa, const std::string& dtype,
                    const std::string& activation, int64_t tokens, const PyRows& x, uintptr_t values, uintptr_t scale,
                    uintptr_t sum, int64_t padded_out, uintptr_t bias, uintptr_t y,
                    const std::vector<std::array<int64_t, 6>>& axes) {
  require(!plan.transposed, "tasks of x W^T");
  const Patches patches = axes.empty() ? Patches{} : patches_of(axes);
  if (!axes.empty()) {
    blocks_in(plan.block.second, patches[0].kernel * patches[1].kernel * patches[2].kernel);
    blocks_in(tokens, patches[0].output * patches[1].output * patches[2].output);
  }
  const Int8Weights weights = {static_cast<const int8_t*>(pointer(values)), static_cast<const float*>(pointer(scale)),
                               static_cast<const int32_t*>(pointer(sum)), padded_out};
  nb::gil_scoped_release release;
  int8_linear(isa_named(isa), dtype_named(dtype), activation_named(activation), plan.block.first, plan.block.second,
              tokens, {pointer(x.first), x.second, plan.features.second}, axes.empty() ? nullptr : &patches, weights,
              pointer(bias), pointer(y), plan.features.first, plan.tasks);
  trim_scratch();
}

void py_gates_forward(const std::string& isa, const std::string& dtype, int64_t rows, int64_t hidden, const PyRows& z,
                      const PyRows& add, uintptr_t gain, const PyRows& c, const PyRows& h, const PyRows& c_out,
                      const PyRows& gates) {
  nb::gil_scoped_release release;
  gates_forward(isa_named(isa), dtype_named(dtype), rows,
                {hidden, input(z), input(add), pointer(gain), input(c), output(h), output(c_out), output(gates)});
}

void py_gates_backward(const std::string& isa, const std::string& dtype, int64_t rows, int64_t hidden,
                       const PyRows& gates, const PyRows& c_before, const PyRows& c, const PyRows& grad_h,
                       const PyRows& grad_y, const PyRows& grad_c, const PyRows& grad_pre,
                       const PyRows& grad_c_before) {
  nb::gil_scoped_release release;
  gates_backward(isa_named(isa), dtype_named(dtype), rows,
                 {hidden, input(gates), input(c_before), input(c), input(grad_h), input(grad_y), input(grad_c),
                  output(grad_pre), output(grad_c_before)});
}

// heads, queries, keys, d, d_v and the block's sides.
using AttentionSizes = std::array<int64_t, 7>;

AttentionCall attention_call(const std::string& dtype, const AttentionSizes& n, bool causal, uintptr_t q, uintptr_t k,
                             uintptr_t v) {
  require(size_of(dtype_named(dtype)) > 2, "float32 or float64");
  constexpr int64_t kWidest = 16;  // lanes of any vector
  require(n[3] % kWidest == 0 && n[4] % kWidest == 0, "whole vectors of features");
  return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], causal, pointer(q), pointer(k), pointer(v)};
}

BlockLists block_lists(const Index<int64_t>& start, const Index<int32_t>& other, int64_t count) {
  require_starts(start, count, other.size(), "the start of each row or column of blocks, up to all blocks");
  return {start.data(), other.data(), count};
}

void py_attention_forward(const std::string& isa, const std::string& dtype, const AttentionSizes& sizes, bool causal,
                          uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t y, uintptr_t log_sum, Index<int64_t> start,
                          Index<int32_t> col) {
  const AttentionCall call = attention_call(dtype, sizes, causal, q, k, v);
  blocks_in(call.keys, call.block_k);
  const BlockLists rows = block_lists(start, col, blocks_in(call.queries, call.block_q));
  nb::gil_scoped_release release;
  attention_forward(isa_named(isa), dtype_named(dtype), call, rows, pointer(y), pointer(log_sum));
  trim_scratch();
}

void py_attention_backward(const std::string& isa, const std::string& dtype, const AttentionSizes& sizes, bool causal,
                           uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t grad, uintptr_t log_sum, uintptr_t delta,
                           uintptr_t grad_q, uintptr_t grad_k, uintptr_t grad_v, Index<int64_t> start,
                           Index<int32_t> col, Index<int64_t> column_start, Index<int32_t> row) {
  const AttentionCall call = attention_call(dtype, sizes, causal, q, k, v);
  const BlockLists rows = block_lists(start, col, blocks_in(call.queries, call.block_q));
  const BlockLists columns = block_lists(column_start, row, blocks_in(call.keys, call.block_k));
  require(row.size() == col.size(), "as many blocks in columns as in rows");
  nb::gil_scoped_release release;
  attention_backward(isa_named(isa), dtype_named(dtype), call, rows, columns, pointer(grad), pointer(log_sum),
                     pointer(delta), pointer(grad_q), pointer(grad_k), pointer(grad_v));
  trim_scratch();
}

void py_dropout_forward(const std::string& isa, const std::string& dtype, int64_t count, uintptr_t x, uintptr_t y,
                        uintptr_t code, const std::array<double, 3>& factors, uint64_t seed, uint16_t least) {
  nb::gil_scoped_release release;
  dropout_forward(
      isa_named(isa), dtype_named(dtype), count,
      {pointer(x), pointer(y), reinterpret_cast<uint8_t*>(code), {factors[0], factors[1], factors[2]}, seed, least});
}

void py_dropout_backward(const std::string& isa, const std::string& dtype, int64_t count, uintptr_t grad,
                         uintptr_t code, uintptr_t grad_x, const std::array<double, 3>& factors) {
  nb::gil_scoped_release release;
  dropout_backward(
      isa_named(isa), dtype_named(dtype), count,
      {pointer(grad), reinterpret_cast<const uint8_t*>(code), pointer(grad_x), {factors[0], factors[1], factors[2]}});
}

void py_concat_elu(const std::string& isa, const std::string& dtype, int64_t rows, int64_t features, uintptr_t x,
                   uintptr_t grad, uintptr_t to, double scale, uint64_t seed, uint16_t least) {
  nb::gil_scoped_release release;
  concat_elu(isa_named(isa), dtype_named(dtype), rows,
             {features, pointer(x), pointer(grad), pointer(to), scale, seed, least});
}

void py_momentum_steps(const std::string& isa, const std::string& dtype, const std::vector<int64_t>& counts,
                       const std::vector<uintptr_t>& weights, const std::vector<uintptr_t>& velocities,
                       const std::vector<uintptr_t>& grads, double momentum, double rate, double keep) {
  const size_t count = counts.size();
  require(weights.size() == count && velocities.size() == count && grads.size() == count, "lists of one length");
  std::vector<MomentumStep> steps;
  for (size_t i = 0; i < counts.size(); ++i)
    steps.push_back({pointer(weights[i]), pointer(velocities[i]), pointer(grads[i]), momentum, rate, keep});
  nb::gil_scoped_release release;
  momentum_steps(isa_named(isa), dtype_named(dtype), counts, steps);
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The compiled CPU core of blocksparse.";
  nb::set_leak_warnings(false);  // layouts that live until the interpreter ends keep their tasks
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::invalid_argument& error) {
      PyErr_SetString(nb::module_::import_("blocksparse.errors").attr("BlockSparseError").ptr(), error.what());
    }
  });
  m.def("share_threads", &share_threads, "parallel_for"_a, "get_num_threads"_a,
        "Take PyTorch's threads: the addresses of torch_parallel_for and torch_get_num_threads.");
  m.def("features", &cpu_feature_names, "What this CPU can do, of what matters here.");
  m.def("isas", &isas, "The instruction sets compiled in, slowest first, and whether this CPU has them.");
  nb::class_<PyRowTasks>(m, "RowTasks")
      .def(nb::init<Sizes, Sizes, bool, Index<int64_t>, Index<int32_t>, Index<int64_t>, Index<int32_t>, Index<int32_t>,
                    Index<int32_t>, Index<int64_t>>(),
           nb::kw_only(), "features"_a, "block"_a, "transposed"_a, "start"_a.noconvert(), "col"_a.noconvert(),
           "position"_a.noconvert(), "row"_a.noconvert(), "begin"_a.noconvert(), "end"_a.noconvert(),
           "task_start"_a.noconvert());
  // By position: keyword arguments would take longer than a small product.
  m.def("linear", &py_linear);
  m.def("linear_wgrad", &py_linear_wgrad, nb::kw_only(), "isa"_a, "dtype"_a, "block"_a, "tokens"_a, "grad"_a,
        "grad_stride"_a, "out_features"_a, "x"_a, "x_stride"_a, "in_features"_a, "values"_a, "row"_a.noconvert(),
        "col"_a.noconvert(), "task_start"_a.noconvert());
  m.def("csr_working_bytes", &py_csr_working_bytes, "isa"_a, "dtype"_a, "tokens"_a, "in_features"_a);
  m.def("csr_wgrad_working_bytes", &py_csr_wgrad_working_bytes, "isa"_a, "dtype"_a, "tokens"_a, "out_features"_a,
        "in_features"_a);
  m.def("csr_linear", &py_csr_linear, nb::kw_only(), "isa"_a, "dtype"_a, "activation"_a, "tokens"_a, "x"_a,
        "x_stride"_a, "in_features"_a, "values"_a, "bias"_a, "y"_a, "out_features"_a, "working"_a, "working_bytes"_a,
        "start"_a.noconvert(), "col"_a.noconvert(), "position"_a.noconvert().none());
  m.def("csr_wgrad", &py_csr_wgrad, nb::kw_only(), "isa"_a, "dtype"_a, "tokens"_a, "grad"_a, "grad_stride"_a,
        "out_features"_a, "x"_a, "x_stride"_a, "in_features"_a, "values"_a, "working"_a, "working_bytes"_a,
        "start"_a.noconvert(), "col"_a.noconvert());
  m.def("csr_gradients_working_bytes", &py_csr_gradients_working_bytes, "isa"_a, "dtype"_a, "tokens"_a,
        "out_features"_a, "in_features"_a);
  m.def("csr_gradients", &py_csr_gradients, nb::kw_only(), "isa"_a, "dtype"_a, "tokens"_a, "grad"_a, "grad_stride"_a,
        "out_features"_a, "x"_a, "x_stride"_a, "in_features"_a, "values"_a, "grad_x"_a, "grad_values"_a, "grad_bias"_a,
        "working"_a, "working_bytes"_a, "start"_a.noconvert(), "col"_a.noconvert(), "position"_a.noconvert().none());
  m.def("csr_transposed", &py_csr_transposed, nb::kw_only(), "start"_a.noconvert(), "col"_a.noconvert(),
        "to_start"_a.noconvert(), "to_row"_a.noconvert(), "to_position"_a.noconvert());
  m.def("conv", &py_conv, nb::kw_only(), "isa"_a, "dtype"_a, "activation"_a, "transpose"_a, "block"_a, "kernel"_a,
        "images"_a, "x"_a, "x_size"_a, "in_channels"_a, "values"_a, "bias"_a, "y"_a, "y_size"_a, "out_channels"_a,
        "axes"_a.noconvert(), "start"_a.noconvert(), "col"_a.noconvert(), "position"_a.noconvert(),
        "order"_a.noconvert());
  m.def("conv_wgrad", &py_conv_wgrad, nb::kw_only(), "isa"_a, "dtype"_a, "block"_a, "images"_a, "grad"_a, "grad_size"_a,
        "out_channels"_a, "x"_a, "x_size"_a, "in_channels"_a, "transposed"_a, "values"_a, "axes"_a.noconvert(),
        "row"_a.noconvert(), "col"_a.noconvert());
  m.def("int8_linear", &py_int8_linear, nb::kw_only(), "plan"_a, "isa"_a, "dtype"_a, "activation"_a, "tokens"_a, "x"_a,
        "values"_a, "scale"_a, "sum"_a, "padded_out"_a, "bias"_a, "y"_a,
        "axes"_a = std::vector<std::array<int64_t, 6>>());
  // Arguments by position: at each step of a sequence keyword arguments would take longer than small steps.
  m.def("gates_forward", &py_gates_forward);
  m.def("gates_backward", &py_gates_backward);
  add_recurrences(m);
  m.def("attention_forward", &py_attention_forward, nb::kw_only(), "isa"_a, "dtype"_a, "sizes"_a, "causal"_a, "q"_a,
        "k"_a, "v"_a, "y"_a, "log_sum"_a, "start"_a.noconvert(), "col"_a.noconvert());
  m.def("attention_backward", &py_attention_backward, nb::kw_only(), "isa"_a, "dtype"_a, "sizes"_a, "causal"_a, "q"_a,
        "k"_a, "v"_a, "grad"_a, "log_sum"_a, "delta"_a, "grad_q"_a, "grad_k"_a, "grad_v"_a, "start"_a.noconvert(),
        "col"_a.noconvert(), "column_start"_a.noconvert(), "row"_a.noconvert());
  m.def("dropout_forward", &py_dropout_forward, nb::kw_only(), "isa"_a, "dtype"_a, "count"_a, "x"_a, "y"_a, "code"_a,
        "factors"_a, "seed"_a, "least"_a);
  m.def("concat_elu", &py_concat_elu, nb::kw_only(), "isa"_a, "dtype"_a, "rows"_a, "features"_a, "x"_a, "grad"_a,
        "to"_a, "scale"_a, "seed"_a, "least"_a);
  m.def("dropout_backward", &py_dropout_backward, nb::kw_only(), "isa"_a, "dtype"_a, "count"_a, "grad"_a, "code"_a,
        "grad_x"_a, "factors"_a);
  m.def("momentum_steps", &py_momentum_steps, nb::kw_only(), "isa"_a, "dtype"_a, "counts"_a, "weights"_a,
        "velocities"_a, "grads"_a, "momentum"_a, "rate"_a, "keep"_a);
}

}  // namespace blocksparse
