// A call names an instruction set; here is its table of kernels. (BLOCKSPARSE_ISA and the default: ops/cpu_core.py.)
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace blocksparse {

// Slowest first, and whether this CPU has it: the last one present is the default, apart from the emulated ones.
std::vector<std::pair<std::string, bool>> isas();

// Throws std::invalid_argument where there is none of the name, or this CPU does not have it.
const InstructionSet& isa_named(const std::string& name);

}  // namespace blocksparse
