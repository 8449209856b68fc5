// Types that all ops share: element types, activations, rows in memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/addresses.hpp"

namespace blocksparse {

struct InstructionSet;  // see isa/dispatch.hpp

enum class DType { kFloat32, kFloat64, kBFloat16, kFloat16 };
// Bytes of a stored element, and of a sum.
static inline int64_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }
static inline int64_t size_of_sum(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }
enum class Activation { kNone, kRelu, kGelu, kSilu };

// Rows of contiguous features, `stride` elements apart; `data` is null for absent rows.
struct InputRows {
  const void* data;
  int64_t stride;
  const int64_t* index = nullptr;  // the number of each row, if they do not follow each other
};
struct OutputRows {
  void* data;
  int64_t stride;
};
struct RowsPart {
  int64_t first_row, last_row, begin, end;  // features [begin, end)
};

constexpr int64_t kCacheLine = 64;  // bytes
constexpr int64_t kTileSize = 16;   // rows, and 4-byte columns, of an AMX tile

// Elements per part of an elementwise loop: a few microseconds of work, and a multiple of every vector. Each part of a
// dropout seeds its own random numbers, so that results do not depend on the number of threads or the instruction set.
constexpr int64_t kPartNumbers = 4096;

}  // namespace blocksparse
