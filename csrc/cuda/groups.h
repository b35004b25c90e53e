// Groups of a row-major matrix as in ops/states.py: `group` elements each, restarting at every segment of a row. Rows
// have whole segments, so group `index` is in segment index / per_segment of the matrix.
#pragma once

#include "cuda/launch.h"
#include "numerics/expansion.h"

namespace lowprec {

struct Groups {
  int64_t length;       // elements of a segment
  int64_t group;        // elements of a group; the last one of a segment may be shorter
  int64_t per_segment;  // groups of a segment
  int64_t count;        // groups of the matrix
};

inline Groups groups_of(int64_t rows, int64_t columns, int64_t group, int64_t segments) {
  STD_TORCH_CHECK(group >= 1 && segments >= 1 && columns % segments == 0, segments, " segments of groups of ", group,
                  " do not fit a row of ", columns);
  const int64_t length = columns / segments;
  const int64_t per_segment = ceil_div(length, group);
  return {length, group, per_segment, rows * segments * per_segment};
}

#if defined(__CUDACC__)

struct Place {
  int64_t start;  // index of the first element in the matrix
  int64_t count;
};

__device__ __forceinline__ Place place_of(const Groups& groups, int64_t index) {
  const int64_t segment = index / groups.per_segment, offset = (index - segment * groups.per_segment) * groups.group;
  return {segment * groups.length + offset, min(groups.group, groups.length - offset)};
}

// Extremes of a group, updated with one magnitude at a time.
struct Extremes {
  uint32_t largest = 0, smallest = INFINITE;

  __device__ __forceinline__ void add(float x) {
    const uint32_t bits = magnitude_bits(x);
    largest = max(largest, bits);
    if (bits >= SMALLEST_NORMAL) smallest = min(smallest, bits);
  }
  __device__ __forceinline__ void over_warp() {
    largest = __reduce_max_sync(0xffffffffu, largest);
    smallest = __reduce_min_sync(0xffffffffu, smallest);
  }
};

#endif

}  // namespace lowprec
