#include <algorithm>
#include <stdexcept>
#include <vector>

#include "core/parallel.hpp"
#include "core/types.hpp"
#include "layout/layout.hpp"

namespace blocksparse {
namespace {

constexpr int64_t kRanks = 1 << 16;   // ranks that a task looks up
constexpr int64_t kBlocks = 1 << 18;  // old blocks that a task copies

// Some rows of a layout, and what becomes of their blocks.
struct Part {
  int64_t row, end;          // rows
  int64_t added, added_end;  // the added places in these rows
  int64_t blocks;            // blocks after the change
};

Part part_of(const Indices& layout, int64_t index, int64_t parts, const bool* drop, const int64_t* added,
             int64_t added_count) {
  const int64_t blocks = layout.start[layout.rows];
  const auto row_at = [&](int64_t part) {
    if (part == parts) return layout.rows;
    return int64_t(std::lower_bound(layout.start, layout.start + layout.rows, blocks * part / parts) - layout.start);
  };
  const auto added_before = [&](int64_t row) {
    return int64_t(std::lower_bound(added, added + added_count, row * layout.columns) - added);
  };
  const int64_t row = row_at(index), end = row_at(index + 1), first = added_before(row), last = added_before(end);
  const int64_t kept = std::count(drop + layout.start[row], drop + layout.start[end], false);
  return {row, end, first, last, kept + last - first};
}

// Write the rows of a part, whose blocks begin at `at`.
void write_part(const Indices& layout, const Part& part, const bool* drop, const int64_t* added, int64_t at,
                const NewIndices& to) {
  int64_t next = part.added;
  for (int64_t row = part.row; row < part.end; ++row) {
    const int64_t first = row * layout.columns;
    to.start[row] = int32_t(at);
    const auto add_before = [&](int64_t place) {
      for (; next < part.added_end && added[next] < place; ++next, ++at) {
        to.col[at] = int32_t(added[next] - first);
        to.source[at] = -1;
      }
    };
    for (int64_t k = layout.start[row]; k < layout.start[row + 1]; ++k) {
      if (drop[k]) continue;
      add_before(first + layout.col[k]);
      to.col[at] = layout.col[k];
      to.source[at++] = k;
    }
    add_before(first + layout.columns);
  }
}

// The parts of a layout, and the new position of the first block of each; `blocks` are all blocks after the change.
struct Parts {
  std::vector<Part> parts;
  std::vector<int64_t> at;
  Parts(const Indices& layout, const bool* drop, const int64_t* added, int64_t added_count, int64_t blocks)
      : parts(std::max<int64_t>(1, layout.start[layout.rows] / kBlocks)), at(parts.size() + 1) {
    const int64_t count = int64_t(parts.size());
    parallel_tasks(count, [&](int64_t i) { parts[i] = part_of(layout, i, count, drop, added, added_count); });
    for (int64_t i = 0; i < count; ++i) at[i + 1] = at[i] + parts[i].blocks;
    if (at[count] != blocks) throw std::invalid_argument("the compiled core: expected added places in the grid");
  }
};

}  // namespace

void kept_places(const Indices& layout, const bool* drop, int64_t* places, int64_t count) {
  const Parts all(layout, drop, nullptr, 0, count);
  parallel_tasks(int64_t(all.parts.size()), [&](int64_t i) {
    int64_t at = all.at[i];
    for (int64_t row = all.parts[i].row; row < all.parts[i].end; ++row)
      for (int64_t k = layout.start[row]; k < layout.start[row + 1]; ++k)
        if (!drop[k]) places[at++] = row * layout.columns + layout.col[k];
  });
}

void free_places(const int64_t* taken, int64_t taken_count, const int64_t* ranks, int64_t count, int64_t* places) {
  parallel_tasks(ceil_div(count, kRanks), [&](int64_t task) {
    const int64_t begin = task * kRanks, end = std::min(begin + kRanks, count);
    // taken[i] - i free places come before taken[i].
    int64_t low = 0, high = taken_count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (taken[middle] - middle <= ranks[begin])
        low = middle + 1;
      else
        high = middle;
    }
    for (int64_t k = begin; k < end; ++k) {
      while (low < taken_count && taken[low] - low <= ranks[k]) ++low;
      places[k] = ranks[k] + low;
    }
  });
}

void replace_blocks(const Indices& layout, const bool* drop, const int64_t* added, int64_t added_count,
                    const NewIndices& to) {
  const Parts all(layout, drop, added, added_count, to.blocks);
  parallel_tasks(int64_t(all.parts.size()),
                 [&](int64_t i) { write_part(layout, all.parts[i], drop, added, all.at[i], to); });
  to.start[layout.rows] = int32_t(to.blocks);
}

}  // namespace blocksparse
