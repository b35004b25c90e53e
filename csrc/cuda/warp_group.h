// A group of warps that shares one row: sums, amax and offsets in a list, in every thread of the group. One warp needs
// no barrier; several write their values to slots, which alternate, so that one barrier per exchange is enough.
#pragma once

#include "cuda/launch.h"
#include "numerics/selection.h"

namespace lowprec {

#if defined(__CUDACC__)

constexpr uint32_t ALL = 0xffffffffu;

// `warps` warps; if several, they are a whole block.
template <int warps>
struct WarpGroup {
  static constexpr int size = 32 * warps;
  uint32_t* slots;  // [2][warps], shared
  int turn;

  __device__ explicit WarpGroup(uint32_t* shared) : slots(shared), turn(0) {}
  __device__ static int rank() { return warps == 1 ? threadIdx.x & 31 : threadIdx.x; }
  __device__ static void barrier() {
    if constexpr (warps == 1) __syncwarp();
    else __syncthreads();
  }
  // Returns the values of all warps, in every thread.
  __device__ const uint32_t* exchange(uint32_t of_warp) {
    uint32_t* mine = slots + turn * warps;
    turn ^= 1;
    if ((threadIdx.x & 31) == 0) mine[threadIdx.x >> 5] = of_warp;
    __syncthreads();
    return mine;
  }
  __device__ uint32_t sum(uint32_t value) {
    value = __reduce_add_sync(ALL, value);
    if constexpr (warps > 1) {
      const uint32_t* each = exchange(value);
      value = 0;
#pragma unroll
      for (int i = 0; i < warps; ++i) value += each[i];
    }
    return value;
  }
  __device__ uint32_t largest(uint32_t value) {
    value = __reduce_max_sync(ALL, value);
    if constexpr (warps > 1) {
      const uint32_t* each = exchange(value);
#pragma unroll
      for (int i = 0; i < warps; ++i) value = larger(value, each[i]);
    }
    return value;
  }
  // Returns the offset of a thread's `count` entries in a list of the group, and its length in `total`.
  __device__ uint32_t place(uint32_t count, uint32_t& total) {
    const int lane = threadIdx.x & 31;
    uint32_t until = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const uint32_t other = __shfl_up_sync(ALL, until, offset);
      if (lane >= offset) until += other;
    }
    total = __shfl_sync(ALL, until, 31);
    uint32_t before = 0;
    if constexpr (warps > 1) {
      const uint32_t* each = exchange(total);
      total = 0;
#pragma unroll
      for (int i = 0; i < warps; ++i) {
        if (i < static_cast<int>(threadIdx.x >> 5)) before += each[i];
        total += each[i];
      }
    }
    return before + until - count;
  }
};

// Keys of both bounds by counting over the whole row. keys(f): calls f with the key of each of this thread's values;
// `top`, `bottom`: largest and smallest key of the row.
template <typename Row, typename Keys>
__device__ __forceinline__ uint2 ranks_of_all(Row& group, uint32_t clipped, uint32_t top, uint32_t bottom,
                                              const Keys& keys) {
  const int first = 31 - __clz(static_cast<int>(top - bottom));  // -1: all are equal
  const uint32_t high = descend_wide(first, clipped, [&](uint32_t limit) {
    uint32_t count = 0;
    keys([&](uint32_t key) { count += top - key < limit; });
    return group.sum(count);
  });
  const uint32_t low = descend_wide(first, clipped, [&](uint32_t limit) {
    uint32_t count = 0;
    keys([&](uint32_t key) { count += key - bottom < limit; });
    return group.sum(count);
  });
  return make_uint2(bottom + low, top - high);
}

#endif

}  // namespace lowprec
