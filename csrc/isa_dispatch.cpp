// The instruction sets that were compiled in, and which of them this CPU has.
#include "isa_dispatch.hpp"

#include <stdexcept>

#include "cpu_features.hpp"

namespace blocksparse {

#define BLOCKSPARSE_DECLARE(isa)                                      \
  namespace isa {                                                     \
  const LinearKernels& select_linear(DType dtype, int64_t block_sum); \
  const CsrKernels& select_csr(DType dtype);                          \
  const ConvKernels& select_conv(DType dtype, int64_t block_sum);     \
  const GatesKernels& select_gates(DType dtype);                      \
  const NormKernels& select_norm(DType dtype);                        \
  const ElementwiseKernels& select_elementwise(DType dtype);          \
  const Int8Kernels& select_int8(DType dtype);                        \
  const AttentionKernels& select_attention(DType dtype);              \
  }
BLOCKSPARSE_DECLARE(portable)
BLOCKSPARSE_DECLARE(avx2)
BLOCKSPARSE_DECLARE(avx512)
BLOCKSPARSE_DECLARE(avx512_vnni)
BLOCKSPARSE_DECLARE(avx512_bf16)
BLOCKSPARSE_DECLARE(amx)
BLOCKSPARSE_DECLARE(avx512_bf16_emulated)
BLOCKSPARSE_DECLARE(amx_emulated)
#undef BLOCKSPARSE_DECLARE

namespace {

// `base` is the set without pairs of bfloat16: everything but the products is the same.
#define BLOCKSPARSE_SET(isa, feature, base, int8) \
  {#isa,                                          \
   [] { return cpu_features().feature; },         \
   isa::select_linear,                            \
   base::select_csr,                              \
   isa::select_conv,                              \
   base::select_gates,                            \
   base::select_norm,                             \
   base::select_elementwise,                      \
   int8,                                          \
   base::select_attention}

#if defined(BLOCKSPARSE_HAS_avx2)
// CPUs with AVX-512 multiply 8-bit numbers in one instruction, or in several.
const Int8Kernels& select_int8_of_avx512(DType dtype) {
  return cpu_features().avx512_vnni ? avx512_vnni::select_int8(dtype) : avx512::select_int8(dtype);
}
#endif

// Slowest first: the last one present is the default, apart from the emulated ones.
const InstructionSet kInstructionSets[] = {
    BLOCKSPARSE_SET(portable, portable, portable, portable::select_int8),
#if defined(BLOCKSPARSE_HAS_avx2)
    BLOCKSPARSE_SET(avx2, avx2, avx2, avx2::select_int8),
    BLOCKSPARSE_SET(avx512, avx512, avx512, select_int8_of_avx512),
    BLOCKSPARSE_SET(avx512_bf16, avx512_bf16, avx512, select_int8_of_avx512),
    BLOCKSPARSE_SET(amx, amx_bf16, avx512, select_int8_of_avx512),
#endif
#if defined(BLOCKSPARSE_HAS_amx_emulated)
    BLOCKSPARSE_SET(avx512_bf16_emulated, avx512, avx512, avx512::select_int8),
    BLOCKSPARSE_SET(amx_emulated, avx512, avx512, avx512::select_int8),
#endif
};
#undef BLOCKSPARSE_SET

}  // namespace

std::vector<std::pair<std::string, bool>> isas() {
  std::vector<std::pair<std::string, bool>> found;
  for (const InstructionSet& isa : kInstructionSets) found.emplace_back(isa.name, isa.present());
  return found;
}

const InstructionSet& isa_named(const std::string& name) {
  for (const InstructionSet& isa : kInstructionSets)
    if (name == isa.name && isa.present()) return isa;
  throw std::invalid_argument("no instruction set " + name + " here");
}

}  // namespace blocksparse
