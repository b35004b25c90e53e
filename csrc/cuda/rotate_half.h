// A thread's pairs of elements after the random Hadamard transform in half precision (ops/ladder.py hadamard_half), two
// elements per instruction; or unrotated, in BF16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/rotate.h"
#include "numerics/ladder.h"

namespace lowprec {

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t bits_of_pair(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
__device__ __forceinline__ __half2 pair_of_bits(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ __forceinline__ uint32_t bits_of_pair(__nv_bfloat162 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
__device__ __forceinline__ __nv_bfloat162 brain_pair(uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); }

// Two BF16 numbers to half precision.
__device__ __forceinline__ __half2 halves_of(uint32_t pair) {
  return __floats2half2_rn(bits_float(pair << 16), bits_float(pair & 0xffff0000u));
}

// The larger magnitudes of two pairs, with any signs; NaN propagates.
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) {
  uint32_t made;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(made) : "r"(a), "r"(b));
  return made;
}
__device__ __forceinline__ uint32_t larger_brains(uint32_t a, uint32_t b) {
  uint32_t made;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(made) : "r"(a), "r"(b));
  return made;
}

// The larger and the smaller magnitudes of two pairs, with the signs of their products.
__device__ __forceinline__ __half2 larger_halves_signed(__half2 a, __half2 b) {
  uint32_t made;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(made) : "r"(bits_of_pair(a)), "r"(bits_of_pair(b)));
  return pair_of_bits(made);
}
__device__ __forceinline__ __half2 smaller_halves(__half2 a, __half2 b) {
  uint32_t made;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(made) : "r"(bits_of_pair(a)), "r"(bits_of_pair(b)));
  return pair_of_bits(made);
}

// Bits of the largest magnitude of `count` pairs of BF16, as an FP32 number. Instructions of four chains overlap.
template <int count>
__device__ __forceinline__ uint32_t brain_amax(const uint32_t* pairs) {
  uint32_t of[4] = {pairs[0], pairs[1], pairs[2], pairs[3]};
#pragma unroll
  for (int i = 4; i < count; ++i) of[i & 3] = larger_brains(of[i & 3], pairs[i]);
  const uint32_t most = larger_brains(larger_brains(of[0], of[1]), larger_brains(of[2], of[3]));
  return larger(most << 16 & MAGNITUDE, most & 0x7fff0000u);
}

// BF16 values without a rotation.
template <int held>
struct PlainPairs {
  uint32_t v[held / 2];

  // Bits of the largest magnitude of block b, in FP32.
  __device__ __forceinline__ uint32_t amax(int b) const {
    return brain_amax<LADDER_BLOCK / 2>(v + b * (LADDER_BLOCK / 2));
  }
  // Values of block b over 2^unit in half precision.
  __device__ __forceinline__ void scaled(int b, int unit, __half2 (&value)[LADDER_BLOCK / 2]) const {
    const __nv_bfloat162 times = __float2bfloat162_rn(exp2_int(-unit));
#pragma unroll
    for (int i = 0; i < LADDER_BLOCK / 2; ++i) {
      const __nv_bfloat162 product = __hmul2_rn(brain_pair(v[b * (LADDER_BLOCK / 2) + i]), times);
      value[i] = halves_of(bits_of_pair(product));
    }
  }
};

// Values v times 2^binades, with v in half precision.
template <int held>
struct RotatedPairs {
  uint32_t v[held / 2];
  int binades;

  __device__ __forceinline__ uint32_t amax(int b) const {
    constexpr int each = LADDER_BLOCK / 2;
    uint32_t most = larger_halves(v[b * each], v[b * each + 1]);
#pragma unroll
    for (int i = 2; i < each; ++i) most = larger_halves(most, v[b * each + i]);
    const uint32_t top = max(most & 0x7fffu, most >> 16 & 0x7fffu);
    return float_bits(__half2float(__ushort_as_half(static_cast<unsigned short>(top))) * exp2_int(binades));
  }
  // A factor below 2^-24 is zero: such magnitudes are below 2^-9, their codes are zeros, and their sums vanish.
  __device__ __forceinline__ void scaled(int b, int unit, __half2 (&value)[LADDER_BLOCK / 2]) const {
    const __half2 times = __float2half2_rn(exp2_int(max(binades - unit, -126)));
#pragma unroll
    for (int i = 0; i < LADDER_BLOCK / 2; ++i) {
      value[i] = __hmul2_rn(pair_of_bits(v[b * (LADDER_BLOCK / 2) + i]), times);
    }
  }
};

constexpr int HALF_ROTATION = 128;  // elements of a rotation that this file serves
constexpr int HALF_SIGN_WORDS = 2 * SIGN_WORDS;

// `make_signs`, and after these words the same for the first element of each pair alone, as an FP32 sign bit: adding it
// to an element that is shifted to FP32 costs no instruction more.
__device__ __forceinline__ void make_half_signs(uint32_t* signs, int block, const int64_t* seed) {
  make_signs(signs, block, seed);
  if (threadIdx.x >= 32) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) signs[SIGN_WORDS + threadIdx.x * 4 + i] = signs[threadIdx.x * 4 + i] << 16;
}

// The largest `top` in the lanes of a rotation.
template <int held>
__device__ __forceinline__ uint32_t group_largest(uint32_t top) {
#pragma unroll
  for (int l = 1; l < HALF_ROTATION / held; l *= 2) top = larger(top, __shfl_xor_sync(0xffffffffu, top, l));
  return top;
}

// Pairs of BF16 to signed halves, whose largest magnitude in the group is in [64, 128). signs: the lane's of
// `make_half_signs`. Returns the binades.
template <int held>
__device__ __forceinline__ int enlarge(const uint32_t (&pairs)[held / 2], const uint32_t* signs, __half2 (&h)[held / 2]) {
  const int shift = rotation_shift(bits_float(group_largest<held>(brain_amax<held / 2>(pairs))));
  const __nv_bfloat162 times = __float2bfloat162_rn(exp2_int(shift));
#pragma unroll
  for (int i = 0; i < held / 8; ++i) {
    const uint4 flip = reinterpret_cast<const uint4*>(signs)[i];
    const uint4 low = reinterpret_cast<const uint4*>(signs + SIGN_WORDS)[i];
    const uint32_t of[4] = {flip.x, flip.y, flip.z, flip.w}, first[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair = bits_of_pair(__hmul2_rn(brain_pair(pairs[4 * i + j]), times));
      h[4 * i + j] = __floats2half2_rn(bits_float((pair << 16) + first[j]), bits_float((pair ^ of[j]) & 0xffff0000u));
    }
  }
  return shift;
}

// The same from halves that stand for themselves times `scale`, a power of two in [2^-100, 2^100].
template <int held>
__device__ __forceinline__ int enlarge_halves(const uint32_t (&pairs)[held / 2], const uint32_t* signs, float scale,
                                              __half2 (&h)[held / 2]) {
  uint32_t most = larger_halves(pairs[0], pairs[1]);
#pragma unroll
  for (int i = 2; i < held / 2; ++i) most = larger_halves(most, pairs[i]);
  const uint32_t top = group_largest<held>(max(most & 0x7fffu, most >> 16 & 0x7fffu));
  const int shift = rotation_shift(__half2float(__ushort_as_half(static_cast<unsigned short>(top))) * scale);
  const __half2 times = __float2half2_rn(exp2_int(min(shift + exponent(scale), 15)));
#pragma unroll
  for (int i = 0; i < held / 8; ++i) {
    const uint4 flip = reinterpret_cast<const uint4*>(signs)[i];
    const uint32_t of[4] = {flip.x, flip.y, flip.z, flip.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) h[4 * i + j] = pair_of_bits(bits_of_pair(__hmul2_rn(pair_of_bits(pairs[4 * i + j]), times)) ^ of[j]);
  }
  return shift;
}

// Butterflies of 128; lanes hold neighbouring elements. Products with +-1 are exact, so a fused multiply-add rounds like
// a sum or difference.
template <int held>
__device__ __forceinline__ RotatedPairs<held> rotated(__half2 (&h)[held / 2], int binades) {
  constexpr int count = held / 2;
  const __half2 plus_minus = __floats2half2_rn(1.0f, -1.0f);
#pragma unroll
  for (int i = 0; i < count; ++i) h[i] = __hfma2(__high2half2(h[i]), plus_minus, __low2half2(h[i]));
#pragma unroll
  for (int stride = 1; stride < count; stride *= 2) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i & stride) continue;
      const __half2 a = h[i], b = h[i + stride];
      h[i] = __hadd2_rn(a, b);
      h[i + stride] = __hsub2_rn(a, b);
    }
  }
#pragma unroll
  for (int l = 1; l < HALF_ROTATION / held; l *= 2) {
    const __half2 sign = __float2half2_rn(threadIdx.x & l ? -1.0f : 1.0f);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      h[i] = __hfma2(h[i], sign, pair_of_bits(__shfl_xor_sync(0xffffffffu, bits_of_pair(h[i]), l)));
    }
  }
  RotatedPairs<held> made;
#pragma unroll
  for (int i = 0; i < count; ++i) made.v[i] = bits_of_pair(h[i]);
  made.binades = binades;
  return made;
}

// The thread's elements from pairs of BF16, rotated if `rotation` is not 0. gain: log2 of the factor.
template <int rotation, int held>
__device__ __forceinline__ auto values_of(const uint32_t (&pairs)[held / 2], const uint32_t* signs, int gain) {
  if constexpr (rotation == 0) {
    PlainPairs<held> made;
#pragma unroll
    for (int i = 0; i < held / 2; ++i) made.v[i] = pairs[i];
    return made;
  } else {
    __half2 h[held / 2];
    const int shift = enlarge<held>(pairs, signs, h);
    return rotated<held>(h, gain - shift);
  }
}

#endif

}  // namespace lowprec
