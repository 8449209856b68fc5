// The index arrays of a layout that loses some of its blocks and gets others. The key of a block is row * columns +
// column; keys rise.
#pragma once

#include <stdint.h>

namespace blocksparse {

struct Indices {
  const int32_t* start;  // [rows + 1]
  const int32_t* col;    // [blocks]
  int64_t rows, columns;
};

struct NewIndices {
  int32_t* start;  // [rows + 1]
  int32_t* col;
  int64_t* source;  // the old position of each block, -1 for those that were added
  int64_t blocks;
};

// Write the keys of the blocks where `drop` is false.
void kept_keys(const Indices& layout, const bool* drop, int64_t* keys, int64_t count);

// Write the keys with the given ranks among those that are not taken. Ranks rise too.
void free_keys(const int64_t* taken, int64_t taken_count, const int64_t* ranks, int64_t count, int64_t* keys);

// Write the layout without the blocks where `drop` is true, and with blocks of the `added` keys.
void replace_blocks(const Indices& layout, const bool* drop, const int64_t* added, int64_t added_count,
                    const NewIndices& to);

}  // namespace blocksparse
