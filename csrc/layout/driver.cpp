#include <algorithm>
#include <stdexcept>
#include <vector>

#include "core/parallel.hpp"
#include "core/types.hpp"
#include "layout/layout.hpp"

namespace blocksparse {
namespace {

constexpr int64_t kBlocksPerTask = 1 << 18, kRanksPerTask = 1 << 16;

// Some rows of a layout, and the added keys in them. Their first block will be block `at`.
struct RowRange {
  int64_t begin, end;
  int64_t added, added_end;
  int64_t at;
};

// Cut a layout into ranges of rows, one for each task. `blocks` is the number of blocks after the change.
std::vector<RowRange> cut_rows(const Indices& layout, const bool* drop, const int64_t* added, int64_t added_count,
                               int64_t blocks) {
  const int64_t before = layout.start[layout.rows], count = std::max<int64_t>(1, before / kBlocksPerTask);
  std::vector<RowRange> ranges(count);
  const auto row_at = [&](int64_t range) {
    if (range == count) return layout.rows;
    return int64_t(std::lower_bound(layout.start, layout.start + layout.rows, before * range / count) - layout.start);
  };
  const auto added_before = [&](int64_t row) {
    return int64_t(std::lower_bound(added, added + added_count, row * layout.columns) - added);
  };
  std::vector<int64_t> sizes(count);
  parallel_tasks(count, [&](int64_t i) {
    const int64_t begin = row_at(i), end = row_at(i + 1);
    ranges[i] = {begin, end, added_before(begin), added_before(end), 0};
    sizes[i] =
        std::count(drop + layout.start[begin], drop + layout.start[end], false) + ranges[i].added_end - ranges[i].added;
  });
  int64_t at = 0;
  for (int64_t i = 0; i < count; ++i) ranges[i].at = at, at += sizes[i];
  if (at != blocks) throw std::invalid_argument("the compiled core: expected room for all blocks, and no more");
  return ranges;
}

void write_rows(const Indices& layout, const RowRange& range, const bool* drop, const int64_t* added,
                const NewIndices& to) {
  int64_t next = range.added, at = range.at;
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t first = row * layout.columns;
    to.start[row] = int32_t(at);
    const auto add_below = [&](int64_t key) {
      for (; next < range.added_end && added[next] < key; ++next, ++at) {
        to.col[at] = int32_t(added[next] - first);
        to.source[at] = -1;
      }
    };
    for (int64_t k = layout.start[row]; k < layout.start[row + 1]; ++k) {
      if (drop[k]) continue;
      add_below(first + layout.col[k]);
      to.col[at] = layout.col[k];
      to.source[at++] = k;
    }
    add_below(first + layout.columns);
  }
}

}  // namespace

void kept_keys(const Indices& layout, const bool* drop, int64_t* keys, int64_t count) {
  const std::vector<RowRange> ranges = cut_rows(layout, drop, nullptr, 0, count);
  parallel_tasks(int64_t(ranges.size()), [&](int64_t i) {
    int64_t at = ranges[i].at;
    for (int64_t row = ranges[i].begin; row < ranges[i].end; ++row)
      for (int64_t k = layout.start[row]; k < layout.start[row + 1]; ++k)
        if (!drop[k]) keys[at++] = row * layout.columns + layout.col[k];
  });
}

void free_keys(const int64_t* taken, int64_t taken_count, const int64_t* ranks, int64_t count, int64_t* keys) {
  parallel_tasks(ceil_div(count, kRanksPerTask), [&](int64_t task) {
    const int64_t begin = task * kRanksPerTask, end = std::min(begin + kRanksPerTask, count);
    // taken[i] - i free keys come before taken[i].
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
      keys[k] = ranks[k] + low;
    }
  });
}

void replace_blocks(const Indices& layout, const bool* drop, const int64_t* added, int64_t added_count,
                    const NewIndices& to) {
  const std::vector<RowRange> ranges = cut_rows(layout, drop, added, added_count, to.blocks);
  parallel_tasks(int64_t(ranges.size()), [&](int64_t i) { write_rows(layout, ranges[i], drop, added, to); });
  to.start[layout.rows] = int32_t(to.blocks);
}

}  // namespace blocksparse
