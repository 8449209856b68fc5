#include "core/arguments.hpp"
#include "core/bindings.hpp"
#include "layout/layout.hpp"

using namespace nb::literals;

namespace blocksparse {
namespace {

void py_free_keys(const Index<int64_t>& taken, const Index<int64_t>& ranks, const NewArray<int64_t>& keys) {
  require(keys.size() == ranks.size(), "a key for each rank");
  nb::gil_scoped_release release;
  free_keys(taken.data(), int64_t(taken.size()), ranks.data(), int64_t(ranks.size()), keys.data());
}

Indices checked_indices(const Index<int32_t>& start, const Index<int32_t>& col, int64_t columns,
                        const Index<bool>& drop) {
  const int64_t rows = int64_t(start.size()) - 1;
  require_starts(start, rows, col.size(), "starts that rise from 0 to all blocks");
  require(drop.size() == col.size(), "a bool for each block");
  return {start.data(), col.data(), rows, columns};
}

void py_kept_keys(const Index<int32_t>& start, const Index<int32_t>& col, int64_t columns, const Index<bool>& drop,
                  const NewArray<int64_t>& keys) {
  const Indices layout = checked_indices(start, col, columns, drop);
  nb::gil_scoped_release release;
  kept_keys(layout, drop.data(), keys.data(), int64_t(keys.size()));
}

void py_replace_blocks(const Index<int32_t>& start, const Index<int32_t>& col, int64_t columns, const Index<bool>& drop,
                       const Index<int64_t>& added, const NewArray<int32_t>& to_start, const NewArray<int32_t>& to_col,
                       const NewArray<int64_t>& source) {
  const Indices layout = checked_indices(start, col, columns, drop);
  require(to_start.size() == start.size() && source.size() == to_col.size(), "new arrays of one length");
  require(rises(added) &&
              (added.size() == 0 || (added.data()[0] >= 0 && added.data()[added.size() - 1] < layout.rows * columns)),
          "added keys of the grid that rise");
  const NewIndices to{to_start.data(), to_col.data(), source.data(), int64_t(to_col.size())};
  nb::gil_scoped_release release;
  replace_blocks(layout, drop.data(), added.data(), int64_t(added.size()), to);
}

const Binding binding([](nb::module_& m) {
  m.def("free_keys", &py_free_keys, nb::kw_only(), "taken"_a.noconvert(), "ranks"_a.noconvert(), "keys"_a.noconvert());
  m.def("kept_keys", &py_kept_keys, nb::kw_only(), "start"_a.noconvert(), "col"_a.noconvert(), "columns"_a,
        "drop"_a.noconvert(), "keys"_a.noconvert());
  m.def("replace_blocks", &py_replace_blocks, nb::kw_only(), "start"_a.noconvert(), "col"_a.noconvert(), "columns"_a,
        "drop"_a.noconvert(), "added"_a.noconvert(), "to_start"_a.noconvert(), "to_col"_a.noconvert(),
        "source"_a.noconvert());
});

}  // namespace
}  // namespace blocksparse
