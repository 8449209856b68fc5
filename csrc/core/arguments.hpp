// Arguments from Python: names, addresses, and index arrays whose lengths are checked against each other.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <utility>

#include "core/names.hpp"
#include "core/types.hpp"

namespace nb = nanobind;

namespace blocksparse {

template <class T>
using Index = nb::ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
using NewArray = nb::ndarray<T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
bool rises(const Index<T>& index) {
  return std::is_sorted(index.data(), index.data() + index.size());
}

// Check that `start` holds `count` starts, which rise, and the end, `total`.
template <class T>
void require_starts(const Index<T>& start, int64_t count, size_t total, const char* what) {
  require(count >= 0 && int64_t(start.size()) == count + 1 && start.data()[0] == 0 &&
              start.data()[count] == int64_t(total) && rises(start),
          what);
}

inline void require_tasks(const Index<int64_t>& task_start, size_t total) {
  require_starts(task_start, int64_t(task_start.size()) - 1, total, "task_start to rise from 0 to all pieces");
}

inline int64_t blocks_in(int64_t features, int64_t block) {
  require(block > 0 && features >= 0 && features % block == 0, "features in whole blocks");
  return features / block;
}

inline void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// The address of row 0 (0 for none), and the distance between rows in elements.
using PyRows = std::pair<uintptr_t, int64_t>;
inline InputRows input(const PyRows& rows) { return {pointer(rows.first), rows.second}; }
inline OutputRows output(const PyRows& rows) { return {pointer(rows.first), rows.second}; }

}  // namespace blocksparse
