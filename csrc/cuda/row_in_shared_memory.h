// Bounds of a row of 16-bit floats in shared memory, by a group of warps. Only few values can be bounds:
//
//   1  compute maximum and minimum of clusters of 8 to 24 elements, packed two at a time
//   2  clipped + 1 clusters have at least the (clipped + 1)-th largest cluster maximum, so the bound is at least that;
//      a bitwise search over eight words per thread finds it to an eighth of a binade, for both ends at once
//      (numerics/selection.h)
//   3  write the values beyond these limits, 2 to 4 % of a row, to a list
//   4  search the list, to the last bit
//
// A histogram would be slow: a row's values are in a few binades, whose shared atomics would serialise. Rows for which
// the limits fail (too few clusters, a long list of equal values) are counted as a whole for each bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/warp_group.h"
#include "cuda/vectors.h"

namespace lowprec {

#if defined(__CUDACC__)

constexpr int CLUSTERS = 8;  // per thread
constexpr int LISTED = 8;    // entries per thread in the list of candidates

// --- pairs of 16-bit floats in a word --------------------------------------------------------------------------------

template <typename In>
struct Pairs;
template <>
struct Pairs<Bf16> {
  using Pair = __nv_bfloat162;
  static constexpr int mantissa = 7;
  static constexpr uint32_t infinity = 0x7f80u;
  __device__ static __forceinline__ float low(uint32_t w) { return bits_float(w << 16); }
  __device__ static __forceinline__ float high(uint32_t w) { return bits_float(w & 0xffff0000u); }
};
template <>
struct Pairs<Fp16> {
  using Pair = __half2;
  static constexpr int mantissa = 10;
  static constexpr uint32_t infinity = 0x7c00u;
  __device__ static __forceinline__ float low(uint32_t w) { return __half2float(__ushort_as_half(w & 0xffffu)); }
  __device__ static __forceinline__ float high(uint32_t w) { return __half2float(__ushort_as_half(w >> 16)); }
};

template <typename To, typename From>
__device__ __forceinline__ To cast_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename In>
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
  using Pair = typename Pairs<In>::Pair;
  return cast_bits<uint32_t>(__hmax2_nan(cast_bits<Pair>(a), cast_bits<Pair>(b)));
}
template <typename In>
__device__ __forceinline__ uint32_t min_pair(uint32_t a, uint32_t b) {
  using Pair = typename Pairs<In>::Pair;
  return cast_bits<uint32_t>(__hmin2_nan(cast_bits<Pair>(a), cast_bits<Pair>(b)));
}
// All ones in the halves of w that are >= `high` or <= `low`.
template <typename In>
__device__ __forceinline__ uint32_t beyond(uint32_t w, uint32_t low, uint32_t high) {
  using Pair = typename Pairs<In>::Pair;
  return __hge2_mask(cast_bits<Pair>(w), cast_bits<Pair>(high)) | __hle2_mask(cast_bits<Pair>(w), cast_bits<Pair>(low));
}

struct Bounds {
  float low, high, amax;
  bool finite;  // all values of the row are finite
};

__device__ __forceinline__ Bounds no_bounds() {
  const float nan = bits_float(0x7fc00000u);
  return {nan, nan, nan, false};
}

// --- rows of 16-bit floats in shared memory --------------------------------------------------------------------------

// `depth` vectors of 8 form a cluster; vector i of a thread is vector rank + i * group size of the row. A thread only
// reads what it wrote itself, so the row needs no barrier.
template <typename In, int warps, int depth>
struct SharedMemoryRow {
  using Row = WarpGroup<warps>;
  using P = Pairs<In>;
  static constexpr int held = CLUSTERS * depth, places = LISTED * Row::size;
  const uint4* vectors;  // + rank
  uint16_t* list;
  int count;  // vectors of the row
  int rank;

  __device__ bool has(int i) const { return rank + i * Row::size < count; }
  __device__ uint4 vector(int i) const { return vectors[i * Row::size]; }

  __device__ void fetch(const uint4* from) {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      if (has(i)) {
        const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(vectors + i * Row::size));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from + i * Row::size) : "memory");
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  // Computes distances of the largest x and -x of each cluster; returns the row's `top`, keys of its largest x and -x.
  __device__ uint32_t clusters(Row& group, uint32_t (&of)[CLUSTERS]) const {
    uint32_t top = 0;
#pragma unroll
    for (int c = 0; c < CLUSTERS; ++c) {
      uint32_t most = (P::infinity | 0x8000u) * BOTH, least = P::infinity * BOTH;
#pragma unroll
      for (int i = c * depth; i < (c + 1) * depth; ++i) {
        if (has(i)) {
          const uint4 v = vector(i);
          most = max_pair<In>(max_pair<In>(most, max_pair<In>(v.x, v.y)), max_pair<In>(v.z, v.w));
          least = min_pair<In>(min_pair<In>(least, min_pair<In>(v.x, v.y)), min_pair<In>(v.z, v.w));
        }
      }
      most = max_pair<In>(most, __byte_perm(most, 0, 0x1032));
      least = min_pair<In>(least, __byte_perm(least, 0, 0x1032));
      of[c] = __byte_perm(most, least, 0x5410) ^ 0x80000000u;
      top = __vmaxu2(top, ordered_pair(of[c]));
    }
    top = group.largest(top & 0xffffu) | group.largest(top >> 16) << 16;
#pragma unroll
    for (int c = 0; c < CLUSTERS; ++c) of[c] = has(c * depth) ? distances(top, of[c]) : FAR * BOTH;
    return top;
  }

  // Counts distances below the limits among the first n words.
  template <int n>
  __device__ static uint32_t below(Row& group, const uint32_t (&of)[8], uint32_t limits) {
    uint32_t negated = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) negated -= below_pair(of[i], limits);
    return group.sum(counts_of(negated));
  }

  // Upper bounds of the distances at each end, from the clusters. All FAR: unknown. 0: the bound is the extreme value.
  __device__ static uint32_t reach(Row& group, const uint32_t (&of)[CLUSTERS], uint32_t clipped) {
    constexpr int coarse = P::mantissa - 4, wide = P::mantissa + 3;
    const auto count = [&](uint32_t limits) { return below<CLUSTERS>(group, of, limits); };
    const uint32_t near = count(BOTH << wide);  // eight binades are enough for most rows
    const bool enough = (near & 0xffffu) > clipped && near >> 16 > clipped;
    uint32_t found = descend(enough ? wide - 1 : 14, coarse, clipped, count);
    const bool touch = (found & 0xffffu) == 0 || found >> 16 == 0;
    const uint32_t equal = touch ? count(BOTH) : 0;
    constexpr uint32_t step = (1u << coarse) - 1;
    const bool low_end = found >> 16 == 0 && equal >> 16 > clipped;
    const bool high_end = (found & 0xffffu) == 0 && (equal & 0xffffu) > clipped;
    return found | (high_end ? 0 : step) | (low_end ? 0 : step) << 16;
  }

  // Lists the values at or beyond the given reaches; false if the list is too short. An end with reach 0 is omitted.
  __device__ bool gather(Row& group, uint32_t top, uint32_t reaches, uint32_t& length) {
    const int floor = 0xffff - static_cast<int>(P::infinity | 0x8000u);  // key of -inf
    const auto limit = [&](int key, int reach) -> uint32_t {
      return reach == 0 ? P::infinity + 1 : unordered_half(static_cast<uint32_t>(max(key - reach, floor)));  // or NaN
    };
    const uint32_t high = limit(top & 0xffffu, reaches & 0xffffu) * BOTH;
    const uint32_t low = (limit(top >> 16, reaches >> 16) ^ 0x8000u) * BOTH;
    uint32_t marks[2 * depth];
    uint32_t marked = 0;
#pragma unroll
    for (int r = 0; r < 2 * depth; ++r) {
      marks[r] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (has(4 * r + i)) {
          const uint4 v = vector(4 * r + i);
          marks[r] |= beyond<In>(v.x, low, high) & BOTH << (4 * i);
          marks[r] |= beyond<In>(v.y, low, high) & BOTH << (4 * i + 1);
          marks[r] |= beyond<In>(v.z, low, high) & BOTH << (4 * i + 2);
          marks[r] |= beyond<In>(v.w, low, high) & BOTH << (4 * i + 3);
        }
      }
      marked += __popc(marks[r]);
    }
    uint32_t at = group.place(marked, length);
    if (length > places) return false;
    const uint16_t* values = reinterpret_cast<const uint16_t*>(vectors);
#pragma unroll
    for (int r = 0; r < 2 * depth; ++r) {
      for (uint32_t left = marks[r]; left != 0; left &= left - 1) {
        const int bit = __ffs(static_cast<int>(left)) - 1;
        const int vector = 4 * r + (bit >> 2 & 3);
        list[at++] = values[vector * Row::size * VECTOR + (bit & 3) * 2 + (bit >> 4)];
      }
    }
    Row::barrier();
    return true;
  }

  // Exact distances of the bounds, from the list.
  __device__ uint32_t exact(Row& group, uint32_t top, uint32_t reaches, uint32_t length, uint32_t clipped) const {
    uint32_t of[LISTED];
#pragma unroll
    for (int i = 0; i < LISTED; ++i) {
      of[i] = FAR * BOTH;
      if (rank + i * Row::size < length) {
        const uint32_t value = list[rank + i * Row::size];
        of[i] = distances(top, value | (value ^ 0x8000u) << 16);
      }
    }
    const uint32_t furthest = larger(reaches & 0xffffu, reaches >> 16);
    const bool half = length <= LISTED / 2 * Row::size;
    return descend(31 - __clz(static_cast<int>(furthest)), 0, clipped, [&](uint32_t limits) {
      return half ? below<LISTED / 2>(group, of, limits) : below<LISTED>(group, of, limits);
    });
  }

  __device__ uint2 ranks(Row& group, uint32_t top, uint32_t clipped) const {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(vectors);
    return ranks_of_all(group, clipped, top & 0xffffu, 0xffffu - (top >> 16), [&](auto&& visit) {
      for (int i = 0; has(i); ++i) {
        for (int j = 0; j < VECTOR; ++j) visit(ordered_pair(values[i * Row::size * VECTOR + j]) & 0xffffu);
      }
    });
  }

  __device__ Bounds bounds(Row& group, uint32_t clipped) {
    uint32_t of[CLUSTERS];
    const uint32_t top = clusters(group, of), infinite = P::infinity | 0x8000u;
    if ((top & 0xffffu) > infinite) return no_bounds();
    uint32_t all = 0;  // clusters of the row
#pragma unroll
    for (int c = 0; c < CLUSTERS; ++c) all += min(max(count - c * depth * Row::size, 0), Row::size);
    uint32_t found = 0, length = 0;
    bool known = clipped == 0;
    if (!known && clipped < all) {
      const uint32_t reaches = reach(group, of, clipped);
      known = reaches == 0;
      if (!known && (reaches & 0xffffu) < 0x7b00u && reaches >> 16 < 0x7b00u && gather(group, top, reaches, length)) {
        found = exact(group, top, reaches, length, clipped);
        found &= (reaches & 0xffffu ? 0xffffu : 0u) | (reaches >> 16 ? 0xffff0000u : 0u);
        known = true;
      }
    }
    uint32_t high = (top - found) & 0xffffu, low = 0xffffu - ((top - found) >> 16);
    if (!known) {
      const uint2 both = ranks(group, top, clipped);
      low = both.x;
      high = both.y;
    }
    const bool finite = (top & 0xffffu) < infinite && top >> 16 < infinite;
    const uint32_t most = larger(top & 0xffffu, top >> 16);
    return {P::low(unordered_half(low)), P::low(unordered_half(high)), P::low(unordered_half(most)), finite};
  }
};

#endif

}  // namespace lowprec
