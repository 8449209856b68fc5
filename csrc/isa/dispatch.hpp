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

// Linking decides which sets are there, so that drivers need not be compiled again for another choice of sets: a weak
// symbol that is not linked has the address null. Mach-O has no such symbols; macOS on x86-64 has no PyTorch that we
// support, so that the portable kernels are all that it needs.
#if defined(__ELF__) && defined(__x86_64__)
#define BLOCKSPARSE_X86_SETS
#define BLOCKSPARSE_X86(...) __VA_ARGS__
#else
#define BLOCKSPARSE_X86(...)
#endif
#if defined(__ELF__)
#define BLOCKSPARSE_WEAK __attribute__((weak, visibility("hidden")))
#else
#define BLOCKSPARSE_WEAK
#endif

// `declaration` in the namespace of each set.
#define BLOCKSPARSE_IN_SET(set, declaration) \
  namespace set {                            \
  BLOCKSPARSE_WEAK declaration;              \
  }
#define BLOCKSPARSE_IN_EACH_SET(declaration)                                                                         \
  BLOCKSPARSE_IN_SET(portable, declaration)                                                                          \
  BLOCKSPARSE_X86(BLOCKSPARSE_IN_SET(avx2, declaration) BLOCKSPARSE_IN_SET(avx512, declaration)                      \
                      BLOCKSPARSE_IN_SET(avx512_vnni, declaration) BLOCKSPARSE_IN_SET(avx512_bf16, declaration)      \
                          BLOCKSPARSE_IN_SET(amx, declaration) BLOCKSPARSE_IN_SET(avx512_bf16_emulated, declaration) \
                              BLOCKSPARSE_IN_SET(amx_emulated, declaration))

// `select` of each set, for ops that have kernels of their own for pairs of bfloat16.
#define BLOCKSPARSE_BY_SET(select)                                                                   \
  portable::select BLOCKSPARSE_X86(, avx2::select, avx512::select, avx512_bf16::select, amx::select, \
                                   avx512_bf16_emulated::select, amx_emulated::select)

// The same for all other ops: sets that differ from AVX-512 in pairs of bfloat16 only use the kernels of AVX-512.
#define BLOCKSPARSE_BY_VECTORS(select)                                                                             \
  portable::select BLOCKSPARSE_X86(, avx2::select, avx512::select, avx512::select, avx512::select, avx512::select, \
                                   avx512::select)

// The same for ops that have kernels on tiles, but none for pairs.
#define BLOCKSPARSE_BY_TILES(select)                                                                            \
  portable::select BLOCKSPARSE_X86(, avx2::select, avx512::select, avx512::select, amx::select, avx512::select, \
                                   amx_emulated::select)

}  // namespace blocksparse
