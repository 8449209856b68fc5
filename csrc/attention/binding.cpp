#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include "attention/attention.hpp"
#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

// heads, queries, keys, d, d_v, block_q, block_k
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

const Binding binding([](nb::module_& m) {
  m.def("attention_forward", &py_attention_forward, nb::kw_only(), "isa"_a, "dtype"_a, "sizes"_a, "causal"_a, "q"_a,
        "k"_a, "v"_a, "y"_a, "log_sum"_a, "start"_a.noconvert(), "col"_a.noconvert());
  m.def("attention_backward", &py_attention_backward, nb::kw_only(), "isa"_a, "dtype"_a, "sizes"_a, "causal"_a, "q"_a,
        "k"_a, "v"_a, "grad"_a, "log_sum"_a, "delta"_a, "grad_q"_a, "grad_k"_a, "grad_v"_a, "start"_a.noconvert(),
        "col"_a.noconvert(), "column_start"_a.noconvert(), "row"_a.noconvert());
});

}  // namespace
}  // namespace blocksparse
