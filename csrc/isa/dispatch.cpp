#include "isa/dispatch.hpp"

#include <stdexcept>

#include "isa/cpu_features.hpp"

namespace blocksparse {
namespace {

template <bool CpuFeatures::* feature>
bool has() {
  return cpu_features().*feature;
}

// Those that CMake compiles in, with their index in BLOCKSPARSE_BY_SET.
const InstructionSet kInstructionSets[] = {
#if defined(BLOCKSPARSE_HAS_portable)
    {"portable", has<&CpuFeatures::portable>, false, 0},
#endif
#if defined(BLOCKSPARSE_HAS_avx2)
    {"avx2", has<&CpuFeatures::avx2>, false, 1},
#endif
#if defined(BLOCKSPARSE_EMULATED_VECTORS)
    {"avx512_emulated", has<&CpuFeatures::avx2>, true, 2},
    {"avx512_bf16_emulated", has<&CpuFeatures::avx2>, true, 5},
    {"amx_emulated", has<&CpuFeatures::avx2>, true, 6},
#elif defined(BLOCKSPARSE_HAS_avx512)
    {"avx512", has<&CpuFeatures::avx512>, false, 2},
#endif
#if defined(BLOCKSPARSE_HAS_avx512_bf16)
    {"avx512_bf16", has<&CpuFeatures::avx512_bf16>, false, 3},
#endif
#if defined(BLOCKSPARSE_HAS_amx)
    {"amx", has<&CpuFeatures::amx_bf16>, false, 4},
#endif
#if defined(BLOCKSPARSE_HAS_amx_emulated) && !defined(BLOCKSPARSE_EMULATED_VECTORS)
    {"avx512_bf16_emulated", has<&CpuFeatures::avx512>, true, 5},
    {"amx_emulated", has<&CpuFeatures::avx512>, true, 6},
#endif
};

}  // namespace

std::vector<std::pair<std::string, bool>> isas() {
  std::vector<std::pair<std::string, bool>> sets;
  for (const InstructionSet& isa : kInstructionSets) sets.emplace_back(isa.name, isa.present());
  return sets;
}

const InstructionSet& isa_named(const std::string& name) {
  for (const InstructionSet& isa : kInstructionSets)
    if (name == isa.name && isa.present()) return isa;
  throw std::invalid_argument("no instruction set " + name + " here");
}

}  // namespace blocksparse
