// How an op adds its functions to the Python module blocksparse._core.
#pragma once

#include <nanobind/nanobind.h>

namespace blocksparse {

// A global object of this class in `<op>/binding.cpp` calls `add(module)` when Python imports the module.
class Binding {
 public:
  explicit Binding(void (*add)(nanobind::module_&));
};

}  // namespace blocksparse
