// A warp's part of a row: copied into shared memory while the previous row is processed, swizzled to avoid bank
// conflicts on both sides, and read as neighbouring elements in a thread.
#pragma once

#include "cuda/rotate.h"

namespace lowprec {

#if defined(__CUDACC__)

template <typename In, int held>
constexpr int CHUNKS = held * sizeof(In) / 16;  // chunks per thread

// Copies the warp's part of a row, with zeros beyond its end.
template <typename In, int held>
__device__ __forceinline__ void fetch(const In* row, int columns, uint4* to) {
  const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 32 * held;
  constexpr int each = 16 / sizeof(In), chunks = CHUNKS<In, held>;
  const In* from = row + first + lane * each;
  if (first + 32 * held <= columns) {
    uint4* first_chunk = to + swizzled<chunks>(lane / chunks, lane % chunks);
#pragma unroll
    for (int j = 0; j < chunks; ++j) {
      const int chunk = j * 32 + lane;
      uint4* here = to + swizzled<chunks>(chunk / chunks, chunk % chunks);
      if constexpr (chunks <= 4) here = first_chunk + j * 32;  // the same: the swizzle repeats every 8 threads
      copy_async<16>(here, from + j * 32 * each);
    }
    return;
  }
#pragma unroll 1
  for (int chunk = lane; chunk < 32 * chunks; chunk += 32) {
    const int column = first + chunk * each;
    const bool inside = column < columns;
    copy_async<16>(to + swizzled<chunks>(chunk / chunks, chunk % chunks), row + (inside ? column : 0), inside);
  }
}

// Reads the thread's elements as pairs of BF16. scale: of E4M3 codes.
template <typename In, int held>
__device__ __forceinline__ void take_pairs(uint32_t (&pairs)[held / 2], const uint4* from, float scale) {
  constexpr int chunks = CHUNKS<In, held>;
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const uint4 part = from[swizzled<chunks>(threadIdx.x & 31, c)];
    const uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(In) == 2) {
        pairs[4 * c + i] = words[i];
      } else {
        pairs[8 * c + 2 * i] = decoded_pair(words[i] & 0xffffu, scale);
        pairs[8 * c + 2 * i + 1] = decoded_pair(words[i] >> 16, scale);
      }
    }
  }
}

// Reads the thread's elements with their signs.
template <typename In, int held>
__device__ __forceinline__ void take(float (&v)[held], const uint4* from, const uint32_t* signs, float scale) {
  if constexpr (sizeof(In) == 4) {
    const int lane = threadIdx.x & 31;
    constexpr int chunks = CHUNKS<In, held>;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const uint4 part = from[swizzled<chunks>(lane, c)];
      v[4 * c] = bits_float(part.x), v[4 * c + 1] = bits_float(part.y);
      v[4 * c + 2] = bits_float(part.z), v[4 * c + 3] = bits_float(part.w);
    }
    flip_signs(v, signs);
  } else {
    uint32_t pairs[held / 2];
    take_pairs<In, held>(pairs, from, scale);
    signed_values(v, pairs, signs);
  }
}

#endif

}  // namespace lowprec
