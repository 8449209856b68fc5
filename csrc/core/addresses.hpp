// Arithmetic on sizes and addresses. Functions are static, so that each instruction set has a copy of its own.
#pragma once

#include <stdint.h>

namespace blocksparse {

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Advance a pointer; null stays null.
static inline char* advance(void* p, int64_t bytes) { return p ? static_cast<char*>(p) + bytes : nullptr; }
static inline const char* advance(const void* p, int64_t bytes) {
  return p ? static_cast<const char*>(p) + bytes : nullptr;
}

}  // namespace blocksparse
