// The features of this CPU, detected once.
#pragma once

#include <string>
#include <vector>

namespace blocksparse {

struct CpuFeatures {
  bool portable = true;
  bool avx2 = false;         // with FMA and F16C
  bool avx512 = false;       // F, BW, DQ, VL
  bool avx512_vnni = false;  // on top of avx512
  bool avx512_bf16 = false;  // on top of avx512
  bool amx_bf16 = false;     // with AMX int8, on top of avx512_bf16 and avx512_vnni, if the system grants the tiles
};

const CpuFeatures& cpu_features();
std::vector<std::string> cpu_feature_names();

}  // namespace blocksparse
