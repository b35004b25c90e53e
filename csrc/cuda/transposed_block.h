// Codes of one byte written transposed, in blocks of 128x128: 16 x 16 threads with 8 x 8 elements each. They go through
// 16 KB of shared memory in chunks of 8 bytes, swizzled by column to avoid bank conflicts on both sides.
#pragma once

#include "cuda/launch.h"

namespace lowprec {

Tensor transpose_codes(const Tensor& codes);  // the op transpose

#if defined(__CUDACC__)

constexpr int BLOCK = 128;  // rows and columns of a thread block's matrix

struct BlockPlace {
  int group, lane_column;  // of this thread: rows from 8 * group, columns from 8 * lane_column
  int64_t row, column;
  __device__ BlockPlace()
      : group(threadIdx.x >> 4), lane_column(threadIdx.x & 15),
        row(static_cast<int64_t>(blockIdx.y) * BLOCK + group * 8),
        column(static_cast<int64_t>(blockIdx.x) * BLOCK + lane_column * 8) {}
};

// Writes eight rows of eight one-byte codes transposed: chunk `group` of 16 in each of the eight columns.
__device__ __forceinline__ void transpose_block(const uint32_t (&words)[8][2], uint8_t* transposed, const BlockPlace& at) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    uint32_t out[4][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t r0 = words[4 * half][w], r1 = words[4 * half + 1][w], r2 = words[4 * half + 2][w], r3 = words[4 * half + 3][w];
      const uint32_t low01 = __byte_perm(r0, r1, 0x5140), low23 = __byte_perm(r2, r3, 0x5140);
      const uint32_t high01 = __byte_perm(r0, r1, 0x7362), high23 = __byte_perm(r2, r3, 0x7362);
      out[0][half] = __byte_perm(low01, low23, 0x5410);
      out[1][half] = __byte_perm(low01, low23, 0x7632);
      out[2][half] = __byte_perm(high01, high23, 0x5410);
      out[3][half] = __byte_perm(high01, high23, 0x7632);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = at.lane_column * 8 + w * 4 + j, chunk = at.group ^ at.lane_column;
      *reinterpret_cast<uint2*>(transposed + column * BLOCK + chunk * 8) = make_uint2(out[j][0], out[j][1]);
    }
  }
}

// Writes 128 columns of 128 bytes, 16 bytes per thread; the caller adds a barrier before.
__device__ __forceinline__ void write_transposed(const uint8_t* transposed, uint8_t* codes_t, int64_t rows, int64_t columns) {
  const int quarter = threadIdx.x & 7;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * BLOCK + quarter * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int local = i * 32 + (threadIdx.x >> 3), swizzle = local >> 3;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * BLOCK + local;
    if (column >= columns || row >= rows) continue;
    uint4 v = *reinterpret_cast<const uint4*>(transposed + local * BLOCK + (quarter ^ swizzle >> 1) * 16);
    if (swizzle & 1) v = make_uint4(v.z, v.w, v.x, v.y);
    *reinterpret_cast<uint4*>(codes_t + column * rows + row) = v;
  }
}

#endif

}  // namespace lowprec
