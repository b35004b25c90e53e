// A thread's blocks of 16 on the ladder (ops/ladder.py): the best of three rungs, codes in their carrier, sums of the row.
//
// Errors of candidates are judged in half precision, two elements an instruction; their order of summation is that of
// the reference, as is the FP32 one of the row's sums. These become whole numbers, which are added in any order.
#pragma once

#include <cuda_fp16.h>

#include "cuda/rotate.h"
#include "numerics/ladder.h"

namespace lowprec {

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t block_amax(const float* v) {
  float most[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) most[i] = larger_size(v[i], v[i + 4]);
#pragma unroll
  for (int i = 8; i < LADDER_BLOCK; ++i) most[i & 3] = larger_size(most[i & 3], v[i]);
  return float_bits(larger_size(larger_size(most[0], most[1]), larger_size(most[2], most[3])));
}

__device__ __forceinline__ uint32_t bits_of_pair(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
__device__ __forceinline__ __half2 pair_of_bits(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }

// Sum of squared errors of eight pairs under a scale, in units of its square.
template <bool clips>
__device__ __forceinline__ float squared_error(const __half2 (&size)[8], float inverse) {
  const __half2 factor = __float2half2_rn(inverse);
  __half2 square[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const __half2 place = __hmul2_rn(size[i], factor);
    const uint32_t binade = __vmaxu2(bits_of_pair(place) & 0x7c007c00u, 0x3c003c00u);
    const __half2 magic = pair_of_bits(binade + 0x26002600u);  // 1.5 * 2^(9 + e): the sum's last bit is one step
    __half2 rounded = __hsub2_rn(__hadd2_rn(place, magic), magic);
    if constexpr (clips) rounded = __hmin2(rounded, __float2half2_rn(6.0f));
    const __half2 off = __hsub2_rn(rounded, place);
    square[i] = __hmul2_rn(off, off);
  }
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) square[i] = __hadd2_rn(square[i], square[i + half]);
  }
  return __half2float(__hadd_rn(__low2half(square[0]), __high2half(square[0])));
}

// Of the rungs above, at and below `rung` the one of least error; none lies below `floor`.
__device__ __forceinline__ int chosen_rung(const float* v, int rung, int floor) {
  const int step = rung_step(rung), place = rung - 3 * step;
  const float unit = exp2_int(-(step + LADDER_LOW));
  __half2 size[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) size[i] = __floats2half2_rn(fabsf(v[2 * i]) * unit, fabsf(v[2 * i + 1]) * unit);
  const int up = place == 2 ? 0 : place + 1, up_shift = place == 2, low = place == 0 ? 2 : place - 1;
  const int low_shift = place == 0 ? -1 : 0;
  const float ratio = rung_times(up, up_shift), own = rung_times(place, 0), under = rung_times(low, low_shift);
  float least = squared_error<false>(size, inverse_times(up, up_shift)) * ratio * ratio;
  int found = rung + 1;
  float error = squared_error<false>(size, inverse_times(place, 0)) * own * own;
  if (error < least) least = error, found = rung;
  error = squared_error<true>(size, inverse_times(low, low_shift)) * under * under;
  return rung > floor && error < least ? rung - 1 : found;
}

struct RowSums {
  int64_t own = 0, made = 0;
};

// Sixteen products added by halving.
__device__ __forceinline__ float halved(float (&p)[LADDER_BLOCK]) {
#pragma unroll
  for (int half = LADDER_BLOCK / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) p[i] = p[i] + p[i + half];
  }
  return p[0];
}

// Carrier codes of a block under `rung`, four a word; its share of the row's sums.
template <bool corrected>
__device__ __forceinline__ void emit_block(const float* v, int rung, const LadderRow& row, uint32_t* words,
                                           RowSums& sums) {
  const int step = rung_step(rung), place = rung - 3 * step;
  const float inverse = inverse_times(place, step + LADDER_LOW);
  const float shift = rung_times(place, step - row.step + LADDER_TOP);
  const float unit = exp2_int(-(row.step + LADDER_LOW));
  float square[LADDER_BLOCK], product[LADDER_BLOCK];
#pragma unroll
  for (int w = 0; w < LADDER_BLOCK / 4; ++w) {
    float carrier[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = v[4 * w + i];
      carrier[i] = round_e2m1(x * inverse) * shift;
      if constexpr (corrected) {
        const float own = x * unit;
        square[4 * w + i] = own * own;
        product[4 * w + i] = own * carrier[i];
      }
    }
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(carrier[0], carrier[1]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(carrier[2], carrier[3]), __NV_SATFINITE, __NV_E4M3);
    words[w] = row.lost ? 0x7f7f7f7fu : low | high << 16;
  }
  if constexpr (corrected) {
    sums.own += __float2ll_rz(halved(square) * SUM_UNITS);
    sums.made += __float2ll_rz(halved(product) * (SUM_UNITS * exp2_int(-LADDER_TOP)));
  }
}

// Two sums of a warp, in every lane: parts of 24 bits, so that 32 of them fit a word.
__device__ __forceinline__ int64_t warp_sum(int64_t value) {
  const uint32_t low = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(value & 0xffffff));
  const uint32_t high = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(value >> 24));
  return static_cast<int64_t>(high) * (1 << 24) + low;
}

#endif

}  // namespace lowprec
