// Names of enumerated values, and checks of arguments.
#pragma once

#include <array>
#include <stdexcept>
#include <string>

#include "core/types.hpp"

namespace blocksparse {

template <class Enum, size_t n>
Enum named(const std::array<const char*, n>& names, const std::string& name) {
  for (size_t i = 0; i < n; ++i)
    if (name == names[i]) return static_cast<Enum>(i);
  throw std::invalid_argument("unknown name " + name);
}

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("the compiled core: expected ") + what);
}

inline DType dtype_named(const std::string& name) {
  return named<DType>(std::array{"float32", "float64", "bfloat16", "float16"}, name);
}

inline Activation activation_named(const std::string& name) {
  return named<Activation>(std::array{"none", "relu", "gelu", "silu"}, name);
}

}  // namespace blocksparse
