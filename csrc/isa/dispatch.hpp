// The instruction sets that were compiled in, and how a driver finds an op's kernels for one of them.
//
// `<op>/kernels.cpp` is compiled once per instruction set, each time within a namespace of that set's name, and defines
// a function `select_<op>` there that returns the op's table of kernels. `<op>/driver.cpp` declares it for all sets
// with BLOCKSPARSE_IN_EACH_SET, and lists it by InstructionSet::index with BLOCKSPARSE_BY_SET or
// BLOCKSPARSE_BY_VECTORS.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/types.hpp"

namespace blocksparse {

struct InstructionSet {
  const char* name;
  bool (*present)();  // on this CPU
  bool emulated;      // a test's stand-in for hardware that this CPU may not have
  int index;
};

// Name and presence of each set, slowest first: the last one present is the default, apart from the emulated ones.
std::vector<std::pair<std::string, bool>> isas();

// Throws std::invalid_argument for a name that was not compiled in, or that this CPU does not have.
const InstructionSet& isa_named(const std::string& name);

// `declaration` in the namespace of each set.
#define BLOCKSPARSE_IN_EACH_SET(declaration) \
  namespace portable {                       \
  declaration;                               \
  }                                          \
  namespace avx2 {                           \
  declaration;                               \
  }                                          \
  namespace avx512 {                         \
  declaration;                               \
  }                                          \
  namespace avx512_vnni {                    \
  declaration;                               \
  }                                          \
  namespace avx512_bf16 {                    \
  declaration;                               \
  }                                          \
  namespace amx {                            \
  declaration;                               \
  }                                          \
  namespace avx512_bf16_emulated {           \
  declaration;                               \
  }                                          \
  namespace amx_emulated {                   \
  declaration;                               \
  }

#if defined(BLOCKSPARSE_HAS_avx2)
#define BLOCKSPARSE_X86(...) , __VA_ARGS__
#else
#define BLOCKSPARSE_X86(...)
#endif
#if defined(BLOCKSPARSE_HAS_amx_emulated)
#define BLOCKSPARSE_EMULATED(...) , __VA_ARGS__
#else
#define BLOCKSPARSE_EMULATED(...)
#endif

// `select` of each set, for ops that have kernels of their own for pairs of bfloat16.
#define BLOCKSPARSE_BY_SET(select)                                                                 \
  portable::select BLOCKSPARSE_X86(avx2::select, avx512::select, avx512_bf16::select, amx::select) \
      BLOCKSPARSE_EMULATED(avx512_bf16_emulated::select, amx_emulated::select)

// The same for all other ops: sets that differ from AVX-512 in pairs of bfloat16 only use the kernels of AVX-512.
#define BLOCKSPARSE_BY_VECTORS(select)                                                           \
  portable::select BLOCKSPARSE_X86(avx2::select, avx512::select, avx512::select, avx512::select) \
      BLOCKSPARSE_EMULATED(avx512::select, avx512::select)

}  // namespace blocksparse
