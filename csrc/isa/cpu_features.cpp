#include "isa/cpu_features.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace blocksparse {
namespace {

#if defined(__x86_64__)
bool system_grants_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

CpuFeatures detect() {
  CpuFeatures found;
  __builtin_cpu_init();
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  unsigned a, b, c, d;
  if (found.avx2 && __get_cpuid(1, &a, &b, &c, &d)) found.avx2 = c >> 29 & 1;  // F16C
  found.avx512 = found.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (found.avx512 && __get_cpuid_count(7, 0, &a, &b, &c, &d)) found.avx512_vnni = c >> 11 & 1;
  if (found.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx512_bf16 = a >> 5 & 1;
  if (found.avx512_bf16 && __get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    const bool amx_bf16 = d >> 22 & 1, amx_tile = d >> 24 & 1, amx_int8 = d >> 25 & 1;
    found.amx_bf16 = amx_bf16 && amx_tile && amx_int8 && found.avx512_vnni && system_grants_tiles();
  }
  return found;
}
#else
CpuFeatures detect() { return {}; }
#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

std::vector<std::string> cpu_feature_names() {
  const CpuFeatures& has = cpu_features();
  std::vector<std::string> names;
  if (has.avx2) names.insert(names.end(), {"avx2", "fma", "f16c"});
  if (has.avx512) names.insert(names.end(), {"avx512f", "avx512bw", "avx512dq", "avx512vl"});
  if (has.avx512_vnni) names.push_back("avx512_vnni");
  if (has.avx512_bf16) names.push_back("avx512_bf16");
  if (has.amx_bf16) names.insert(names.end(), {"amx_tile", "amx_bf16", "amx_int8"});
#if defined(__aarch64__)
  names.push_back("neon");
#endif
  return names;
}

}  // namespace blocksparse
