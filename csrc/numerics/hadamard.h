// Walsh-Hadamard transform of a block in registers of one thread or of several lanes of a warp (ops/reference.py
// hadamard): stride 1 first, (a, b) -> (a + b, a - b), the factor block^-1/2 last.
#pragma once

#include "numerics/philox.h"

namespace lowprec {

// block^-1/2 as Python's block ** -0.5, rounded to FP32.
inline float hadamard_factor(int64_t block) {
  return block == 0 ? 1.0f : static_cast<float>(std::pow(static_cast<double>(block), -0.5));
}

// Eight signs: bit j is set if element 8 * group + j of a row is negated; they repeat every `block` elements.
LOWPREC_HD uint32_t sign_bits(uint64_t seed, int group, int block) {
  const Words words = random_words(seed, 0, static_cast<uint64_t>((8 * group & (block - 1)) >> 3));
  uint32_t bits = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int j = 0; j < 8; ++j) bits |= (bits_of(words, j) & 1u) << j;
  if (block >= 8) return bits;
  return block == 4 ? (bits & 15u) * 0x11u : block == 2 ? (bits & 3u) * 0x55u : (bits & 1u) * 0xffu;
}

// Stages with strides below `count` and `block`, within a thread.
template <int count>
LOWPREC_HD void butterflies(float (&v)[count], int block) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int stride = 1; stride < count; stride *= 2) {
    if (block <= stride) continue;
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < count; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = a + b;
      v[i + stride] = a - b;
    }
  }
}

#if defined(__CUDACC__)

// Stages across lanes with `count` values each: lane l has values from count * l on. Products with +-1 are exact, so a
// fused multiply-add rounds like the sum or difference.
template <int count>
__device__ __forceinline__ void butterflies_across(float (&v)[count], int block) {
#pragma unroll 1
  for (int lanes = 1; lanes * count < block; lanes *= 2) {
    const float sign = threadIdx.x & lanes ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < count; ++i) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xffffffffu, v[i], lanes));
  }
}

#endif

}  // namespace lowprec
