#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "attention/attention.hpp"
#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "core/parallel.hpp"
#include "isa/dispatch.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

// batch, heads, kv_heads, queries, keys, d, d_v, block_q, block_k, before
using AttentionSizes = std::array<int64_t, 10>;
using Addresses = std::array<uintptr_t, 3>;
using Spans = std::pair<uintptr_t, int64_t>;  // of int32 [2, batches, queries], and the batches

// The first visible keys of all queries and the keys' ends, of one sequence or of all; null twice if there are none.
struct SpanRows {
  const int32_t *first, *end;

  SpanRows(const Spans& spans, int64_t batch, int64_t queries)
      : first(spans.second ? static_cast<const int32_t*>(pointer(spans.first)) : nullptr),
        end(first ? first + spans.second * queries : nullptr) {
    require(spans.second == 0 || spans.second == 1 || spans.second == batch, "spans of one batch or of all");
  }
};

void check_heads(int64_t heads, int64_t kv_heads) {
  require(kv_heads > 0 && heads % kv_heads == 0, "heads that share keys evenly");
}

AttentionCall attention_call(const std::string& dtype, const AttentionSizes& n, const Addresses& qkv,
                             const Spans& spans, double softcap, uint64_t seed, uint32_t drop_below) {
  require(size_of(dtype_named(dtype)) > 2, "float32 or float64");
  constexpr int64_t kWidest = 16;  // lanes of any vector
  require(n[5] % kWidest == 0 && n[6] % kWidest == 0, "whole vectors of features");
  check_heads(n[1], n[2]);
  require(n[7] > 0 && n[8] > 0 && n[9] >= 0 && n[4] < int64_t(1) << 31, "positive blocks, and fewer than 2^31 keys");
  const SpanRows rows(spans, n[0], n[3]);
  const AttentionScores scores{n[4], rows.first, rows.end, softcap, seed, drop_below, 0};
  return {n[0],
          n[1],
          n[2],
          n[3],
          n[4],
          n[5],
          n[6],
          n[7],
          n[8],
          n[9],
          scores,
          spans.second,
          pointer(qkv[0]),
          pointer(qkv[1]),
          pointer(qkv[2])};
}

BlockLists block_lists(const Index<int64_t>& start, const Index<int32_t>& other, int64_t count) {
  require_starts(start, count, other.size(), "the start of each row or column of blocks, up to all blocks");
  return {start.data(), other.data(), count};
}

// The blocks of each row, which must cover all queries and lie within the keys.
BlockLists row_lists(const AttentionCall& call, const Index<int64_t>& start, const Index<int32_t>& col) {
  const int64_t count = int64_t(start.size()) - 1, columns = ceil_div(call.keys, call.block_k);
  require(count * call.block_q >= call.before + call.queries, "a block row for each query");
  for (size_t i = 0; i < col.size(); ++i) require(col.data()[i] >= 0 && col.data()[i] < columns, "blocks of keys");
  return block_lists(start, col, count);
}

void py_attention_forward(const std::string& isa, const std::string& dtype, const AttentionSizes& sizes,
                          const Addresses& qkv, const Spans& spans, double softcap, uint64_t seed, uint32_t drop_below,
                          uintptr_t y, uintptr_t log_sum, Index<int64_t> start, Index<int32_t> col) {
  const AttentionCall call = attention_call(dtype, sizes, qkv, spans, softcap, seed, drop_below);
  const BlockLists rows = row_lists(call, start, col);
  nb::gil_scoped_release release;
  attention_forward(isa_named(isa), dtype_named(dtype), call, rows, pointer(y), pointer(log_sum));
  trim_scratch();
}

void py_attention_backward(const std::string& isa, const std::string& dtype, const AttentionSizes& sizes,
                           const Addresses& qkv, const Spans& spans, double softcap, uint64_t seed, uint32_t drop_below,
                           uintptr_t grad, uintptr_t log_sum, uintptr_t delta, uintptr_t grad_q, uintptr_t grad_k,
                           uintptr_t grad_v, Index<int64_t> start, Index<int32_t> col, Index<int64_t> column_start,
                           Index<int32_t> row) {
  const AttentionCall call = attention_call(dtype, sizes, qkv, spans, softcap, seed, drop_below);
  const BlockLists rows = row_lists(call, start, col);
  const BlockLists columns = block_lists(column_start, row, ceil_div(call.keys, call.block_k));
  require(row.size() == col.size(), "as many blocks in columns as in rows");
  for (size_t i = 0; i < row.size(); ++i) require(row.data()[i] >= 0 && row.data()[i] < rows.count, "rows of blocks");
  nb::gil_scoped_release release;
  attention_backward(isa_named(isa), dtype_named(dtype), call, rows, columns, pointer(grad), pointer(log_sum),
                     pointer(delta), pointer(grad_q), pointer(grad_k), pointer(grad_v));
  trim_scratch();
}

// batch, heads, kv_heads, queries, keys, d, d_v, block_q, block_k, row, left, right
using FewQueriesSizes = std::array<int64_t, 12>;
using Strided = std::pair<uintptr_t, std::array<int64_t, 3>>;  // elements between sequences, heads, tokens

void py_attention_few_queries(const std::string& isa, const std::string& dtype, const FewQueriesSizes& n, uintptr_t q,
                              const Strided& k, const Strided& v, const Spans& spans, double scale, double softcap,
                              uintptr_t y, uintptr_t log_sum, Index<int64_t> start, Index<int32_t> col) {
  check_heads(n[1], n[2]);
  require(n[3] > 0 && n[7] > 0 && n[8] > 0 && n[9] >= 0 && n[4] < int64_t(1) << 31,
          "queries, positive blocks, and fewer than 2^31 keys");
  const SpanRows span(spans, n[0], n[3]);
  const int64_t rows = int64_t(start.size()) - 1, columns = ceil_div(n[4], n[8]);
  require(rows * n[7] >= n[9] + n[3], "a block row for each query");
  const BlockLists lists = block_lists(start, col, rows);
  const int64_t first = start.data()[n[9] / n[7]], end = start.data()[ceil_div(n[9] + n[3], n[7])];
  require(first >= 0 && end <= int64_t(col.size()), "starts within all blocks");
  for (int64_t i = first; i < end; ++i) require(col.data()[i] >= 0 && col.data()[i] < columns, "blocks of keys");
  const FewQueriesCall call{n[0],
                            n[1],
                            n[2],
                            n[3],
                            n[4],
                            n[5],
                            n[6],
                            n[7],
                            n[8],
                            n[9],
                            n[10],
                            n[11],
                            span.first,
                            span.end,
                            spans.second,
                            scale,
                            softcap,
                            pointer(q),
                            pointer(k.first),
                            pointer(v.first),
                            k.second,
                            v.second};
  nb::gil_scoped_release release;
  attention_few_queries(isa_named(isa), dtype_named(dtype), call, lists, pointer(y), pointer(log_sum));
  trim_scratch();
}

const Binding binding([](nb::module_& m) {
  m.def("attention_forward", &py_attention_forward, nb::kw_only(), "isa"_a, "dtype"_a, "sizes"_a, "qkv"_a, "spans"_a,
        "softcap"_a, "seed"_a, "drop_below"_a, "y"_a, "log_sum"_a, "start"_a.noconvert(), "col"_a.noconvert());
  m.def("attention_few_queries", &py_attention_few_queries, nb::kw_only(), "isa"_a, "dtype"_a, "sizes"_a, "q"_a, "k"_a,
        "v"_a, "spans"_a, "scale"_a, "softcap"_a, "y"_a, "log_sum"_a, "start"_a.noconvert(), "col"_a.noconvert());
  m.def("attention_backward", &py_attention_backward, nb::kw_only(), "isa"_a, "dtype"_a, "sizes"_a, "qkv"_a, "spans"_a,
        "softcap"_a, "seed"_a, "drop_below"_a, "grad"_a, "log_sum"_a, "delta"_a, "grad_q"_a, "grad_k"_a, "grad_v"_a,
        "start"_a.noconvert(), "col"_a.noconvert(), "column_start"_a.noconvert(), "row"_a.noconvert());
});

}  // namespace
}  // namespace blocksparse
