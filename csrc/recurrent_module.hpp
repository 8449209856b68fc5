// The part of the module blocksparse._core that runs recurrences.
#pragma once

#include <nanobind/nanobind.h>

namespace blocksparse {

void add_recurrences(nanobind::module_& m);

}  // namespace blocksparse
