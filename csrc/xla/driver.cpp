#include <algorithm>
#include <exception>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/names.hpp"
#include "core/parallel.hpp"
#include "csr/csr.hpp"
#include "csr/transposed.hpp"
#include "isa/dispatch.hpp"
#include "linear/linear.hpp"
#include "linear/plan.hpp"
#include "xla/ffi/api/ffi.h"
#include "xla/handlers.hpp"

namespace blocksparse {
namespace {

namespace ffi = xla::ffi;
using Indices = ffi::BufferR2<ffi::S32>;
using Layout = RowLayout<int32_t>;

// Multiply-adds below which a product stays on the thread of its caller: waking another one takes as long.
constexpr int64_t kLeastShared = 2 << 20;

DType dtype_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return DType::kFloat32;
    case ffi::F64:
      return DType::kFloat64;
    case ffi::BF16:
      return DType::kBFloat16;
    case ffi::F16:
      return DType::kFloat16;
    default:
      throw std::invalid_argument("the compiled core: expected float32, float64, bfloat16 or float16");
  }
}

// The dimensions of an operand of this rank.
ffi::Span<const int64_t> dims_of(const ffi::AnyBuffer& buffer, size_t rank) {
  require(buffer.dimensions().size() == rank, "operands with a batch axis");
  return buffer.dimensions();
}

void require_shape(const ffi::AnyBuffer& buffer, DType dtype, std::initializer_list<int64_t> shape, const char* what) {
  const auto dims = buffer.dimensions();
  require(dtype_of(buffer) == dtype && std::equal(dims.begin(), dims.end(), shape.begin(), shape.end()), what);
}

const char *const kStarts = "row starts [batch, rows + 1]", *const kFeatures = "the features of the layout";

// The layouts of a batch of products whose weights have one size.
class Layouts {
 public:
  Layouts(const Indices& start, const Indices& col, int64_t in_blocks, int64_t block_out, int64_t block_in)
      : start_(start.typed_data()), col_(col.typed_data()) {
    require(start.dimensions()[1] > 1, kStarts);
    require(block_out > 0 && block_in > 0 && in_blocks > 0, "blocks with features");
    size_ = {nullptr, nullptr, start.dimensions()[1] - 1, in_blocks, col.dimensions()[1], block_out, block_in};
    require(col.dimensions()[0] == start.dimensions()[0], "columns [batch, blocks]");
  }

  int64_t out_features() const { return size_.rows * size_.block_out; }
  int64_t in_features() const { return size_.cols * size_.block_in; }
  int64_t weights() const { return size_.blocks * size_.block_out * size_.block_in; }
  bool is_single_weights() const { return size_.block_out == 1 && size_.block_in == 1; }

  // Return the layout of product `i`.
  Layout operator[](int64_t i) const {
    Layout layout = size_;
    layout.start = start_ + i * (layout.rows + 1), layout.col = col_ + i * layout.blocks;
    return layout;
  }

  // Return whether product `i` has the layout of the one before it, so that it shares its plan.
  bool repeats(int64_t i) const {
    if (i == 0) return false;
    const Layout layout = (*this)[i], last = (*this)[i - 1];
    return std::equal(layout.start, layout.start + layout.rows + 1, last.start) &&
           std::equal(layout.col, layout.col + layout.blocks, last.col);
  }

 private:
  const int32_t *start_, *col_;
  Layout size_;
};

// Throw unless these are the indices of a layout: no other part of a program of XLA has seen them.
void check_layout(const Layout& layout) {
  check_indices(layout);
  for (int64_t row = 0; row < layout.rows; ++row)
    for (int32_t i = layout.start[row] + 1; i < layout.start[row + 1]; ++i)
      if (layout.col[i] <= layout.col[i - 1])
        throw std::invalid_argument("the compiled core: expected block columns that rise in each row");
}

// The plan of the rows of single weights, or of their columns.
class CsrPlan {
 public:
  void make(const Layout& layout, bool transposed) {
    matrix_ = {layout.start, layout.col, nullptr, layout.rows, layout.blocks};
    if (!transposed) return;
    start_.resize(layout.cols + 1), row_.resize(layout.blocks), position_.resize(layout.blocks);
    transpose_indices(layout.start, layout.col, layout.rows, layout.cols, start_.data(), row_.data(), position_.data());
    matrix_ = {start_.data(), row_.data(), position_.data(), layout.cols, layout.blocks};
  }
  const Csr& matrix() const { return matrix_; }

 private:
  std::vector<int32_t> start_, row_, position_;
  Csr matrix_{};
};

// Run a function and return its exception as an error.
template <class Run>
ffi::Error caught(const Run& run) {
  try {
    run();
    trim_scratch();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

BorrowThreads::Schedule schedule_on(ffi::ThreadPool& pool) {
  return [&pool](std::function<void()> help) { pool.Schedule(std::move(help)); };
}

int64_t threads_for(int64_t multiply_adds, const ffi::ThreadPool& pool) {
  return multiply_adds < kLeastShared ? 1 : std::max<int64_t>(pool.num_threads(), 1);
}

ffi::Error run_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer bias, Indices start,
                      Indices col, ffi::Result<ffi::AnyBuffer> y, std::string_view isa_name,
                      std::string_view activation_name, bool transposed, int64_t in_blocks) {
  return caught([&] {
    const DType dtype = dtype_of(x);
    const auto x_dims = dims_of(x, 3), y_dims = dims_of(*y, 3), values_dims = dims_of(values, 4);
    const int64_t batch = x_dims[0], tokens = x_dims[1], size = size_of(dtype);
    const int64_t inputs = x_dims[2], outputs = y_dims[2];
    const int64_t block_out = values_dims[2], block_in = values_dims[3];
    const Layouts layouts(start, col, in_blocks, block_out, block_in);
    require(layouts.out_features() == (transposed ? inputs : outputs), kFeatures);
    require(layouts.in_features() == (transposed ? outputs : inputs), kFeatures);
    require(start.dimensions()[0] == batch, kStarts);
    require_shape(values, dtype, {batch, col.dimensions()[1], block_out, block_in}, "values [batch, blocks, ...]");
    require_shape(*y, dtype, {batch, tokens, outputs}, "y [batch, tokens, out]");
    const bool has_bias = bias.element_count() > 0;
    require_shape(bias, dtype, {has_bias ? outputs : 0}, "a bias for each output");
    const InstructionSet& isa = isa_named(std::string(isa_name));
    const Activation activation = activation_named(std::string(activation_name));
    const void* bias_data = has_bias ? bias.untyped_data() : nullptr;

    const BorrowThreads borrowed(threads_for(layouts.weights() * tokens, pool), schedule_on(pool));
    RowPlan plan;
    CsrPlan csr;
    for (int64_t i = 0; i < batch; ++i) {
      const Layout layout = layouts[i];
      if (!layouts.repeats(i)) {
        check_layout(layout);
        if (layouts.is_single_weights()) {
          csr.make(layout, transposed);
        } else {
          plan = plan_rows(layout, transposed);
        }
      }
      const Matrix x_i = {advance(x.untyped_data(), i * tokens * inputs * size), inputs, inputs};
      const void* values_i = advance(values.untyped_data(), i * layouts.weights() * size);
      void* y_i = advance(y->untyped_data(), i * tokens * outputs * size);
      if (layouts.is_single_weights()) {
        void* working = scratch(Scratch::kPanels, csr_working_bytes(isa, dtype, tokens, inputs));
        csr_linear(isa, dtype, activation, tokens, x_i, values_i, bias_data, y_i, working, csr.matrix(), false);
      } else {
        linear(isa, dtype, activation, transposed, transposed ? block_in : block_out, transposed ? block_out : block_in,
               tokens, x_i, values_i, bias_data, y_i, outputs, plan.tasks());
      }
    }
  });
}

ffi::Error run_linear_wgrad(ffi::ThreadPool pool, ffi::AnyBuffer grad, ffi::AnyBuffer x, Indices start, Indices col,
                            ffi::Result<ffi::AnyBuffer> values, std::string_view isa_name, int64_t in_blocks) {
  return caught([&] {
    const DType dtype = dtype_of(x);
    const auto grad_dims = dims_of(grad, 3), x_dims = dims_of(x, 3), values_dims = dims_of(*values, 4);
    const int64_t batch = x_dims[0], tokens = x_dims[1], size = size_of(dtype);
    const int64_t outputs = grad_dims[2], inputs = x_dims[2];
    const int64_t block_out = values_dims[2], block_in = values_dims[3], blocks = col.dimensions()[1];
    const Layouts layouts(start, col, in_blocks, block_out, block_in);
    require(layouts.out_features() == outputs && layouts.in_features() == inputs, kFeatures);
    require(start.dimensions()[0] == batch, kStarts);
    require_shape(grad, dtype, {batch, tokens, outputs}, "grad [batch, tokens, out]");
    require_shape(*values, dtype, {batch, blocks, block_out, block_in}, "values [batch, blocks, ...]");
    const InstructionSet& isa = isa_named(std::string(isa_name));

    const BorrowThreads borrowed(threads_for(layouts.weights() * tokens, pool), schedule_on(pool));
    const std::vector<int64_t> task_start = plan_blocks(blocks, block_out, block_in);
    std::vector<int32_t> row(blocks);
    for (int64_t i = 0; i < batch; ++i) {
      const Layout layout = layouts[i];
      if (!layouts.repeats(i)) {
        check_layout(layout);
        for (int64_t r = 0; r < layout.rows; ++r)
          std::fill(row.begin() + layout.start[r], row.begin() + layout.start[r + 1], int32_t(r));
      }
      const Matrix grad_i = {advance(grad.untyped_data(), i * tokens * outputs * size), outputs, outputs};
      const Matrix x_i = {advance(x.untyped_data(), i * tokens * inputs * size), inputs, inputs};
      void* values_i = advance(values->untyped_data(), i * layouts.weights() * size);
      if (layouts.is_single_weights()) {
        const int64_t bytes = csr_wgrad_working_bytes(isa, dtype, tokens, outputs, inputs);
        const Csr matrix = {layout.start, layout.col, nullptr, layout.rows, layout.blocks};
        csr_wgrad(isa, dtype, tokens, grad_i, x_i, values_i, scratch(Scratch::kPanels, bytes), matrix, false);
      } else {
        linear_wgrad(isa, dtype, block_out, block_in, tokens, grad_i, x_i, values_i,
                     {row.data(), layout.col, task_start.data(), int64_t(task_start.size()) - 1});
      }
    }
  });
}

XLA_FFI_DEFINE_HANDLER(linear_handler, run_linear,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<Indices>()
                           .Arg<Indices>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("isa")
                           .Attr<std::string_view>("activation")
                           .Attr<bool>("transposed")
                           .Attr<int64_t>("in_blocks"));
XLA_FFI_DEFINE_HANDLER(linear_wgrad_handler, run_linear_wgrad,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<Indices>()
                           .Arg<Indices>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("isa")
                           .Attr<int64_t>("in_blocks"));

}  // namespace

XLA_FFI_Error* xla_linear(XLA_FFI_CallFrame* call) { return linear_handler(call); }
XLA_FFI_Error* xla_linear_wgrad(XLA_FFI_CallFrame* call) { return linear_wgrad_handler(call); }

}  // namespace blocksparse
