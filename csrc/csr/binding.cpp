#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "csr/csr.hpp"
#include "isa/dispatch.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

using AnyIndex = nb::ndarray<nb::numpy, nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class Index>
bool is_wide(const Index& index) {
  return index.dtype() == nb::dtype<int64_t>();
}

constexpr const char* kWorking = "as much working memory as the function for it says";

// Check the index arrays and return the matrix with `rows` rows. Indices are all int32 or all int64.
template <class Index>
Csr csr(const Index& start, const Index& col, const std::optional<Index>& position, int64_t rows) {
  const auto same = [&](const Index& index) { return index.dtype() == start.dtype(); };
  require((is_wide(start) || start.dtype() == nb::dtype<int32_t>()) && same(col) && (!position || same(*position)),
          "indices that are all int32 or all int64");
  require(rows > 0 && int64_t(start.size()) == rows + 1, "a start for each row, and the end");
  require(!position || position->size() == col.size(), "a position for each connection");
  return {start.data(), col.data(), position ? position->data() : nullptr, rows, int64_t(col.size())};
}

// Return a matrix that is only read; its last start must be the number of connections.
Csr checked_csr(const AnyIndex& start, const AnyIndex& col, const std::optional<AnyIndex>& position, int64_t rows) {
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
  const Csr matrix = checked_csr(start, col, position, out_features);
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
  const Csr matrix = checked_csr(start, col, std::nullopt, out_features);
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
  const Csr matrix = checked_csr(start, col, position, grad_x ? in_features : out_features);
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
  const Csr matrix = checked_csr(start, col, std::nullopt, int64_t(start.size()) - 1);
  csr<NewIndex>(to_start, to_row, to_position, cols);
  const bool wide = is_wide(start), to_wide = is_wide(to_start);
  require(to_row.size() == col.size(), "one row and one position for each connection");
  nb::gil_scoped_release release;
  csr_transposed(matrix, wide, cols, to_start.data(), to_row.data(), to_position.data(), to_wide);
}

const Binding binding([](nb::module_& m) {
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
});

}  // namespace
}  // namespace blocksparse
