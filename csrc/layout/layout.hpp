// The index arrays of a layout that loses some of its blocks and gets others. Places are row * columns + column.
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

// Write the places of the blocks where `drop` is false.
void kept_places(const Indices& layout, const bool* drop, int64_t* places, int64_t count);

// Write the places with the given ranks among those that are not taken. Taken places, ranks and results rise.
void free_places(const int64_t* taken, int64_t taken_count, const int64_t* ranks, int64_t count, int64_t* places);

// Write the layout without the blocks where `drop` is true, and with blocks at the `added` places, which rise.
void replace_blocks(const Indices& layout, const bool* drop, const int64_t* added, int64_t added_count,
                    const NewIndices& to);

}  // namespace blocksparse
