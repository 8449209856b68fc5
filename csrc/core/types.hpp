// Types that all ops share: element types, activations, rows in memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace blocksparse {

struct InstructionSet;  // see isa/dispatch.hpp

enum class DType { kFloat32, kFloat64, kBFloat16, kFloat16 };
// Bytes of a number in memory, and of a sum.
static inline int64_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }
static inline int64_t size_of_sum(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }
enum class Activation { kNone, kRelu, kGelu, kSilu };

// Rows of features that lie side by side, the rows `stride` numbers apart; null where there is none.
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

// Numbers of a part of an elementwise loop, some microseconds of work; a multiple of every vector. Each part of a
// dropout has random numbers of its own, so that the results are the same for any number of threads and any instruction
// set.
constexpr int64_t kPartNumbers = 4096;

}  // namespace blocksparse
